"""Log probabilities wait for their text: a token is released once all of its characters are, never before.

Stop strings hold text back, and a character may be split over tokens; the log probabilities of those tokens wait as
long. Where a stop string cuts the text, a token is released if any of its characters is: the released tokens spell at
least the text, and nothing that lies wholly in or behind the stop string.
"""

import codecs
from collections import deque
from typing import NamedTuple

from weft.domain.request import TokenLogprob
from weft_gateway.core.events import BytesOf, TokenLogprobOut


class _Held(NamedTuple):
    token: TokenLogprobOut
    end: int  # characters of the answer up to and with the token's last one


class HeldLogprobs:
    """Tokens with their log probabilities, in order, until their text is released."""

    def __init__(self, bytes_of: BytesOf) -> None:
        self._bytes_of = bytes_of
        self._held: deque[_Held] = deque()
        self._decoded = self._released = 0  # characters
        self._begun = b""  # of a character

    def push(self, token: int, logprob: TokenLogprob, chars: int, begun: bytes) -> None:
        """Hold a token that completed `chars` characters and leaves the bytes `begun` of an unfinished one behind."""
        start = self._decoded + self._closes(token)
        self._decoded, self._begun = self._decoded + chars, begun
        self._held.append(_Held(TokenLogprobOut(token, logprob, start), self._decoded + bool(begun)))

    def release(self, chars: int) -> tuple[TokenLogprobOut, ...]:
        """The tokens that are whole after this many more characters of text."""
        self._released += chars
        released: list[TokenLogprobOut] = []
        while self._held and self._held[0].end <= self._released:
            released.append(self._held.popleft().token)
        return tuple(released)

    def cut(self) -> tuple[TokenLogprobOut, ...]:
        """The token that a stop string cuts at the end of the released text, if there is one. No other follows."""
        cut: list[TokenLogprobOut] = []
        while self._held and self._held[0].token.start < self._released:
            cut.append(self._held.popleft().token)
        return tuple(cut)

    def _closes(self, token: int) -> bool:
        """Whether the begun character ends as U+FFFD because this token does not continue it."""
        try:
            codecs.getincrementaldecoder("utf-8")().decode(self._begun + self._bytes_of(token)[:1])
        except UnicodeDecodeError:
            return bool(self._begun)
        return False

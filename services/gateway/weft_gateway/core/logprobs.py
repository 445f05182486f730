"""Log probabilities wait for their text: a token is told once all of its characters are, never before.

Stop strings hold text back, and a character may be split over tokens; the log probabilities of those tokens wait as
long. Where a stop string cuts the text, a token is told if any of its characters is: what is told spells at least the
text, and nothing that lies wholly in or behind the stop string.
"""

import codecs
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from weft_gateway.core.detokenise import BytesOf
from weft_gateway.core.events import TokenLogprob, TokenLogprobOut


@dataclass(frozen=True, slots=True)
class _Held:
    told: TokenLogprobOut
    end: int  # characters of the answer up to and with the token's last one


class HeldLogprobs:
    """Tokens with their log probabilities, in order, until their text is released."""

    def __init__(self, bytes_of: BytesOf) -> None:
        self._bytes_of = bytes_of
        self._held: deque[_Held] = deque()
        self._decoded = self._released = 0  # characters
        self._begun = b""  # of a character

    def push(self, token: int, logprob: TokenLogprob, chars: int, begun: bytes) -> None:
        """A token that completed `chars` characters and leaves these bytes of a begun one behind, if any."""
        start = self._decoded + self._closes(token)
        self._decoded, self._begun = self._decoded + chars, begun
        self._held.append(_Held(TokenLogprobOut(token, logprob, start), self._decoded + bool(begun)))

    def release(self, chars: int) -> tuple[TokenLogprobOut, ...]:
        """So many more characters are told: the tokens that are whole now."""
        self._released += chars
        return self._while(lambda held: held.end <= self._released)

    def cut(self) -> tuple[TokenLogprobOut, ...]:
        """A stop string ends the text here: the token that it cuts, if there is one. What follows is never told."""
        return self._while(lambda held: held.told.start < self._released)

    def _closes(self, token: int) -> bool:
        """Whether the begun character is given up (U+FFFD) because this token does not continue it."""
        try:
            codecs.getincrementaldecoder("utf-8")().decode(self._begun + self._bytes_of(token)[:1])
        except UnicodeDecodeError:
            return bool(self._begun)
        return False

    def _while(self, due: Callable[[_Held], bool]) -> tuple[TokenLogprobOut, ...]:
        told: list[TokenLogprobOut] = []
        while self._held and due(self._held[0]):
            told.append(self._held.popleft().told)
        return tuple(told)

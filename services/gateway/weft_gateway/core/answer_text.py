"""The text of an answer, token by token: bytes to characters, stop strings, the log probabilities that wait for both.

A token stands for bytes; the bytes of an answer run through one incremental UTF-8 decoder, O(1) a token, whole
characters only. A character that is split over tokens waits for its last byte; bytes that are no UTF-8 become U+FFFD,
one per maximal subpart (Unicode, section 3.9), which is what `Tokenizer.decode` does for byte-level tokenizers. An
answer continues its prompt, so the space that sentence decoders strip at the *beginning of a text* is kept.

Stop strings are found across token boundaries, and the result does not depend on how the text is chunked: the stop
string that is complete first wins, among those that end together the longest. Text that may yet become a stop string is
held back; the rest is released at once.

Log probabilities wait for their text: a token is released once all of its characters are, never before. Where a stop
string cuts the text, a token is released if any of its characters is: the released tokens spell at least the text, and
nothing that lies wholly in or behind the stop string.
"""

import codecs
from codecs import utf_8_decode
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from weft.domain.request import FinishReason, SequenceTokens, TokenLogprob
from weft_gateway.core.events import BytesOf, PreparedRequest, TokenLogprobOut

MAX_STOPS = 64
MAX_STOP_CHARS = 512


class AnswerText:
    """The text of one answer to a request. `stop`: the stop string that has ended it."""

    def __init__(self, request: PreparedRequest) -> None:
        self._request = request
        self.stop: str | None = None
        self._detokeniser = Detokeniser(request.bytes_of)
        self._stops = StopMatcher(request.stops, include=request.include_stop)
        self._logprobs = HeldLogprobs(request.bytes_of) if request.sampling.top_logprobs is not None else None
        self._starts: list[int] | None = [] if request.may_reason else None  # of tokens, in characters
        self._chars = 0

    def append(self, event: SequenceTokens, tokens: list[int]) -> str:
        """Take tokens onto `tokens` up to a stop string or max_tokens. Return the text that is certain.

        A stop token is one of the answer's, but its text is not, unless the request has it included. Stop strings are
        looked for behind the first `min_tokens` (as in vLLM).
        """
        text, stops, logprobs, request = "", self._stops, self._logprobs, self._request
        ends_at = len(event.tokens) - 1 if event.finish is FinishReason.STOP else None
        for index, token in enumerate(event.tokens[: request.max_tokens - len(tokens)]):
            tokens.append(token)
            shown = index != ends_at or request.include_stop
            chars = self._detokeniser.push(token) if shown else ""
            if self._starts is not None:
                self._starts.append(self._chars)
                self._chars += len(chars)
            if logprobs is not None:
                logprobs.push(token, event.logprobs[index], len(chars), self._detokeniser.begun)
            text += chars if len(tokens) <= request.sampling.min_tokens else stops.push(chars)
            if stops.matched:
                self.stop = stops.matched
                break
        return text

    def flush(self) -> str:
        """Return what was held back, at the end of an answer."""
        return "" if self.stop else self._stops.push(self._detokeniser.flush()) + self._stops.flush()

    def take_starts(self) -> Sequence[int]:
        """Return, for each token since the last call, the characters of the answer before it."""
        if not self._starts:
            return ()
        starts, self._starts = self._starts, []
        return starts

    def release(self, chars: int) -> tuple[TokenLogprobOut, ...]:
        """Return the tokens that are reported with `chars` more characters of text."""
        if self._logprobs is None:
            return ()
        released = self._logprobs.release(chars)
        return released + self._logprobs.cut() if self.stop else released


class Detokeniser:
    """The text of one answer. `bytes_of(token id)` gives a token's bytes, b"" for a special token."""

    def __init__(self, bytes_of: BytesOf) -> None:
        self._bytes_of = bytes_of
        self.begun = b""  # of a character that needs more bytes; empty where there is none

    def push(self, token: int) -> str:
        """The characters that this token completes."""
        data = self.begun + self._bytes_of(token)
        text, read = utf_8_decode(data, "replace", False)
        self.begun = data[read:]
        return text

    def flush(self) -> str:
        """What an unfinished character leaves at the end: "" or U+FFFD."""
        begun, self.begun = self.begun, b""
        return begun.decode(errors="replace")


class StopMatcher:
    """Release text up to the first stop string; `include`: and that string. At most 64 stop strings, none empty."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise ValueError(f"at most {MAX_STOPS} stop strings of 1 to {MAX_STOP_CHARS} characters")
        self._stops, self._include = tuple(stops), include
        self._begun = [0] * len(stops)  # characters at the text's end that begin each stop string
        self._pending = ""  # the longest of these ends
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain to be part of the answer; nothing after a match.

        Each stop string is searched from where it may have begun: a character is passed over once for each of them.
        """
        if self.matched or not self._stops:
            return "" if self.matched else text
        pending_chars, text = len(self._pending), self._pending + text
        size = keep = len(text)
        matches: list[tuple[int, int]] = []
        for index, stop in enumerate(self._stops):
            start = pending_chars - self._begun[index]
            if (match := text.find(stop, start)) >= 0:
                matches.append((match + len(stop), match))
                continue
            start = text.find(stop[0], max(start, size - len(stop)))
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1)
            self._begun[index] = size - start if start >= 0 else 0
            keep = min(keep, size - self._begun[index])
        if matches:
            end, start = min(matches)
            self.matched = text[start:end]
            return text[: end if self._include else start]
        self._pending = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """The text that was held back, at the end of the answer."""
        pending, self._pending = self._pending, ""
        return "" if self.matched else pending


class _Held(NamedTuple):
    token: TokenLogprobOut
    end: int  # characters of the answer up to and with the token's last one


class HeldLogprobs:
    """Tokens with their log probabilities, in order, until their text is released."""

    def __init__(self, bytes_of: BytesOf) -> None:
        self._bytes_of = bytes_of
        self._pending: deque[_Held] = deque()
        self._decoded = self._released = 0  # characters
        self._begun = b""  # of a character

    def push(self, token: int, logprob: TokenLogprob, chars: int, begun: bytes) -> None:
        """Hold a token that completed `chars` characters and leaves the bytes `begun` of an unfinished one behind."""
        start = self._decoded + self._closes(token)
        self._decoded, self._begun = self._decoded + chars, begun
        self._pending.append(_Held(TokenLogprobOut(token, logprob, start), self._decoded + bool(begun)))

    def release(self, chars: int) -> tuple[TokenLogprobOut, ...]:
        """The tokens that are whole after this many more characters of text."""
        self._released += chars
        released: list[TokenLogprobOut] = []
        while self._pending and self._pending[0].end <= self._released:
            released.append(self._pending.popleft().token)
        return tuple(released)

    def cut(self) -> tuple[TokenLogprobOut, ...]:
        """The token that a stop string cuts at the end of the released text, if there is one. No other follows."""
        cut: list[TokenLogprobOut] = []
        while self._pending and self._pending[0].token.start < self._released:
            cut.append(self._pending.popleft().token)
        return tuple(cut)

    def _closes(self, token: int) -> bool:
        """Whether the begun character ends as U+FFFD because this token does not continue it."""
        try:
            codecs.getincrementaldecoder("utf-8")().decode(self._begun + self._bytes_of(token)[:1])
        except UnicodeDecodeError:
            return bool(self._begun)
        return False

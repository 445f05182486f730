"""The text of an answer, token by token: bytes to characters, stop strings, and log probabilities until the release of
their text.

A token stands for bytes. The bytes of an answer run through an incremental UTF-8 decoder, O(1) a token, whole
characters only. A character split over tokens waits for its last byte. Bytes outside UTF-8 become U+FFFD, a single
U+FFFD per maximal subpart (Unicode, section 3.9), like `Tokenizer.decode` for byte-level tokenizers. An answer
continues its prompt, so the space that sentence decoders strip at the *beginning of a text* is kept.

Stop strings are found across token boundaries, and chunks do not change the match. The first complete stop string wins;
among several with the same end, the longest wins. A possible start of a stop string is held back; the rest is released
at once.

Log probabilities wait for their text: a token is released after all of its characters, never before. If a stop string
cuts the text, a token is released with any of its characters. So the released tokens spell at least the text, and no
token wholly inside or after the stop string is released.
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
    """The text of an answer to a request. `stop`: the stop string that ended it."""

    def __init__(self, request: PreparedRequest) -> None:
        self._request = request
        self.stop: str | None = None
        self._detokeniser = Detokeniser(request.bytes_of)
        self._stops = StopMatcher(request.stops, include=request.include_stop)
        self._logprobs = HeldLogprobs(request.bytes_of) if request.sampling.top_logprobs is not None else None
        self._starts: list[int] | None = [] if request.may_reason else None  # of tokens, in characters
        self._chars = 0

    def append(self, event: SequenceTokens, tokens: list[int]) -> str:
        """Append tokens to `tokens` up to a stop string or max_tokens. Return the certain text.

        A stop token belongs to the answer, but its text does only if the request includes it. Stop strings are searched
        after the first `min_tokens` (as in vLLM).
        """
        text, stops, kept_text, request = "", self._stops, self._logprobs, self._request
        ends_at = len(event.tokens) - 1 if event.finish is FinishReason.STOP else None
        for index, token in enumerate(event.tokens[: request.max_tokens - len(tokens)]):
            tokens.append(token)
            shown = index != ends_at or request.include_stop
            chars = self._detokeniser.push(token) if shown else ""
            if self._starts is not None:
                self._starts.append(self._chars)
                self._chars += len(chars)
            if kept_text is not None:
                kept_text.push(token, event.logprobs[index], len(chars), self._detokeniser.begun)
            text += chars if len(tokens) <= request.sampling.min_tokens else stops.push(chars)
            if stops.matched:
                self.stop = stops.matched
                break
        return text

    def flush(self) -> str:
        """Return the held text at the end of an answer."""
        return "" if self.stop else self._stops.push(self._detokeniser.flush()) + self._stops.flush()

    def take_starts(self) -> Sequence[int]:
        """Return, for each token since the last call, the characters of the answer before it."""
        if not self._starts:
            return ()
        starts, self._starts = self._starts, []
        return starts

    def release(self, chars: int) -> tuple[TokenLogprobOut, ...]:
        """Return the tokens reported with the next `chars` characters of text."""
        if self._logprobs is None:
            return ()
        released = self._logprobs.release(chars)
        return released + self._logprobs.cut() if self.stop else released


class Detokeniser:
    """The decoder of an answer's tokens. `bytes_of(token id)` gives a token's bytes, b"" for a special token."""

    def __init__(self, bytes_of: BytesOf) -> None:
        self._bytes_of = bytes_of
        self.begun = b""  # bytes of an unfinished character; empty: none

    def push(self, token: int) -> str:
        """Return the characters completed by a token."""
        data = self.begun + self._bytes_of(token)
        text, read = utf_8_decode(data, "replace", False)
        self.begun = data[read:]
        return text

    def flush(self) -> str:
        """Return the rest of an unfinished character at the end: "" or U+FFFD."""
        begun, self.begun = self.begun, b""
        return begun.decode(errors="replace")


class StopMatcher:
    """A matcher that releases text up to the first stop string; `include`: including it. At most 64 stop strings, none
    empty."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise ValueError(f"at most {MAX_STOPS} stop strings of 1 to {MAX_STOP_CHARS} characters")
        self._stops, self._include = tuple(stops), include
        self._begun = [0] * len(stops)  # characters at the text's end that may begin each stop string
        self._kept_text = ""  # the longest of these ends
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text certain to be part of the answer; "" after a match.

        Each stop string is searched from its possible beginning: a character is passed over once per stop string.
        """
        if self.matched or not self._stops:
            return "" if self.matched else text
        kept_chars, text = len(self._kept_text), self._kept_text + text
        size = keep = len(text)
        positions: list[tuple[int, int]] = []
        for index, stop in enumerate(self._stops):
            start = kept_chars - self._begun[index]
            if (match := text.find(stop, start)) >= 0:
                positions.append((match + len(stop), match))
                continue
            start = text.find(stop[0], max(start, size - len(stop)))
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1)
            self._begun[index] = size - start if start >= 0 else 0
            keep = min(keep, size - self._begun[index])
        if positions:
            end, start = min(positions)
            self.matched = text[start:end]
            return text[: end if self._include else start]
        self._kept_text = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """Return the held text at the end of the answer."""
        kept_text, self._kept_text = self._kept_text, ""
        return "" if self.matched else kept_text


class _Held(NamedTuple):
    token: TokenLogprobOut
    end: int  # characters of the answer up to the token's last character


class HeldLogprobs:
    """Tokens with their log probabilities, in order, until their text is released."""

    def __init__(self, bytes_of: BytesOf) -> None:
        self._bytes_of = bytes_of
        self._kept_logprobs: deque[_Held] = deque()
        self._decoded = self._released = 0  # characters
        self._begun = b""  # of a character

    def push(self, token: int, logprob: TokenLogprob, chars: int, begun: bytes) -> None:
        """Hold a token with `chars` completed characters; `begun`: the bytes of the unfinished character after it."""
        start = self._decoded + self._closes(token)
        self._decoded, self._begun = self._decoded + chars, begun
        self._kept_logprobs.append(_Held(TokenLogprobOut(token, logprob, start), self._decoded + bool(begun)))

    def release(self, chars: int) -> tuple[TokenLogprobOut, ...]:
        """Return the complete tokens after `chars` more characters of text."""
        self._released += chars
        released: list[TokenLogprobOut] = []
        while self._kept_logprobs and self._kept_logprobs[0].end <= self._released:
            released.append(self._kept_logprobs.popleft().token)
        return tuple(released)

    def cut(self) -> tuple[TokenLogprobOut, ...]:
        """Return the token cut by a stop string at the end of the released text, if any. No token follows it."""
        cut: list[TokenLogprobOut] = []
        while self._kept_logprobs and self._kept_logprobs[0].token.start < self._released:
            cut.append(self._kept_logprobs.popleft().token)
        return tuple(cut)

    def _closes(self, token: int) -> bool:
        """Whether the begun character ends as U+FFFD because this token does not continue it."""
        try:
            codecs.getincrementaldecoder("utf-8")().decode(self._begun + self._bytes_of(token)[:1])
        except UnicodeDecodeError:
            return bool(self._begun)
        return False

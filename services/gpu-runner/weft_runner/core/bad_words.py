"""Sequences of tokens that an answer may not contain (vLLM's `bad_words`): the last token is banned behind the others.

The prompt does not count: a sequence that begins in it and ends in the answer is allowed.
"""

from collections import deque
from collections.abc import Collection, Sequence


class BadWords:
    """`always`: tokens that are sequences alone, and may never be sampled. One owner: its sequence's adjustments."""

    __slots__ = ("_after", "_tail", "always")

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        """`sequences`: none is empty."""
        self.always = frozenset([tokens[0] for tokens in sequences if len(tokens) == 1])
        self._after: dict[int, list[tuple[tuple[int, ...], int]]] = {}  # by the token before the last one
        for *before, last in sequences:
            if before:
                self._after.setdefault(before[-1], []).append((tuple(before), last))
        self._tail: deque[int] = deque(maxlen=max(map(len, sequences)))

    def add(self, token: int) -> Collection[int]:
        """The answer has one more token: those that may not be the next one, beside `always`."""
        self._tail.append(token)
        if (sequences := self._after.get(token)) is None:
            return ()
        tail = tuple(self._tail)
        return [last for before, last in sequences if tail[-len(before) :] == before]

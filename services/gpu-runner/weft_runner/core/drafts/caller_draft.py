"""The draft that a caller gave for an answer: where the answer stands in it, and the tokens there. Pure.

An answer follows its draft token by token. A token that differs is first taken for a changed one: the draft goes on
behind it. If the next token differs as well, tokens were inserted or left out: the place is lost, and nothing is
guessed until the answer's last tokens are found in the draft again.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice

from weft_runner.core.drafts.acceptance import CHANGED, SUREST, Draft, weigh

MAX_SOUGHT_TOKENS = 4096  # of a draft, on each side of the lost place
MAX_PLACES = 128  # of the answer's last token, that are compared on each side
MIN_MATCH, MAX_MATCH = 2, 16  # tokens that stand in the draft again
MAX_PAUSE, SAME_PAUSES = 32, 4  # tokens of an answer between two searches that find nothing, and how many are alike


class CallerDraft:
    """The caller's draft, owned by the drafter. `first`: the position of the answer's first token in its sequence."""

    __slots__ = ("_at", "_due", "_lost", "_matched", "_misses", "_seen", "_tokens")

    def __init__(self, tokens: Sequence[int], first: int) -> None:
        self._tokens, self._seen = tokens, first
        self._at = self._matched = 0  # where the next token is expected, and how many before it were right in a row
        self._lost, self._due, self._misses = False, 0, 0

    def draft(self, tokens: Sequence[int], max_tokens: int, shares: Sequence[float]) -> Draft | None:
        """Guess at most `max_tokens` next tokens of a sequence. None: its place in the draft is lost or at the end."""
        self._follow(tokens)
        if self._lost or self._at >= len(self._tokens):
            return None
        guesses = self._tokens[self._at : self._at + max_tokens]
        first = SUREST if self._matched else CHANGED
        return weigh(guesses, (first, *[SUREST] * (len(guesses) - 1)), shares)

    def _follow(self, tokens: Sequence[int]) -> None:
        """Read the new tokens of the answer."""
        draft_tokens = self._tokens
        for token in tokens[self._seen :]:
            if self._lost:
                break
            if self._at < len(draft_tokens) and draft_tokens[self._at] == token:
                self._matched += 1
            else:
                self._lost, self._matched = not self._matched, 0
            self._at += not self._lost
        self._seen = len(tokens)
        if self._lost and self._seen >= self._due:
            self._search(tokens[-MAX_MATCH:])

    def _search(self, tail: Sequence[int]) -> None:
        """Continue after the longest match of the answer's end, nearest to the lost place."""
        at = self._at
        sides = (at, at + MAX_SOUGHT_TOKENS), (max(0, at - MAX_SOUGHT_TOKENS), at)
        places = chain.from_iterable(islice(self._places(tail[-1], *side), MAX_PLACES) for side in sides)
        match, _, place = max(
            ((self._match(place, tail), -abs(place - at), place) for place in places), default=(0,) * 3
        )
        if match >= MIN_MATCH:
            self._at, self._lost, self._misses = place, False, 0
        else:
            self._due = self._seen + min(1 + self._misses // SAME_PAUSES, MAX_PAUSE)
            self._misses += 1

    def _places(self, token: int, first: int, last: int) -> Iterator[int]:
        """Find the places behind each `token` of a part of the draft."""
        while first < last:
            try:
                first = self._tokens.index(token, first, last) + 1
            except ValueError:
                return
            yield first

    def _match(self, place: int, tail: Sequence[int]) -> int:
        """Count the tokens before `place` that equal the last tokens of the answer."""
        context = self._tokens[max(0, place - len(tail)) : place]
        pairs = zip(reversed(context), reversed(tail), strict=False)
        return next((count for count, (left, right) in enumerate(pairs) if left != right), min(len(context), len(tail)))

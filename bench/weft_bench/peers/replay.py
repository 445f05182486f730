"""Answers that are known, drafted for step by step: how much of the drafts is right, and what they take. Pure.

A worker whose Python has no weft reads this beside itself: it needs the standard library alone.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean, median
from typing import Protocol

Answer = tuple[Sequence[int], Sequence[int]]  # its prompt, and its tokens


class Drafts(Protocol):
    """What drafts for one request at a time, and keeps the answers of those before."""

    def begin(self, prompt: Sequence[int]) -> None: ...
    def draft(self, most: int) -> Sequence[int]: ...
    def take(self, tokens: Sequence[int]) -> None:
        """Take what a step has given: leading guesses that were right, and one token more."""
        ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Replayed:
    """The sums over all checked steps; `keep_us`: what a step's tokens and its share of begin and end take to keep."""

    steps: int
    tokens: int
    guesses: int
    draft_median_us: float
    draft_mean_us: float
    keep_us: float

    @property
    def tokens_a_step(self) -> float:
        return self.tokens / self.steps


def replay(
    drafts: Drafts, answers: Sequence[Answer], warm: int, most: int, clock: Callable[[], float] = time.perf_counter
) -> Replayed:
    """Draft at most `most` guesses for each step of each answer; those of the first `warm` are not counted.

    An answer's first token is its prompt's. Raises ValueError: no checked answer has a second one.
    """
    steps, guesses, keep_s, draft_s = 0, 0, 0.0, list[float]()
    for number, (prompt, answer) in enumerate(answers):
        at, began = 1, clock()
        drafts.begin(prompt)
        drafts.take(answer[:1])
        kept_s, drafted_s, guessed = clock() - began, list[float](), 0
        while at < len(answer):
            began = clock()
            draft = drafts.draft(most)
            drafted = clock()
            given = answer[at : at + 1 + _n_right(draft, answer[at:])]
            taking = clock()
            drafts.take(given)
            kept_s += clock() - taking
            drafted_s.append(drafted - began)
            at, guessed = at + len(given), guessed + len(draft)
        began = clock()
        drafts.end()
        kept_s += clock() - began
        if number >= warm:
            steps, guesses, keep_s = steps + len(drafted_s), guesses + guessed, keep_s + kept_s
            draft_s += drafted_s
    if not steps:
        raise ValueError(f"expected answers of several tokens behind the first {warm}, got none")
    tokens = sum(max(0, len(answer) - 1) for _, answer in answers[warm:])
    return Replayed(steps, tokens, guesses, 1e6 * median(draft_s), 1e6 * fmean(draft_s), 1e6 * keep_s / steps)


def _n_right(draft: Sequence[int], truth: Sequence[int]) -> int:
    """Count the leading guesses that are right."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(draft, truth, strict=False)))

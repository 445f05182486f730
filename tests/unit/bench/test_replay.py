"""Known answers drafted for step by step: what is counted, and what the runner's own drafter makes of them."""

from collections.abc import Sequence
from itertools import count

import pytest

from harness.draft_search import search_plainly
from weft_bench.speculate_arctic import Replayed, Suffixes, replay

ANSWER = ([7], [1, 2, 3, 4, 5, 6])


class Scripted:
    """Drafts what it is told, in turn; `seen`: what it was given."""

    def __init__(self, *drafts: Sequence[int]) -> None:
        self._drafts, self.seen = iter(drafts), list[object]()

    def begin(self, prompt: Sequence[int]) -> None:
        self.seen.append(("begin", prompt))

    def draft(self, most: int) -> Sequence[int]:
        return next(self._drafts)[:most]

    def take(self, tokens: Sequence[int]) -> None:
        self.seen.append(tokens)

    def end(self) -> None:
        self.seen.append("end")


def test_a_step_gives_what_is_right_of_its_draft_and_one_token_more() -> None:
    drafts, ticks = Scripted((2, 3, 9), (), (6, 7)), count()
    replayed = replay(drafts, [ANSWER], 0, 8, clock=lambda: float(next(ticks)))
    assert drafts.seen == [("begin", [7]), [1], [2, 3, 4], [5], [6], "end"]
    assert replayed == Replayed(3, 5, 5, 1e6, 1e6, keep_us=1e6 * 5 / 3)
    assert replayed.tokens_a_step == 5 / 3


def test_answers_before_the_checked_ones_are_drafted_for_but_not_counted() -> None:
    drafts = Scripted((2, 3, 4, 5, 6), (), (3, 4, 5), ())
    replayed = replay(drafts, [ANSWER, ANSWER, ([8], [1])], 1, 8)
    assert (replayed.steps, replayed.tokens, replayed.guesses) == (2, 5, 3)
    with pytest.raises(ValueError, match="expected answers of several tokens"):
        replay(Scripted(), [([8], [1])], 0, 8)


def test_the_runners_drafter_finds_an_answer_that_comes_again_within_its_limit() -> None:
    drafts = Suffixes(search_plainly)
    replayed = replay(drafts, [(prompt, [*range(20, 60)]) for prompt in ([7], [8], [9])], 2, 4)
    assert replayed.tokens_a_step > 4
    assert replayed.guesses <= 4 * replayed.steps
    assert drafts.drafter.figures.accepted > 30
    assert drafts.drafter.answers.n_bytes > 3 * 40 * 4

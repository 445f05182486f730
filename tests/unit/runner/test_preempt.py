"""Who leaves when pages are short."""

from dataclasses import dataclass

import pytest

from harness.runner_machine import session, start_of
from weft.domain.request import Priority
from weft_runner.core import Sequence
from weft_runner.core.preempt.preemption import select_victim
from weft_runner.core.swap.swaps import MAX_SWAPS


@dataclass(frozen=True)
class Here:
    """A sequence, in the order of arrival."""

    key: str
    priority: Priority = Priority.INTERACTIVE
    swaps: int = 0
    stays: bool = False
    leaves: bool = False
    paused: bool = False

    def sequence(self, arrived: float) -> Sequence:
        start = start_of(
            self.key, 1, (1,), 9, priority=self.priority, stays=self.stays, leaves=self.leaves, waited_s=-arrived
        )
        sequence = Sequence(start, session(), "g", admitted=1, now=0.0, max_context_tokens=40)
        sequence.swaps = self.swaps
        return sequence


BATCH = Priority.BATCH


@pytest.mark.parametrize(
    ("here", "victim"),
    [
        ([Here("old"), Here("new")], "new"),
        ([Here("old", BATCH), Here("new")], "old"),
        ([Here("old"), Here("new", swaps=MAX_SWAPS)], "old"),
        ([Here("old"), Here("new", swaps=MAX_SWAPS - 1)], "new"),
        ([Here("old"), Here("new", stays=True)], "old"),
        ([Here("old", stays=True), Here("new", swaps=MAX_SWAPS)], "new"),
        ([Here("old", leaves=True, paused=True), Here("new")], "old"),
        ([Here("old", leaves=True), Here("new")], "new"),
        ([Here("old", leaves=True, paused=True), Here("new", BATCH)], "new"),
    ],
    ids=[
        "the latest arrival", "the lowest priority first", "one that left often stays", "unless it may leave once more",
        "one that is to stay stays", "where all are such, the latest", "a paused one that is to leave comes first",
        "and waits until it pauses", "and is of the lowest priority, too",
    ],
)  # fmt: skip
def test_who_leaves(here: list[Here], victim: str) -> None:
    sequences = [one.sequence(arrived) for arrived, one in enumerate(here)]
    paused = [sequence for one, sequence in zip(here, sequences, strict=True) if one.paused]
    assert select_victim(sequences, paused).key == victim

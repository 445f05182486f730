"""Iterations from the order of a role to the first token of the phase that it adds."""

import pytest

from weft.domain.runner import RunnerRole
from weft_runner.core import Batch, Row
from weft_runner.core.role_change import RoleChanges

PROMPT = Batch((Row("p", "", 8, samples=True),), n_prefills=1)
DECODE = Batch((Row("d", "", 1, samples=True),), n_prefills=0)


@pytest.mark.parametrize(
    ("before", "after", "batches", "iterations"),
    [
        (RunnerRole.TOKEN, RunnerRole.MIXED, [DECODE, DECODE, PROMPT, PROMPT], [3]),
        (RunnerRole.TOKEN, RunnerRole.PROMPT, [PROMPT], [1]),
        (RunnerRole.PROMPT, RunnerRole.TOKEN, [PROMPT, DECODE], [2]),
        (RunnerRole.MIXED, RunnerRole.TOKEN, [PROMPT, DECODE], []),
        (RunnerRole.TOKEN, RunnerRole.TOKEN, [PROMPT], []),
    ],
)
def test_iterations_run_to_the_first_token_of_the_added_phase(
    before: RunnerRole, after: RunnerRole, batches: list[Batch], iterations: list[int]
) -> None:
    changes = RoleChanges()
    changes.ordered(before, after, 40)
    for number, batch in enumerate(batches, 41):
        changes.ran(batch, number)
    assert (changes.count, changes.iterations) == (len(iterations), sum(iterations))


def test_a_change_that_is_taken_back_before_its_first_token_does_not_count() -> None:
    changes = RoleChanges()
    changes.ordered(RunnerRole.TOKEN, RunnerRole.MIXED, 0)
    changes.ordered(RunnerRole.MIXED, RunnerRole.TOKEN, 1)
    changes.ran(PROMPT, 2)
    assert changes.count == 0

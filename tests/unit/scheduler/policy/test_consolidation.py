"""The runner that is emptied, and those of its sequences that leave."""

from dataclasses import replace
from typing import Any

import pytest

from weft_scheduler.core.policy.consolidation.consolidation import (
    ConsolidationRunner,
    RunningSequence,
    select_leaving,
    select_sources,
)
from weft_scheduler.core.policy.placement.runner_index import RunnerShape

SHAPE = RunnerShape(64, 1000, "class-a")
SEQUENCE = RunningSequence("r", "a", 8, 200, 100, 150, 1000.0, True)
RUNNER = ConsolidationRunner("r", SHAPE, True, 1, 8, 8, 1600, 3200, 16, frozenset({"a"}), 2, 0.02, 1000.0)
PERIOD_S = 10.0


def source(**changes: Any) -> ConsolidationRunner:
    return replace(RUNNER, uuid="source", **changes)


def target(**changes: Any) -> ConsolidationRunner:
    return replace(RUNNER, uuid="target", working_set=5, **changes)


def leaving(runners: list[ConsolidationRunner], *sequences: RunningSequence) -> list[str] | None:
    """Return who leaves the runner `source`, where the others do not let go of theirs."""
    ours = [runner for runner in select_sources(runners) if runner.uuid == "source"]
    found = [select_leaving(runner, sequences, runners, PERIOD_S) for runner in ours]
    return [sequence.request_id for sequence in found[0]] or None if found else None


@pytest.mark.parametrize(
    ("case", "runners", "sequence"),
    [
        ("nobody else is there", [source()], SEQUENCE),
        ("the other runner is at its best batch", [source(), replace(target(), working_set=8)], SEQUENCE),
        ("the other runner is emptier", [source(working_set=3), replace(target(), working_set=2)], SEQUENCE),
        ("the other runner takes nothing new", [source(), target(accepts=False)], SEQUENCE),
        ("too few pages", [source(), target(free_tokens=144)], SEQUENCE),
        ("no slot", [source(), target(busy_adapters=frozenset("bc"))], SEQUENCE),
        ("too high a rank", [source(), target(shape=SHAPE._replace(max_rank=4))], SEQUENCE),
        ("another numerics class", [source(), target(shape=SHAPE._replace(numerics_class="class-b"))], SEQUENCE),
        ("too small a context", [source(), target(shape=SHAPE._replace(max_context_tokens=199))], SEQUENCE),
        ("it ends within the period", [source(), target()], SEQUENCE._replace(remaining_tokens=500.0)),
        ("it has migrated often enough", [source(), target()], SEQUENCE._replace(movable=False)),
        ("recomputing costs a quarter of the gain", [source(), target()], SEQUENCE._replace(context_tokens=5001)),
        ("the cost is not known", [source(prefill_tokens_per_s=0.0), target()], SEQUENCE),
        ("the gain is not known", [source(step_s=0.0), target()], SEQUENCE),
        ("more than half of its memory", [source(free_tokens=1599), target()], SEQUENCE),
        ("more than half of its best batch", [source(working_set=5), replace(target(), working_set=6)], SEQUENCE),
    ],
)
def test_nothing_leaves_where(case: str, runners: list[ConsolidationRunner], sequence: RunningSequence) -> None:
    assert leaving(runners, sequence) is None, case
    assert leaving([source(), target()], SEQUENCE) == ["r"], "and else it does"


def test_what_ends_soon_stays_and_shortens_the_gain() -> None:
    short = SEQUENCE._replace(request_id="short", remaining_tokens=400.0)
    assert leaving([source(working_set=2), target()], SEQUENCE, short) == ["r"]
    costly = SEQUENCE._replace(context_tokens=4000)  # 16 s by the factor, and 20 - 8 s are saved
    shorter = short._replace(request_id="shorter", remaining_tokens=100.0)
    assert leaving([source(working_set=3), target()], costly, short, shorter) is None
    assert leaving([source(working_set=2), target()], costly) == ["r"]
    assert leaving([source(), target()], SEQUENCE._replace(context_tokens=5000)) == ["r"], "20 s, and as much is saved"


def test_all_that_outlast_the_period_fit_or_none_leaves() -> None:
    two = [SEQUENCE, SEQUENCE._replace(request_id="s")]
    assert leaving([source(working_set=2), target()], *two) == ["r", "s"]
    assert leaving([source(working_set=2), target(free_tokens=2 * 160)], *two) == ["r", "s"]
    assert leaving([source(working_set=2), target(free_tokens=2 * 160 - 1)], *two) is None
    assert leaving([source(working_set=2), replace(target(), working_set=6)], *two) == ["r", "s"]
    slots = [sequence._replace(adapter=adapter) for sequence, adapter in zip(two, "bc", strict=True)]
    assert leaving([source(working_set=2), target()], *slots) is None, "it has one slot left"
    assert leaving([source(working_set=2), replace(target(), working_set=7)], *two) is None
    others = [replace(target(), working_set=7), replace(target(), uuid="third", working_set=7)]
    assert leaving([source(working_set=2), *others], *two) == ["r", "s"]


def test_one_that_takes_nothing_new_is_emptied_first_and_onto_emptier_ones() -> None:
    victim = source(accepts=False, working_set=4)
    assert leaving([victim, replace(RUNNER, uuid="idle", working_set=0), replace(target(), working_set=3)], SEQUENCE)


def test_those_that_take_nothing_new_are_emptied_first_then_the_least_loaded() -> None:
    runners = [
        replace(RUNNER, uuid="fuller", working_set=3), replace(RUNNER, uuid="light", working_set=1),
        replace(RUNNER, uuid="victim", accepts=False, working_set=4),
    ]  # fmt: skip
    for first in ("victim", "light"):
        assert select_sources([*runners, target()])[0].uuid == first
        runners = runners[:2]


def test_the_next_runner_is_tried_where_the_least_loaded_cannot_be_emptied() -> None:
    assert leaving([replace(RUNNER, uuid="stuck", working_set=1), source(working_set=2), target()], SEQUENCE) == ["r"]

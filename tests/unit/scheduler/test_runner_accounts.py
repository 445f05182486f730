"""What is free: the last report minus the Assigns that are not in it."""

from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.scheduler_driver import SPEC, ReportedState, sequence
from weft.domain.adapter import AdapterState, Tier
from weft.domain.ids import NEVER, Epoch, RunnerId
from weft.domain.runner import Overrun, ReportGap, ReportInvalid, RunnerFigures, RunnerReport, SequenceState
from weft_scheduler.core.model.runner import RunnerAccount, StaleReport, UnackedAssign, pages_of

ID = RunnerId("a", "i")
E = [Epoch(1, i) for i in range(40)]


def full(*sequences: SequenceState, version: int = 1, free: int = 100, owed: int = 0) -> RunnerReport:
    overruns = [Overrun("x", NEVER, owed, 0)] if owed else []
    return RunnerReport(version, True, RunnerFigures(free), sequences, overruns=overruns)


def runner_with(*sequences: SequenceState, free: int = 100, owed: int = 0) -> RunnerAccount:
    runner = RunnerAccount(ID)
    runner.describe(replace(SPEC, runner=ID, max_sequences=64))
    runner.accounts.apply(full(*sequences, free=free, owed=owed), 0.0)
    return runner


def test_pages_are_counted_up() -> None:
    assert [pages_of(n, 16) for n in (1, 16, 17)] == [1, 1, 2]


@pytest.mark.parametrize("whole", [True, False])
def test_an_assign_counts_until_a_report_includes_its_epoch(whole: bool) -> None:
    runner = runner_with(sequence("r", E[1], "", 8), free=50)
    runner.accounts.own("r", UnackedAssign(E[2], 10, ""))
    assert (runner.accounts.free_pages, runner.accounts.working_set) == (40, 2)
    old = full(sequence("r", E[1], "", 8), version=2, free=50) if whole else RunnerReport(2, False, RunnerFigures(50))
    assert runner.accounts.apply(old, 1.0) == ([], [])
    assert runner.accounts.free_pages == 40
    new = sequence("r", E[2], "", 8)
    report = full(new, version=3, free=38) if whole else RunnerReport(3, False, RunnerFigures(38), (new,))
    assert runner.accounts.apply(report, 2.0) == (["r"], [])
    assert (runner.accounts.free_pages, runner.accounts.working_set) == (38, 1)


def test_what_a_report_includes_is_counted_until_the_next_although_it_is_over() -> None:
    runner = runner_with(sequence("r", E[1], "sha256:1", 8), free=50)
    runner.accounts.disown("r")
    assert (runner.accounts.free_pages, runner.accounts.working_set, runner.accounts.active) == (50, 1, {"sha256:1": 1})


def test_free_pages_are_never_negative_and_owed_ones_are_not_free() -> None:
    assert runner_with(free=5, owed=2).accounts.free_pages == 3
    assert runner_with(free=5, owed=9).accounts.free_pages == 0
    assert RunnerAccount(ID).accounts.free_pages == 0


def test_a_report_that_does_not_follow_leaves_the_runner_as_it_was() -> None:
    runner = runner_with(sequence("r", E[1]), free=50)
    for error, report in (
        (ReportGap, RunnerReport(3, False, RunnerFigures(1))),
        (StaleReport, RunnerReport(1, False, RunnerFigures(1))),
        (StaleReport, RunnerReport(0, True, RunnerFigures(1))),
        (ReportInvalid, RunnerReport(2, False, RunnerFigures(101))),
        (ReportInvalid, RunnerReport(2, False, RunnerFigures(1), [sequence(f"s{i}", E[1]) for i in range(128)])),
    ):
        with pytest.raises(error):
            runner.accounts.apply(report, 1.0)
        assert (runner.report.version, runner.accounts.free_pages, runner.accounts.working_set) == (1, 50, 1)


STATES = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from("abcde"), st.tuples(st.integers(1, 3), st.sampled_from(["", "d1", "d2"]))),
        st.dictionaries(
            st.sampled_from(["d1", "d2", "d3"]), st.tuples(st.sampled_from([*Tier]), st.sampled_from(["", "torn"]))
        ),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)  # fmt: skip


@given(STATES)
def test_changes_add_up_to_the_whole_state(states: list[Any]) -> None:
    """Reports of what changed leave a runner as full reports do, whatever was assigned meanwhile."""
    changing, whole, sent = runner_with(), runner_with(), ReportedState(ID, "s")
    sent.report(RunnerFigures(100), (), (), 0)
    for number, (sequences, adapters, assign) in enumerate(states, 2):
        if assign:
            for runner in (changing, whole):
                runner.accounts.own(f"new{number}", UnackedAssign(E[number], 2, "d1"))
            sequences = {**sequences, f"new{number - 1}": (9, "d1")}
        reported = [sequence(name, Epoch(1, e), digest) for name, (e, digest) in sequences.items()]
        on_runner = [AdapterState(digest, tier, error=error) for digest, (tier, error) in adapters.items()]
        report = sent.report(RunnerFigures(50), reported, on_runner, 0)
        assert report.version == number
        one = changing.accounts.apply(report, 1.0)
        two = whole.accounts.apply(RunnerReport(number, True, RunnerFigures(50), reported, adapters=on_runner), 1.0)
        assert [sorted(part) for part in one] == [sorted(part) for part in two]
        for name in ("report.sequences", "report.errors", "report.adapters", "accounts.active", "accounts.unacked"):
            assert attrgetter(name)(changing) == attrgetter(name)(whole), name
        assert changing.accounts.unacked_pages == whole.accounts.unacked_pages
        assert changing.accounts.free_pages == whole.accounts.free_pages
        assert sorted(changing.accounts.busy_adapters(("p",))) == sorted({*changing.accounts.active, "p"})


@dataclass
class Book:
    """A runner's own book: what it really holds, exact at any time."""

    free: int = 100
    held: dict[str, tuple[Epoch, int]] = field(default_factory=dict[str, tuple[Epoch, int]])

    def report(self, number: int) -> RunnerReport:
        return full(*[sequence(r, epoch) for r, (epoch, _) in self.held.items()], version=number, free=self.free)


@given(st.lists(st.sampled_from(["assign", "arrive", "finish", "report"]), max_size=60), st.randoms())
def test_an_assign_within_the_capacity_always_finds_it_whatever_is_late(steps: list[str], chance: Any) -> None:
    """With Assigns and reports each in order but arbitrarily late, the runner never has to answer NoCapacity."""
    runner, book = runner_with(), Book()
    travelling: list[tuple[str, Epoch, int]] = []
    for number, step in enumerate(steps, 2):
        if step == "assign" and (free := runner.accounts.free_pages):
            pages = chance.randint(1, free)
            runner.accounts.own(f"r{number}", UnackedAssign(Epoch(1, number), pages, ""))
            travelling.append((f"r{number}", Epoch(1, number), pages))
        elif step == "arrive" and travelling:
            request_id, epoch, pages = travelling.pop(0)
            assert pages <= book.free
            book.free -= pages
            book.held[request_id] = (epoch, pages)
        elif step == "finish" and book.held:
            request_id = chance.choice(sorted(book.held))
            book.free += book.held.pop(request_id)[1]
            if request_id in runner.accounts.unacked:
                runner.accounts.apply(book.report(number), 1.0)  # the report of a finish comes at once
                runner.accounts.disown(request_id)
        elif step == "report":
            runner.accounts.apply(book.report(number), 1.0)
        assert runner.accounts.unacked_pages == sum(p.pages for p in runner.accounts.unacked.values())
        assert runner.accounts.free_pages <= book.free - sum(pages for *_, pages in travelling)

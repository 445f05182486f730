"""What is free: the last report minus the Assigns that are not in it."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weft_scheduler.core import room
from weft_scheduler.core.state import Pending, Runner
from weft_scheduler.core.values import Epoch, RunnerId, RunnerReport, RunnerSpec, SequenceView

SPEC = RunnerSpec("h:1", "acme/p", 16, 100, 8, 2, 64, 1600)
E = [Epoch(1, i) for i in range(40)]


def runner_with(*sequences: SequenceView, free: int = 100, owed: int = 0) -> Runner:
    runner = Runner(RunnerId("a", "i"))
    runner.spec = SPEC
    room.include(runner, RunnerReport(runner.id, SPEC, 1, free, sequences, owed_pages=owed))
    return runner


def test_pages_are_counted_up() -> None:
    assert [room.pages_of(n, 16) for n in (1, 16, 17)] == [1, 1, 2]


def test_an_assign_counts_until_a_report_includes_its_epoch() -> None:
    runner = runner_with(SequenceView("r", E[1], "", 8), free=50)
    room.reserve(runner, "r", Pending(E[2], 10, ""))
    assert (room.free_pages(runner), room.working_set(runner)) == (40, 2)
    old = RunnerReport(runner.id, SPEC, 2, 50, (SequenceView("r", E[1], "", 8),))
    assert room.include(runner, old) == []
    assert room.free_pages(runner) == 40
    new = RunnerReport(runner.id, SPEC, 3, 38, (SequenceView("r", E[2], "", 8),))
    assert room.include(runner, new) == ["r"]
    assert (room.free_pages(runner), room.working_set(runner)) == (38, 1)


def test_what_a_report_includes_is_counted_until_the_next_although_it_is_over() -> None:
    runner = runner_with(SequenceView("r", E[1], "sha256:1", 8), free=50)
    room.release(runner, "r")
    assert (room.free_pages(runner), room.working_set(runner), runner.active) == (50, 1, {"sha256:1": 1})


def test_free_pages_are_never_negative_and_owed_ones_are_not_free() -> None:
    assert room.free_pages(runner_with(free=5, owed=2)) == 3
    assert room.free_pages(runner_with(free=5, owed=9)) == 0
    assert room.free_pages(Runner(RunnerId("a", "i"))) == 0


@dataclass
class Book:
    """A runner's own book: what it really holds, exact at any time."""

    free: int = 100
    held: dict[str, tuple[Epoch, int]] = field(default_factory=dict[str, tuple[Epoch, int]])

    def report(self, number: int) -> RunnerReport:
        views = tuple(SequenceView(r, epoch, "", 1) for r, (epoch, _) in self.held.items())
        return RunnerReport(RunnerId("a", "i"), SPEC, number, self.free, views)


@given(st.lists(st.sampled_from(["assign", "arrive", "finish", "report"]), max_size=60), st.randoms())
def test_an_assign_within_the_room_always_finds_it_whatever_is_late(steps: list[str], chance: Any) -> None:
    """With Assigns and reports each in order but arbitrarily late, the runner never has to say NoRoom."""
    runner, book = runner_with(), Book()
    travelling: list[tuple[str, Epoch, int]] = []
    for number, step in enumerate(steps, 1):
        if step == "assign" and (free := room.free_pages(runner)):
            pages = chance.randint(1, free)
            room.reserve(runner, f"r{number}", Pending(Epoch(1, number), pages, ""))
            travelling.append((f"r{number}", Epoch(1, number), pages))
        elif step == "arrive" and travelling:
            request_id, epoch, pages = travelling.pop(0)
            assert pages <= book.free
            book.free -= pages
            book.held[request_id] = (epoch, pages)
        elif step == "finish" and book.held:
            request_id = chance.choice(sorted(book.held))
            book.free += book.held.pop(request_id)[1]
            if request_id in runner.pending:
                room.include(runner, book.report(number))  # the report of a finish comes at once
                room.release(runner, request_id)
        elif step == "report":
            room.include(runner, book.report(number))
        assert runner.pending_pages == sum(p.pages for p in runner.pending.values())
        assert room.free_pages(runner) <= book.free - sum(pages for *_, pages in travelling)

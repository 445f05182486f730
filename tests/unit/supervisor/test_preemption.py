"""Who leaves on an overrun; and a small runner with pages, simulated to its end."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.ids import Epoch, RunnerId
from weft.domain.request import Priority
from weft.domain.runner import (
    Overrun,
    PreemptDecision,
    RunnerBook,
    RunnerFigures,
    RunnerReport,
    RunnerSpec,
    SequenceState,
)
from weft_supervisor.core import Preemption, select_victim, violation

RUNNER = RunnerId("u", "1")
EPOCH = Epoch(1, 1)


def sequence(
    name: str, arrived_ms: int, *, pages: int = 1, reservation: int = 16, stays: bool = False
) -> SequenceState:
    return SequenceState(name, EPOCH, "g", "", pages, reservation, arrived_ms, stays)


def book(
    *sequences: SequenceState,
    paused: str = "",
    free: int = 0,
    overruns: tuple[Overrun, ...] = (),
    runner: RunnerId = RUNNER,
) -> RunnerBook:
    overruns = overruns or tuple(
        Overrun(s.request_id, s.epoch, 1, s.reservation_tokens * 2) for s in sequences if s.request_id in paused
    )
    pages = free + sum(s.reserved_pages for s in sequences)
    found = RunnerBook(RunnerSpec(runner, "h:1", "ns/p", 16, max(pages, 1), 64, 4, 8, 16))
    found.apply(RunnerReport(1, True, RunnerFigures(free), sequences, overruns=overruns))
    return found


def victim(found: RunnerBook) -> tuple[str, str, int] | None:
    """Return who leaves, for whom, and what it reserves next."""
    chosen = select_victim(found)
    return chosen and (chosen.request_id, chosen.for_request_id, chosen.reservation_tokens)


A, B, C = (sequence(name, arrived_ms) for arrived_ms, name in enumerate("abc", 1))
SWAPPED = sequence("swapped", 4, pages=0)


@pytest.mark.parametrize(
    ("case", "here", "paused", "free", "expected"),
    [
        ("the newest leaves and keeps its own reservation", (A, B, C), "a", 0, ("c", "a", 16)),
        ("the newest may be the overrunner, then it doubles", (A, B, C), "c", 0, ("c", "c", 32)),
        ("the pages go to the oldest of those that wait", (A, B, C), "cb", 0, ("c", "b", 32)),
        ("with a free page the runner helps itself", (A, B, C), "a", 1, None),
        ("nobody waits", (A, B, C), "", 0, None),
        ("one that came last keeps its age: else it left again and again", (B, A), "b", 0, ("b", "b", 32)),
        ("of those that arrived together the one admitted last", (A, sequence("b", 1)), "a", 0, ("b", "a", 16)),
        ("one in host memory has no pages to leave", (A, B, SWAPPED), "a", 0, ("b", "a", 16)),
        ("nobody else has pages", (A, SWAPPED), "a", 0, None),
        ("an overrunner that is alone is left alone", (A,), "a", 0, None),
    ],
)
def test_the_victim(case, here, paused, free, expected):
    assert victim(book(*here, paused=paused, free=free)) == expected, case


def test_an_overrunner_that_leaves_is_the_victim_itself_and_doubles():
    assert victim(book(A, B, overruns=(Overrun("a", EPOCH, 1, 32, leaves=True),))) == ("a", "a", 32)


@pytest.mark.parametrize(("staying", "leaves"), [("", "c"), ("c", "b"), ("bc", "a"), ("abc", "c")])
def test_one_that_was_preempted_often_enough_stays_while_another_one_may_leave(staying, leaves):
    """One leaves all the same where all of them stay: a runner whose every sequence waits would wait for ever."""
    found = victim(book(*[sequence(n, i, stays=n in staying) for i, n in enumerate("abc")], paused="a"))
    assert found[0] == leaves


def test_an_overrun_of_an_epoch_that_has_left_calls_for_nobody():
    assert victim(book(A, B, overruns=(Overrun("a", Epoch(0, 9), 1, 32),))) is None


@given(
    rows=st.lists(
        st.tuples(st.sampled_from(Priority), st.booleans(), st.booleans(), st.booleans()), min_size=2, max_size=8
    )
)
def test_no_interactive_request_is_the_victim_while_a_batch_one_is_there(rows):
    """Rows: priority, whether it waits for a page, leaves by itself, was preempted as often as it may be."""
    here = [
        sequence(f"r{i}", i, stays=stays and not waits)._replace(priority=priority)
        for i, (priority, waits, _, stays) in enumerate(rows)
    ]
    overruns = tuple(Overrun(f"r{i}", EPOCH, 1, 32, leaves) for i, (_, waits, leaves, _) in enumerate(rows) if waits)
    decision = select_victim(book(*here, overruns=overruns))
    if not overruns:
        assert decision is None
        return
    priorities = {one.request_id: one.priority for one in here}
    assert priorities[decision.request_id] is max(priorities.values()), "batch ones leave first"
    waiting = [priorities[overrun.request_id] for overrun in overruns]
    assert priorities[decision.for_request_id] is min(waiting), "interactive ones get the pages first"


def test_one_victim_at_a_time_until_a_report_shows_it_gone():
    preemption = Preemption(5.0)
    a, b, c = sequence("a", 1), sequence("b", 2), sequence("c", 3)
    first = preemption.on_report(book(a, b, c, paused="a"), 0.0)
    assert first.request_id == "c"
    assert preemption.on_report(book(a, b, c, paused="ab"), 1.0) is None
    second = preemption.on_report(book(a, b, paused="ab"), 2.0)
    assert second.request_id == "b"
    assert preemption.preempts == 2


def test_a_victim_that_stays_is_chosen_again_after_the_bound_and_counted_once():
    preemption = Preemption(5.0)
    held = book(sequence("a", 1), sequence("b", 2), paused="a")
    first = preemption.on_report(held, 0.0)
    assert preemption.due(4.9) == []
    assert preemption.due(5.0) == [RUNNER]
    assert preemption.on_report(held, 5.0) == first
    assert preemption.preempts == 1
    other = RunnerId("other", "1")
    preemption.on_report(book(A, B, paused="a", runner=other), 7.0)
    assert preemption.next_deadline() == 10.0
    preemption.forget(other)
    assert [decision.runner for decision in preemption.pending()] == [RUNNER]
    newest = preemption.on_report(book(A, B, C, paused="a"), 10.0)
    assert (newest.request_id, preemption.preempts) == ("c", 3)


def test_a_victim_that_stays_is_let_be_when_nobody_waits_any_more():
    preemption = Preemption(5.0)
    preemption.on_report(book(sequence("a", 1), sequence("b", 2), paused="a"), 0.0)
    assert preemption.on_report(book(sequence("a", 1), sequence("b", 2), free=3), 5.0) is None
    assert preemption.pending() == []


# ------------------------------------------------------------------------------------- a small runner with pages


@dataclass
class Row:
    name: str
    length: int  # pages it needs in the end; one is used up per step
    arrived_ms: int
    used: int = 1
    reserved: int = 1
    paused: bool = False
    preemptions: int = 0
    stays: bool = False


@dataclass
class SmallRunner:
    """One page a step and sequence; grows in place, pauses without a page; freed pages go to the longest paused."""

    total: int
    rows: list[Row] = field(default_factory=list)
    paused: list[Row] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.total - sum(row.reserved for row in self.rows)

    def step(self) -> None:
        self.resume()
        for row in list(self.rows):
            if row.paused:
                continue
            if row.used == row.length:
                self.rows.remove(row)
                self.done.append(row.name)
            elif row.used < row.reserved or self.grow(row):
                row.used += 1
            else:
                row.paused = True
                self.paused.append(row)

    def grow(self, row: Row) -> bool:
        granted = min(row.reserved, self.free)  # doubles as far as the free pages go
        row.reserved += granted
        return granted > 0

    def resume(self) -> None:
        while self.paused and self.free:
            row = self.paused.pop(0)
            row.paused = False
            self.grow(row)

    def evict(self, name: str) -> Row:
        row = next(row for row in self.rows if row.name == name)
        self.rows.remove(row)
        if row in self.paused:
            self.paused.remove(row)
        return row

    def book(self) -> RunnerBook:
        sequences = [
            SequenceState(r.name, EPOCH, "g", "", r.reserved, r.reserved * 16, r.arrived_ms, r.stays) for r in self.rows
        ]
        overruns = [Overrun(row.name, EPOCH, 1, row.reserved * 32) for row in self.paused]
        found = RunnerBook(RunnerSpec(RUNNER, "h:1", "ns/p", 16, self.total, 64, 4, 8, 16))
        figures = RunnerFigures(self.free, sum(row.used for row in self.rows))
        found.apply(RunnerReport(1, True, figures, sequences, overruns=overruns))
        return found


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    total=st.integers(12, 24),
    delay=st.integers(0, 4),
    misses=st.lists(st.booleans(), max_size=20),
)
def test_the_oldest_always_makes_progress_and_everybody_finishes(lengths, total, delay, misses):
    """Preemption orders arrive `delay` steps late, some never (the bound names the victim again)."""
    runner, preemption = SmallRunner(total), Preemption(10.0)
    waiting = [Row(f"r{i}", length, arrived_ms=i) for i, length in enumerate(lengths)]
    orders: list[tuple[int, PreemptDecision]] = []
    lost = iter(misses)
    still = 0
    for now in range(4_000):
        while waiting and runner.free >= 1 and len(runner.rows) < 8 and not runner.paused:
            row = waiting.pop(0)
            row.used, row.reserved = 1, 1
            row.paused = False
            runner.rows.append(row)
        oldest = min(runner.rows, key=lambda row: row.arrived_ms, default=None)
        before = (oldest.name, oldest.used) if oldest else None
        runner.step()
        for due, order in [entry for entry in orders if entry[0] <= now]:
            orders.remove((due, order))
            if any(row.name == order.request_id for row in runner.rows):
                waiting.insert(0, runner.evict(order.request_id))
        assert violation(runner.book()) is None
        preempt = preemption.on_report(runner.book(), float(now))
        assert len(preemption.pending()) <= 1
        if preempt:
            assert preempt.request_id != min(runner.rows, key=lambda row: row.arrived_ms).name, "the oldest is spared"
        if preempt and not next(lost, False):
            orders.append((now + delay, preempt))
        after = (oldest.name, oldest.used) if oldest and oldest in runner.rows else None
        still = still + 1 if before is not None and before == after else 0
        # At most 7 others can have to leave, each `delay` after its naming; an order that gets lost costs the bound.
        assert still <= 8 * (delay + 2) + sum(misses) * 11, "the oldest sequence stands still"
        if not runner.rows and not waiting:
            break
    assert sorted(runner.done) == sorted(f"r{i}" for i in range(len(lengths)))


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=16),
    totals=st.lists(st.integers(12, 24), min_size=1, max_size=3),
    bound=st.integers(0, 3),
    chance=st.randoms(use_true_random=False),
)
def test_nobody_is_preempted_more_often_than_the_bound_on_all_runners_together(lengths, totals, bound, chance):
    """Whoever is offered next, and wherever: the order of arrival protects nobody from one runner after another."""
    runners = [SmallRunner(total) for total in totals]
    waiting = [Row(f"r{i}", length, arrived_ms=chance.randrange(100)) for i, length in enumerate(lengths)]
    chance.shuffle(waiting)
    most_steps = sum(lengths) * (bound + 2) * len(lengths)
    for _ in range(most_steps):
        for row in list(waiting):
            row.stays = row.preemptions >= bound
            pages = row.length if row.stays else 1
            fitting = [r for r in runners if r.free >= pages and not r.paused]
            if fitting:
                waiting.remove(row)
                row.used, row.reserved, row.paused = 1, pages, False
                chance.choice(fitting).rows.append(row)
        for runner in runners:
            runner.step()
            if (decision := select_victim(runner.book())) is not None:
                row = runner.evict(decision.request_id)
                row.preemptions += 1
                assert row.preemptions <= bound, row
                waiting.insert(chance.randint(0, len(waiting)), row)
    assert sorted(name for runner in runners for name in runner.done) == sorted(f"r{i}" for i in range(len(lengths)))

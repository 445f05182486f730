"""Who leads: a Lease's store is modelled, the decisions are the shipped ones."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.leadership.lease import (
    TERM_EPOCH_S,
    Acquire,
    CreateLease,
    Leadership,
    LeaseCandidate,
    LeaseRecord,
    LeaseTimings,
    Wait,
    decide,
)

TERMS = LeaseTimings(15.0)
HELD = LeaseRecord("other", 4, 15.0, "100")
NOW_S = TERM_EPOCH_S + 1000


@pytest.mark.parametrize(
    ("case", "seen", "at", "decision"),
    [
        ("without one it is made, with a term above all that were deleted", [], 0.0, CreateLease(1000)),
        ("one that changes is left alone", [(HELD, 0.0)], 14.9, Wait),
        ("one that was renewed is, too", [(HELD, 0.0), (LeaseRecord("other", 4, 15.0, "101"), 14.9)], 29.8, Wait),
        ("unchanged for its duration it is taken", [(HELD, 0.0), (HELD, 10.0)], 15.0, Acquire("100", 5)),
        ("a longer duration than one's own counts", [(LeaseRecord("other", 4, 60.0, "100"), 0.0)], 59.0, Wait),
        ("given back it is taken at once", [(LeaseRecord("", 4, 15.0, "100"), 0.0)], 0.0, Acquire("100", 5)),
        ("a lost answer: again, a higher term", [(LeaseRecord("me", 5, 15.0, "101"), 0.0)], 0.1, Acquire("101", 6)),
    ],
)
def test_what_a_candidate_does(case: str, seen: list[tuple[LeaseRecord, float]], at: float, decision: object) -> None:
    candidate = LeaseCandidate("me")
    for record, when in seen:
        candidate = candidate.observe(record, when)
    found = decide(candidate, TERMS, at, NOW_S)
    assert isinstance(found, Wait) if decision is Wait else found == decision, case


def test_a_leader_stops_before_anybody_else_can_begin_and_its_last_write_has_ended_by_then() -> None:
    assert TERMS.deadline_s + TERMS.write_s <= TERMS.duration_s
    leading = Leadership(1, "1", 100.0)
    assert leading.holds(TERMS, 100.0 + TERMS.deadline_s - 0.001)
    assert not leading.holds(TERMS, 100.0 + TERMS.deadline_s)


@dataclass
class Process:
    """A replica with its own clock, which may be stopped for any time at any point between two of its steps."""

    name: str
    offset_s: float
    candidate: LeaseCandidate
    leading: Leadership | None = None
    asleep_until: float = 0.0
    terms_led: list[int] = field(default_factory=list[int])


@dataclass
class Store:
    """One Lease with optimistic locking."""

    seen: LeaseRecord | None = None
    version: int = 0

    def write(self, holder: str, term: int, expected: str | None) -> str | None:
        if (self.seen.version if self.seen else None) != expected:
            return None
        self.version += 1
        self.seen = LeaseRecord(holder, term, TERMS.duration_s, str(self.version))
        return self.seen.version


def step(process: Process, store: Store, now: float) -> None:
    """One look and one attempt, as the shell makes them."""
    mine = now + process.offset_s
    if process.leading is not None:
        if not process.leading.holds(TERMS, mine):
            process.leading = None  # it ends; here a new one of another name goes on
            process.candidate = LeaseCandidate(f"{process.name}@{now}")
            return
        version = store.write(process.candidate.identity, process.leading.term, process.leading.version)
        process.leading = Leadership(process.leading.term, version, mine) if version else None
        return
    process.candidate = process.candidate.observe(store.seen, mine)
    match decide(process.candidate, TERMS, mine, NOW_S):
        case CreateLease(term):
            version = store.write(process.candidate.identity, term, None)
        case Acquire(expected, term):
            version = store.write(process.candidate.identity, term, expected)
        case Wait():
            return
    if version is not None:
        process.leading = Leadership(term, version, mine)
        process.terms_led.append(term)


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.floats(0.1, 40.0)), max_size=60),
)
def test_at_no_time_do_two_lead_whatever_clocks_say(offsets: list[float], pauses: list[tuple[int, float]]) -> None:
    store = Store()
    processes = [Process(str(i), offset, LeaseCandidate(str(i))) for i, offset in enumerate(offsets)]
    now, history = 0.0, list(pauses)
    terms: list[int] = []
    for tick in range(400):
        now += 0.5
        if history and tick % 5 == 0:
            who, for_s = history.pop()
            processes[who % len(processes)].asleep_until = now + for_s
        for process in processes:
            before = len(process.terms_led)
            if now >= process.asleep_until:
                step(process, store, now)
            terms += process.terms_led[before:]
        assert len([p for p in processes if p.leading and p.leading.holds(TERMS, now + p.offset_s)]) <= 1
    assert terms == sorted(set(terms)), "each leadership has a higher term than all before it"


def test_somebody_leads_soon_after_a_leader_has_died() -> None:
    store, one, two = Store(), Process("1", 0.0, LeaseCandidate("1")), Process("2", 7.0, LeaseCandidate("2"))
    step(one, store, 0.0)
    assert one.leading is not None
    times = [0.5 * tick for tick in range(100)]
    led_at = next(now for now in times if (step(two, store, now), two.leading)[1] is not None)
    assert led_at == pytest.approx(TERMS.duration_s, abs=0.5)

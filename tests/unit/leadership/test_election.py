"""The shell of an election over a Lease in memory, on a clock that the test turns."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from weft.leadership.election import Election
from weft.leadership.errors import LeadershipLost, LeaseChanged, LeaseUnavailable
from weft.leadership.lease import LeaseTimings
from weft.leadership.standby import LEASE_S

TIMINGS = LeaseTimings(9.0)  # renewed every 1.5 s, held for 6 s
MAX_FAIL_OVER_S = 15.0  # the chart's promise
Json = dict[str, Any]


@dataclass
class MemoryLease:
    """A Lease with optimistic locking, whose server may be away."""

    found: Json | None = None
    version: int = 0
    away: bool = False
    writes: list[str] = field(default_factory=list[str])

    async def read(self) -> Json | None:
        self._ask()
        return self.found

    async def create(self, spec: Json, *, timeout_s: float) -> Json:
        self._ask()
        assert timeout_s == TIMINGS.write_s
        if self.found is not None:
            raise LeaseChanged("it is there")
        return self._write(spec)

    async def replace(self, spec: Json, *, uid: str, version: str, timeout_s: float) -> Json:
        self._ask()
        assert timeout_s == TIMINGS.write_s
        if self.found is None or (uid, version) != (self.found["metadata"]["uid"], str(self.version)):
            raise LeaseChanged("it is another")
        return self._write(spec)

    def _ask(self) -> None:
        if self.away:
            raise LeaseUnavailable("no answer")

    def _write(self, spec: Json) -> Json:
        self.version += 1
        self.writes.append(spec["holderIdentity"])
        self.found = {"metadata": {"uid": "1", "resourceVersion": str(self.version)}, "spec": spec}
        return self.found


class Time:
    """Seconds that pass as a process sleeps. `at` is what happens when it has slept so often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.at, self._slept = 100.0, dict[int, Any](), 0
        monkeypatch.setattr("weft.leadership.election.asyncio.sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self._slept += 1
        self.at.pop(self._slept, lambda: None)()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def candidate(lease: MemoryLease, time: Time, name: str = "me", *, outlast: bool = False) -> Election:
    clocks = {"clock": lambda: time.now, "wall": lambda: time.now}
    return Election(lease, identity=name, terms=TIMINGS, outlast=outlast, **clocks)


async def test_a_standby_acts_under_a_higher_term_once_the_holder_renews_no_more(time: Time) -> None:
    lease = MemoryLease()
    first = await candidate(lease, time, "killed").acquire()
    began = time.now
    assert await candidate(lease, time, "standby").acquire() == first + 1
    assert TIMINGS.duration_s <= time.now - began <= TIMINGS.duration_s + TIMINGS.renew_s
    assert LEASE_S + LeaseTimings(LEASE_S).renew_s < MAX_FAIL_OVER_S


async def test_who_comes_back_under_its_own_name_acts_at_once_and_under_a_higher_term(time: Time) -> None:
    lease = MemoryLease()
    first = await candidate(lease, time).acquire()
    began = time.now
    assert await candidate(lease, time).acquire() == first + 1
    assert time.now == began


async def test_a_lease_that_was_given_back_is_taken_at_the_next_look(time: Time) -> None:
    lease = MemoryLease()
    first, second = candidate(lease, time, "first"), candidate(lease, time, "second")
    await first.acquire()
    await first.release()
    began = time.now
    await second.acquire()
    assert time.now == began


@pytest.mark.parametrize("outlast", [False, True])
async def test_without_an_answer_a_holder_ends_in_time_unless_it_outlasts_the_server(time: Time, outlast: bool) -> None:
    lease = MemoryLease()
    holder = candidate(lease, time, outlast=outlast)
    await holder.acquire()
    lease.away = True
    other = {**(lease.found or {}), "spec": {"holderIdentity": "other", "leaseTransitions": 1 << 30}}

    def back() -> None:
        lease.away, lease.found, lease.version = False, other, lease.version + 1
        other["metadata"] = {"uid": "1", "resourceVersion": str(lease.version)}

    time.at[40] = back
    began = time.now
    with pytest.raises(LeadershipLost, match="is held by other" if outlast else "not renewed in time"):
        await holder.hold()
    assert time.now - began == pytest.approx(60.0 if outlast else TIMINGS.deadline_s)
    assert not holder.leading


async def test_a_holder_that_outlasts_the_server_keeps_its_lease_and_its_term(time: Time) -> None:
    lease = MemoryLease()
    holder = candidate(lease, time, outlast=True)
    await holder.acquire()
    lease.away = True
    term = lease.found and lease.found["spec"]["leaseTransitions"]

    def back() -> None:
        lease.away = False

    class Enough(Exception):
        pass

    def enough() -> None:
        raise Enough

    time.at |= {20: back, 24: enough}
    with pytest.raises(Enough):
        await holder.hold()
    assert holder.leading
    assert lease.writes == ["me"] * 5, "renewed again, once it answers"
    assert lease.found
    assert lease.found["spec"]["leaseTransitions"] == term


async def test_a_holder_that_stood_still_does_not_act_however_it_takes_the_server(time: Time) -> None:
    lease = MemoryLease()
    holder = candidate(lease, time, outlast=True)
    await holder.acquire()
    time.now += TIMINGS.deadline_s
    with pytest.raises(LeadershipLost):
        holder.require()
    with pytest.raises(LeadershipLost):
        await holder.hold()
    assert lease.writes == ["me"], "it asks for nothing more"


async def test_a_lease_that_was_deleted_is_lost(time: Time) -> None:
    lease = MemoryLease()
    holder = candidate(lease, time, outlast=True)
    await holder.acquire()
    lease.found = None
    with pytest.raises(LeadershipLost, match="nobody"):
        await holder.hold()

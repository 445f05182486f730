"""Who is worked on next: bounds hold, nothing is lost, and what stands still holds up only itself."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft_depot.core import ConcurrencyLimits, FairQueue, QueueKey


def test_hosts_and_owners_take_turns_and_an_owner_keeps_its_order() -> None:
    queue: FairQueue[str] = FairQueue(ConcurrencyLimits(100, 100, 100))
    for number in range(3):
        queue.add(QueueKey("hub", "a"), f"a{number}")
    queue.add(QueueKey("hub", "b"), "b0")
    queue.add(QueueKey("share", "a"), "s0")
    started = iter(queue.start, None)
    assert [job for _, job in started] == ["a0", "s0", "b0", "a1", "a2"]


class Work(RuleBasedStateMachine):
    """Random jobs against a list of what should be there."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = ConcurrencyLimits(total=5, per_host=3, per_owner=2)
        self.queue: FairQueue[tuple[QueueKey, int]] = FairQueue(self.limits)
        self.waiting: list[tuple[QueueKey, int]] = []
        self.running: list[tuple[QueueKey, int]] = []
        self.count = 0

    @rule(host=st.sampled_from("xyz"), owner=st.sampled_from("ab"), jobs=st.integers(1, 4))
    def add(self, host: str, owner: str, jobs: int) -> None:
        for _ in range(jobs):
            self.count += 1
            job = (QueueKey(host, owner), self.count)
            self.queue.add(job[0], job)
            self.waiting.append(job)

    @rule(times=st.integers(1, 5))
    def start(self, times: int) -> None:
        for _ in range(times):
            found = self.queue.start()
            fits = [job for job in self.waiting if self.may_run(job[0])]
            assert (found is None) == (not fits), "no job waits that may run"
            if found:
                key, job = found
                assert job == next(other for other in self.waiting if other[0] == key), "the oldest of its owner"
                self.waiting.remove(job)
                self.running.append(job)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.running))
        self.running.remove(job)
        self.queue.end(job[0])

    def may_run(self, key: QueueKey) -> bool:
        """A host that hangs delays no other, nor an owner with many jobs, nor one whose hosts all hang."""
        queue = Counter(running for running, _ in self.running)
        hosts = Counter(running.host for running, _ in self.running)
        owners = Counter(running.owner for running, _ in self.running)
        fits = queue[key] < self.limits.per_owner and max(hosts[key.host], owners[key.owner]) < self.limits.per_host
        return fits and len(self.running) < self.limits.total

    @invariant()
    def holds(self) -> None:
        self.queue.check_queue()
        assert self.queue.running == len(self.running)


TestWork = Work.TestCase
TestWork.settings = settings(stateful_step_count=40)

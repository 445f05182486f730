"""A pool's number of runners and its scale-down victims; `README.md` in this folder has the rules."""

from collections.abc import Callable, Iterable, Sequence
from heapq import nsmallest
from typing import NamedTuple

from weft_scheduler.core.policy.autoscaling.demand import (
    PoolLoad,
    ReplicaBounds,
    RunnerCapacity,
    ScaleDownStabilization,
    demand_runners,
    desired_runners,
)
from weft_scheduler.core.policy.autoscaling.throughput import TokenThroughput


class Contribution(NamedTuple):
    """What one runner adds to its pool. Pages count only while it serves; slots are those for unpinned adapters."""

    sequences: int = 0  # its best batch
    kv_tokens: int = 0
    reserved_tokens: int = 0
    slots: int = 0
    busy_slots: int = 0
    total_pages: int = 0
    reserved_pages: int = 0
    prefill_tokens_per_s: int = 0  # as measured at its start


class VictimCandidate(NamedTuple):
    """A runner that could be released; the smallest first: idle, then the least loaded, then the newest."""

    working_set: int
    minus_arrival: int
    uuid: str


class PoolCapacity:
    """The sum of the contributions of a pool's runners."""

    def __init__(self) -> None:
        self.runners = 0
        self.sum = Contribution()

    def replace(self, before: Contribution | None, after: Contribution | None) -> None:
        """One runner's contribution has changed; None: it contributes nothing."""
        if before is None and after is None:
            return
        self.runners += (after is not None) - (before is not None)
        minus, plus = before or Contribution(), after or Contribution()
        total = self.sum
        self.sum = Contribution(
            total[0] + plus[0] - minus[0],
            total[1] + plus[1] - minus[1],
            total[2] + plus[2] - minus[2],
            total[3] + plus[3] - minus[3],
            total[4] + plus[4] - minus[4],
            total[5] + plus[5] - minus[5],
            total[6] + plus[6] - minus[6],
            total[7] + plus[7] - minus[7],
        )

    def mean(self, tokens_per_s: float) -> RunnerCapacity | None:
        """The mean runner; None while there is none."""
        if not self.runners:
            return None
        n, total = self.runners, self.sum
        prefill = total.prefill_tokens_per_s / n
        return RunnerCapacity(total.sequences / n, total.kv_tokens / n, total.slots / n, tokens_per_s, prefill)


class Autoscaler:
    """Wanted runners and victims of one pool. A victim takes nothing new; what runs there runs on."""

    def __init__(self) -> None:
        self.capacity = PoolCapacity()
        self.throughput = TokenThroughput()
        self.wanted_runners = 0
        self.victims: list[str] = []  # uuids, the first to go first
        self._stabilization = ScaleDownStabilization()
        self._mean: RunnerCapacity | None = None  # the last known while there is no runner

    def recommend(
        self, load: PoolLoad, bounds: ReplicaBounds, now: float, *, window_s: float, work_s: float, keep: bool
    ) -> float | None:
        """Update `wanted_runners`; `keep`: none is released for now. Returns when fewer may be wanted."""
        self._mean = self.capacity.mean(self.throughput.per_s()) or self._mean
        desired = desired_runners(load, self._mean, work_s)
        if keep:
            desired = max(desired, self.wanted_runners, self.capacity.runners)
        stabilized = self._stabilization.recommend(bounds.clamp(desired), now, window_s)
        self.wanted_runners = bounds.clamp(stabilized)
        return self._stabilization.next_deadline(window_s)

    def demand(self, load: PoolLoad, work_s: float) -> int:
        """What the pool's requests would fill, whatever its bounds."""
        return demand_runners(load, self._mean, work_s)

    def surplus(self) -> int:
        """How many runners there are beyond those wanted."""
        return max(0, self.capacity.runners - self.wanted_runners)

    def select_victims(
        self, count: int, present: Sequence[str], candidates: Callable[[], Iterable[VictimCandidate]]
    ) -> list[str]:
        """Let `count` runners be victims; `present`: those of now that still can be. Returns whose role changes.

        Victims stay victims while so many have to go (their loads fall, those of others change: the choice must not
        follow), and the last one chosen is the first to be kept. All runners are compared (1.1 ms for 1,000) only where
        more have to go than before, at most once for each publication of statuses.
        """
        victims = [*present[:count]]
        if len(victims) < count:
            kept = {*victims}
            others = nsmallest(count - len(kept), (c for c in candidates() if c.uuid not in kept))
            victims += [candidate.uuid for candidate in others]
        changed = sorted({*self.victims} ^ {*victims})
        self.victims = victims
        return changed

    def forget(self, uuid: str) -> None:
        """The runner is gone."""
        if uuid in self.victims:
            self.victims.remove(uuid)

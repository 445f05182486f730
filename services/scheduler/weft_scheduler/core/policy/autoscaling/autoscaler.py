"""A pool's number of runners and its scale-down victims; `README.md` in this folder has the rules."""

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import add, sub
from typing import NamedTuple

from weft.domain.routes import PhaseCounts, PhaseGroups
from weft_scheduler.core.policy.autoscaling.demand import (
    PoolLoad,
    ReplicaBounds,
    RunnerCapacity,
    ScaleDownStabilization,
    demand_runners,
    desired_runners,
)
from weft_scheduler.core.policy.autoscaling.groups import VictimCandidate, allocate, divide, select_victims, surplus
from weft_scheduler.core.policy.autoscaling.throughput import TokenThroughput


class Contribution(NamedTuple):
    """Share of one runner in its pool. Pages count only while it serves; slots are slots for unpinned adapters."""

    sequences: int = 0  # its best batch
    kv_tokens: int = 0
    reserved_tokens: int = 0
    slots: int = 0
    busy_slots: int = 0
    total_pages: int = 0
    reserved_pages: int = 0
    prefill_tokens_per_s: int = 0  # as measured at its start, of one that computes prompts
    for_prompts: int = 0  # 1: it computes prompts, now
    for_tokens: int = 0
    of_prompt_group: int = 0  # 1: its hardware is for prompts
    of_token_group: int = 0
    batch_tokens: int = 0  # reserved tokens of batch requests


class PhaseBounds(NamedTuple):
    """Bounds of the runners of each phase, where phases are split. `prompt_share`: of the work of a request."""

    groups: tuple[PhaseGroups, ...] = ()
    minimum: PhaseCounts = PhaseCounts()
    prompt_share: float = 0.0


class PoolCapacity:
    """The sum of the contributions of a pool's runners."""

    def __init__(self) -> None:
        self.runners = 0
        self.sum = Contribution()

    @property
    def interactive_tokens(self) -> int:
        """Reserved tokens of interactive requests, available to them at any time despite batch requests."""
        return max(0, self.sum.reserved_tokens - self.sum.batch_tokens)

    def replace(self, previous: Contribution | None, current: Contribution | None) -> None:
        """Replace one runner's contribution in the sum; None: no contribution."""
        if previous is None and current is None:
            return
        self.runners += (current is not None) - (previous is not None)
        minus, plus = previous or Contribution(), current or Contribution()
        self.sum = Contribution(*map(sub, map(add, self.sum, plus), minus))

    def mean(self, tokens_per_s: float) -> RunnerCapacity | None:
        """Return the mean runner of each phase; None while there is none."""
        n, total = self.sum.for_tokens, self.sum
        if not n or not total.for_prompts:
            return None
        prefill = total.prefill_tokens_per_s / total.for_prompts
        return RunnerCapacity(total.sequences / n, total.kv_tokens / n, total.slots / n, tokens_per_s, prefill)

    def of_groups(self, groups: Sequence[PhaseGroups]) -> PhaseCounts:
        """Return the pool's runners by the phase of their groups; together where groups are not counted apart."""
        prompt, token = (self.sum.of_prompt_group, self.sum.of_token_group) if groups else (0, 0)
        return PhaseCounts(prompt, token, self.runners - prompt - token)


class Autoscaler:
    """Wanted runners and victims of one pool. A victim takes no new requests and continues its running requests."""

    def __init__(self, capacity: PoolCapacity) -> None:
        self.capacity = capacity
        self.throughput = TokenThroughput()
        self.target = PhaseCounts()  # runners by the phase of their groups
        self.victims: list[str] = []  # uuids, the first to go first
        self._phases = PhaseCounts()  # wanted runners by what they would compute
        self._stabilizations = tuple(ScaleDownStabilization() for _ in self.target)
        self._mean: RunnerCapacity | None = None  # the last known while there is no runner

    @property
    def wanted_runners(self) -> int:
        """Wanted runners of all groups."""
        return sum(self.target)

    def recommend(
        self,
        load: PoolLoad,
        bounds: ReplicaBounds,
        now: float,
        *,
        window_s: float,
        work_s: float,
        keep: bool,
        phases: PhaseBounds,
    ) -> float | None:
        """Update `target`; `keep`: none is released for now. Returns when fewer may be wanted."""
        self._mean = self.capacity.mean(self.throughput.per_s()) or self._mean
        desired = desired_runners(load, self._mean, work_s, phases.minimum)
        counts = self._of_groups(bounds.clamp(sum(desired)), desired, phases)
        if keep:
            present = self.capacity.of_groups(phases.groups)
            counts = PhaseCounts(*map(max, counts, self.target, present))
        counts = PhaseCounts(
            *[
                stabilization.recommend(count, now, window_s)
                for stabilization, count in zip(self._stabilizations, counts, strict=True)
            ]
        )
        total = bounds.clamp(sum(counts))
        self.target = counts if total == sum(counts) else self._of_groups(total, counts, phases)
        self._phases = divide(total, desired, phases.prompt_share, self._phases)
        return min(
            (at for stabilization in self._stabilizations if (at := stabilization.next_deadline(window_s)) is not None),
            default=None,
        )

    def _of_groups(self, total: int, demand: PhaseCounts, phases: PhaseBounds) -> PhaseCounts:
        demand = PhaseCounts(*map(max, demand, phases.minimum))
        return allocate(total, divide(total, demand, phases.prompt_share, self._phases), phases.groups)

    def demand(self, load: PoolLoad, work_s: float) -> PhaseCounts:
        """Return the runners filled by the pool's requests, without bounds."""
        return demand_runners(load, self._mean, work_s)

    def surplus(self, groups: Sequence[PhaseGroups]) -> PhaseCounts:
        """Return how many runners of each group should go."""
        return surplus(self.capacity.of_groups(groups), self.target)

    def needs_more(self, going: PhaseCounts, retained: Iterable[VictimCandidate]) -> bool:
        """Return whether more runners must leave than these victims."""
        counts = Counter(candidate.group for candidate in retained)
        return any(count > counts[phase] for phase, count in going._asdict().items())

    def select_victims(
        self, going: PhaseCounts, retained: Sequence[VictimCandidate], candidates: Iterable[VictimCandidate]
    ) -> list[str]:
        """Let `going` runners of each group be victims. `retained`: victims so far. Returns whose state changes.

        Victims stay victims while `going` does not fall (their loads fall, those of others change: the choice must not
        follow), and the last one chosen is the first to be kept.
        """
        victims = select_victims(candidates, [candidate.uuid for candidate in retained], going, self._phases)
        changed = sorted({*self.victims} ^ {*victims})
        self.victims = victims
        return changed

    def forget(self, uuid: str) -> None:
        """Forget a lost runner among the victims."""
        if uuid in self.victims:
            self.victims.remove(uuid)

"""The present number of runners of a pool, their groups, and the runners to delete. Pure.

The scheduler reports how many runners a pool could use and, for a surplus, their order of deletion (victims). The
pool's spec bounds the number, and its groups distribute it. Scale-up is immediate. Scale-down waits for the scheduler's
victims, because the scheduler places nothing new on them. If groups are for split phases, the scheduler reports the
number of each phase, also within a fixed number, and names victims among its runners.

- A number set by people holds. Its scale-down waits at most `ANSWER_S` for the victims: even an unnamed runner gives
  its streams back when it ends.
- The autoscaler never removes more ready runners than the scheduler has named. A freshly started scheduler knows of no
  runner, and wants none.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from weft.api.template import MAX_POOL_RUNNERS
from weft.domain.routes import GroupPhase, PhaseGroups, PoolStatus
from weft_operator.core.resources import Bound, Group, PoolObject
from weft_operator.core.state import RunnerConfig, RunnerProcess

ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """The allowed numbers of runners of a pool for a generation of its spec; equal for a fixed number."""

    min: int
    max: int
    generation: int

    @property
    def fixed(self) -> bool:
        return self.min == self.max

    def clamp(self, count: int) -> int:
        return max(self.min, min(count, self.max))


@dataclass(frozen=True, slots=True)
class ScaledRunner:
    """A runner of any backend. `ready`: it takes requests, so its removal moves streams."""

    name: str
    ready: bool


def bounds(pool: PoolObject, default: int) -> Bounds:
    """Return the bounds of the pool's spec, as far as its groups have room. `default`: for a pool without a number."""
    if pool.spec.autoscaling is not None:
        low, high = pool.spec.autoscaling.min_replicas, pool.spec.autoscaling.max_replicas
    else:
        low = high = pool.spec.replicas if pool.spec.replicas is not None else default
    room = min(MAX_POOL_RUNNERS, sum(MAX_POOL_RUNNERS if group.max is None else group.max for group in pool.groups))
    return Bounds(min(low, room), min(high, room), pool.meta.generation)


def target(bounds: Bounds, report: PoolStatus | None, present: int) -> int:
    """Return the target number of runners. Before the scheduler's first answer no present runner is surplus.

    A freshly started scheduler observes no generation before it knows the runners. For waiting requests it may want
    more.
    """
    if report is None or not (is_current(report, bounds) or report.observed_generation == 0):
        return bounds.clamp(present)
    return bounds.clamp(report.wanted_runners if is_current(report, bounds) else max(report.wanted_runners, present))


def is_current(report: PoolStatus, bounds: Bounds) -> bool:
    """Return whether the scheduler's report fits these bounds and the present runners."""
    return report.observed_generation == bounds.generation


def distribute(count: int, groups: Sequence[Group]) -> dict[str, int]:
    """Distribute `count` runners: first every group's minimum, then each up to its maximum, both in list order.

    The sum is `count`, as far as the groups have room. An additional runner goes to a single group, so a shrinking pool
    empties its groups in reverse.
    """
    sizes: dict[str, int] = {}
    for group in groups:
        sizes[group.name] = min(group.min, count - sum(sizes.values()))
    for group in groups:
        left = count - sum(sizes.values())
        sizes[group.name] += left if group.max is None else min(left, max(0, group.max - sizes[group.name]))
    return sizes


def counts_apart(pool: PoolObject) -> bool:
    """Whether the scheduler counts the runners of groups separately, by their hardware's phase."""
    return pool.spec.phases.mode == "Split" and any(group.phase != "Any" for group in pool.groups)


def counted_together(pool: PoolObject, group: str) -> set[str]:
    """Return the further groups in a common count of the scheduler with `group`, without `group`."""
    is_separate, phases = counts_apart(pool), {member.name: member.phase for member in pool.groups}
    return {name for name, phase in phases.items() if name != group and not (is_separate and phase != phases[group])}


def phase_groups(pool: PoolObject) -> tuple[PhaseGroups, ...]:
    """Return the phases counted separately by the scheduler; empty if it counts a pool's runners together."""
    if not counts_apart(pool):
        return ()
    phase_groups: list[PhaseGroups] = []
    for phase in GroupPhase:
        members = [group for group in pool.groups if group.phase.lower() == phase.value]
        max_runners = 0 if any(group.max is None for group in members) else sum(group.max or 0 for group in members)
        phase_groups += [PhaseGroups(phase, sum(group.min for group in members), max_runners)] if members else []
    return tuple(phase_groups)


def sizes(
    pool: PoolObject, wanted_runners: int, report: PoolStatus | None, bounds: Bounds, present: Mapping[str, int]
) -> dict[str, int]:
    """Decide the size of each group. For groups counted separately, the scheduler's report decides.

    Until it has answered, runners stay in their groups (`present`).
    """
    groups = pool.groups
    if not counts_apart(pool):
        return distribute(wanted_runners, groups)
    counts = report.wanted if report is not None and is_current(report, bounds) else None
    if counts is not None and sum(counts) == wanted_runners:
        sizes: dict[str, int] = {}
        for phase, count in counts._asdict().items():
            sizes |= distribute(count, [group for group in groups if group.phase.lower() == phase])
        return {group.name: sizes[group.name] for group in groups}
    return _evenly(wanted_runners, groups, present)


def _evenly(count: int, groups: Sequence[Group], present: Mapping[str, int]) -> dict[str, int]:
    """Distribute runners over groups by need, each time to the smallest group.

    First each group gets its minimum, then its present size, then up to its maximum. Every group gets its first runner
    before a group gets its second. The sum is `count`, as far as the groups have room.
    """
    sizes = dict.fromkeys((group.name for group in groups), 0)

    def order(group: Group) -> tuple[bool, bool, int]:
        n = sizes[group.name]
        return n >= max(1, group.min), n >= present.get(group.name, 0), n

    for _ in range(count):
        growable = [group for group in groups if group.max is None or sizes[group.name] < group.max]
        if growable:
            sizes[min(growable, key=order).name] += 1
    return sizes


def one_for_one(sizes: Mapping[str, int], present: Mapping[str, int], wanted_runners: int) -> dict[str, int]:
    """Limit new runners to a total of `wanted_runners`: accelerators are scarce, and old runners must leave first."""
    new_sizes, excess = dict(sizes), sum(sizes.values()) - wanted_runners
    for name in reversed(new_sizes):
        later = max(0, min(excess, new_sizes[name] - present.get(name, 0)))
        new_sizes[name], excess = new_sizes[name] - later, excess - later
    return new_sizes


def select_victims(
    present: Sequence[ScaledRunner],
    wanted_runners: int,
    report: PoolStatus | None,
    bounds: Bounds,
    *,
    waited: bool,
    is_separate: bool = False,
    elsewhere: int = 0,
) -> list[ScaledRunner] | None:
    """Choose the runners to delete, in order, so `wanted_runners` are left; None until the victims are known.

    `waited`: the scheduler has had its time to answer. Unready runners go first, then the scheduler's victims in its
    order. For a number set by people, the last remaining runners follow. If groups are counted separately
    (`is_separate`), they follow only until the scheduler has answered: its answer may move runners between groups. The
    scheduler counts groups of the same phase together. So for each of its `elsewhere` victims in other groups, an
    unnamed runner may be deleted here.
    """
    surplus, answered = len(present) - wanted_runners, report is not None and is_current(report, bounds)
    if surplus <= 0:
        return []
    if not waited and not answered:
        return None
    victims = report.victims if report is not None else ()
    rank = {name: number for number, name in enumerate(victims)}
    free = [runner for runner in reversed(present) if not runner.ready and runner.name not in rank]
    named = sorted((runner for runner in present if runner.name in rank), key=lambda runner: rank[runner.name])
    rest = [runner for runner in reversed(present) if runner.ready and runner.name not in rank]
    unnamed = bounds.fixed and not (is_separate and answered)
    return [*free, *named, *(rest if unnamed else rest[:elsewhere])][:surplus]


def group_of(index: int, groups: Sequence[Group]) -> Group:
    """Return the group of process `index`: the group of the next runner in a pool of `index` runners."""
    sizes, next_sizes = distribute(index, groups), distribute(index + 1, groups)
    return next((group for group in groups if next_sizes[group.name] > sizes[group.name]), groups[-1])


def rollout_limits(pool: PoolObject, wanted_runners: int) -> tuple[int, int]:
    """Return maxUnavailable and maxSurge of a pool of `wanted_runners` runners.

    If both would be 0, maxUnavailable is 1.
    """
    unavailable, surge = (
        _floor(pool.spec.rollout.max_unavailable, wanted_runners),
        _ceil(pool.spec.rollout.max_surge, wanted_runners),
    )
    return (unavailable, surge) if unavailable + surge else (1, 0)


def _floor(bound: Bound, wanted_runners: int) -> int:
    return bound if isinstance(bound, int) else int(bound.rstrip("%")) * wanted_runners // 100


def _ceil(bound: Bound, wanted_runners: int) -> int:
    return bound if isinstance(bound, int) else ceil(int(bound.rstrip("%")) * wanted_runners / 100)


def not_terminating(runners: Mapping[int, RunnerProcess]) -> dict[int, RunnerProcess]:
    """Return the processes not asked to end, by index."""
    return {index: runner for index, runner in sorted(runners.items()) if runner.state != "Leaving"}


def to_start(
    make_config: Callable[[int], RunnerConfig], count: int, present: Mapping[int, RunnerProcess], unavailable: int = 1
) -> list[int]:
    """Choose indexes of processes to start, or to start anew with a new launch.

    Missing runners start all at once, at the lowest free indexes. Outdated runners are replaced once all wanted runners
    are present. At most `unavailable` runners are not ready at a time, so a change of a pool never takes all its
    runners away. An outdated runner in a crash loop is replaced at once.
    """
    staying = not_terminating(present)
    free = (index for index in range(MAX_POOL_RUNNERS) if index not in present)
    missing = [next(free) for _ in range(count - len(staying))]
    outdated = [index for index, runner in staying.items() if runner.launch != make_config(index)]
    broken = [index for index in outdated if staying[index].state == "CrashLoop"]
    if missing or broken:
        return missing + broken
    unready = {index for index, runner in staying.items() if runner.state != "Ready"}
    going = next((n for n in range(len(outdated), 0, -1) if len(unready.union(outdated[:n])) <= unavailable), 0)
    return outdated[:going]


def deletion_costs(going: Iterable[ScaledRunner]) -> dict[str, int]:
    """Give deletion costs, by name: the first to go has the lowest.

    A runner that is not ready is deleted first anyway, but it may become ready before the deletion.
    """
    names = [runner.name for runner in going]
    return {name: number - len(names) for number, name in enumerate(names)}

"""The choice of a group's pods to stop first when its Deployment shrinks, and the preparations. Pure.

A ReplicaSet stops the pods with the lowest deletion cost first. So costs are written and seen before the Deployment
shrinks. It shrinks only while all its pods are of one ReplicaSet, not during a replacement. A pool with waiting
evictions (`disruptionBudget.maxUnavailable: 0`) moves its runners off an unschedulable node. It starts an additional
pod, and once the new pod is ready, it removes the pod on the node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft_operator.core import scaling
from weft_operator.core.actions import Action, SetPodDeletionCost
from weft_operator.core.resources import PoolObject
from weft_operator.core.scaling import Bounds, ScaledRunner
from weft_operator.core.state import ClusterState, Pod

SEEN_S = 5.0  # a deletion cost accepted this long ago counts as seen


@dataclass(frozen=True, slots=True)
class Shrink:
    """The present size of a group, and the awaited step before a smaller size.

    `settled`: the size is final for now. Otherwise the victims are known in a moment.
    """

    size: int
    orders: list[Action]
    settled: bool = True


@dataclass(frozen=True, slots=True)
class Move:
    """The size of a group while runners leave a node, with its orders and the awaited step."""

    size: int
    orders: list[Action]
    reason: str


def shrink(
    pool: PoolObject,
    group: str,
    present: int,
    size: int,
    bounds: Bounds,
    state: ClusterState,
    now: float,
    *,
    waited: bool,
) -> Shrink:
    """Decide how far a group of `present` runners may shrink now. Its target is `size`."""
    ref, together = pool.meta.ref, scaling.counted_together(pool, group)
    pods = _staying(pool, group, state)
    runners = [ScaledRunner(name, pod.state == "Ready") for name, pod in pods.items()]
    report = state.observed.pool_reports.get(str(ref))
    spare = {
        name for name, pod in state.observed.pods.get(ref, {}).items() if pod.group in together and pod.state == "Ready"
    }
    elsewhere = len(spare.intersection(report.victims)) if report else 0
    is_separate = scaling.counts_apart(pool)
    going = scaling.select_victims(
        runners, size, report, bounds, waited=waited, is_separate=is_separate, elsewhere=elsewhere
    )
    if going is None:
        return Shrink(present, [], settled=False)
    left = max(size, len(pods) - len(going))
    if left >= present:
        return Shrink(present, [])
    if left == 0:
        return Shrink(left, [])  # there is nothing to choose
    unseen, orders = _mark(pool, pods, going, state, now)
    return Shrink(present, orders, settled=False) if unseen else Shrink(left, [])


def move_off(pool: PoolObject, group: str, size: int, state: ClusterState, now: float) -> Move | None:
    """Plan the group's ready runners to leave unschedulable nodes, one at a time; None without any.

    A runner that is not ready serves no requests, and any eviction takes it.
    """
    if pool.spec.disruption_budget.max_unavailable or not size or not state.observed.unschedulable_nodes:
        return None
    pods = _staying(pool, group, state)
    ready = {name: pod for name, pod in pods.items() if pod.state == "Ready"}
    leaving = [name for name, pod in ready.items() if pod.node in state.observed.unschedulable_nodes]
    if not leaving:
        return None
    surplus = len(ready) - size
    reason = f"runner {leaving[0]} leaves unschedulable node {ready[leaving[0]].node}"
    if surplus <= 0:
        return Move(size + 1, [], f"{reason}, once another runner is ready")
    going = [ScaledRunner(name, True) for name in leaving[:surplus]]
    unseen, orders = _mark(pool, pods, going, state, now)
    return Move(len(ready) - (0 if unseen else len(going)), orders, reason)


def _staying(pool: PoolObject, group: str, state: ClusterState) -> dict[str, Pod]:
    pods = sorted(state.observed.pods.get(pool.meta.ref, {}).items())
    return {name: pod for name, pod in pods if pod.group == group and pod.state != "Leaving"}


def _mark(
    pool: PoolObject, pods: Mapping[str, Pod], going: Sequence[ScaledRunner], state: ClusterState, now: float
) -> tuple[bool, list[Action]]:
    """Order the deletion costs that make these pods leave first. Return whether some costs are still unseen."""
    ref, costs = pool.meta.ref, scaling.deletion_costs(going)
    costs |= {name: 0 for name, pod in pods.items() if name not in costs and (pod.cost or 0) < 0}
    unseen = {name: cost for name, cost in costs.items() if not _is_seen(pods[name], cost, state, now)}
    orders: list[Action] = [
        SetPodDeletionCost(ref, ref.namespace, name, pods[name].uid, cost)
        for name, cost in unseen.items()
        if state.expectations.deletion_costs.get(pods[name].uid, (None, now))[0] != cost
    ]
    return bool(unseen), orders


def _is_seen(pod: Pod, cost: int, state: ClusterState, now: float) -> bool:
    if pod.cost == cost:
        return True
    ordered, at = state.expectations.deletion_costs.get(pod.uid, (None, now))
    return ordered == cost and now >= at + SEEN_S

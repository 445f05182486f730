"""Plans of a pool's runners: the actions to the wanted number of runners with the wanted configuration. Pure.

Without RunnerDefaults the runners are processes of this machine, planned one after another. With RunnerDefaults they
are pods, and the actions change the pool's children: the cluster's controllers do the rest. Either way the scheduler
names victims before runners are deleted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from weft.domain.routes import PoolStatus
from weft_operator.core import scaling
from weft_operator.core.actions import Action, ApplyChild, DeleteChild, EnsureRunner, RemoveRunner, ScaleChild
from weft_operator.core.children import (
    GROUP_LABEL,
    INDEX_LABEL,
    RUNNER_KINDS,
    is_adoptable,
    make_children,
    revision_of,
    runner_children,
    template_hash,
)
from weft_operator.core.drift import matches, spec_hash
from weft_operator.core.resources import Group, Object, PoolObject, Ref, resource_version
from weft_operator.core.rollout import OUTSIDE, REPLACING, Held, await_turn, from_outside, hold, is_replacing
from weft_operator.core.runner_config import make_runner_config
from weft_operator.core.runner_defaults import RunnerDefaults
from weft_operator.core.scale_in import SEEN_S, move_off, shrink
from weft_operator.core.scaling import ANSWER_S, Bounds, ScaledRunner
from weft_operator.core.state import (
    ApplyFailure,
    Child,
    ClusterState,
    ObjectKey,
    RunnerConfig,
    RunnerProcess,
    RunnerState,
    runner_pods,
)


def present_runners(pool: PoolObject, state: ClusterState) -> int:
    """Count the ordered runners: staying processes, and the replicas of Deployments.

    Retired groups give their runners to the named groups: both have them for a while.
    """
    processes = scaling.not_terminating(state.observed.runners.get(pool.meta.ref, {}))
    sizes, named = _live_sizes(state.observed.children.get(pool.meta.ref, {})), {group.name for group in pool.groups}
    ours = sum(size for group, size in sizes.items() if group in named)
    return len(processes) + max(ours, sum(sizes.values()) - ours)


def plan_processes(
    pool: PoolObject, digest: str, wanted_runners: int, bounds: Bounds, state: ClusterState, *, waited: bool
) -> list[Action]:
    """Plan runners as processes. A replaced process ends before its successor starts, even with maxSurge."""
    ref, present = pool.meta.ref, state.observed.runners.get(pool.meta.ref, {})
    staying, report = scaling.not_terminating(present), state.observed.pool_reports.get(str(ref))
    groups, lacking = {index: scaling.group_of(index, pool.groups) for index in staying}, list[Group]()
    parts = [(wanted_runners, [*staying])]
    if scaling.counts_apart(pool):
        groups = _groups_of_processes(pool, staying)
        sizes = scaling.sizes(pool, wanted_runners, report, bounds, Counter(group.name for group in groups.values()))
        parts = [(sizes[group.name], [i for i in staying if groups[i] is group]) for group in pool.groups]
        lacking = [
            group for group, (size, members) in zip(pool.groups, parts, strict=True) for _ in range(size - len(members))
        ]
    going: list[int] = []
    for size, indexes in parts:
        by_name = {staying[index].name or str(index): index for index in indexes}
        runners = [ScaledRunner(name, staying[index].state == "Ready") for name, index in by_name.items()]
        leaving = scaling.select_victims(
            runners, size, report, bounds, waited=waited, is_separate=scaling.counts_apart(pool)
        )
        going += [by_name[runner.name] for runner in leaving or ()]
    if going:
        return [RemoveRunner(ref, index) for index in going]
    coming = iter(lacking)

    def launch(index: int) -> RunnerConfig:
        group = groups.get(index) or next(coming, None) or scaling.group_of(index, pool.groups)
        return make_runner_config(pool, digest, group)

    max_unavailable = max(1, scaling.rollout_limits(pool, wanted_runners)[0])
    return [
        EnsureRunner(ref, index, launch(index))
        for index in scaling.to_start(launch, wanted_runners, present, max_unavailable)
    ]


def _groups_of_processes(pool: PoolObject, staying: Mapping[int, RunnerProcess]) -> dict[int, Group]:
    """Map each process to the first group with the process's phase, or else to the first group."""
    of_phase = {group.phase: group for group in reversed(pool.groups)}
    return {index: of_phase.get(runner.launch.phase, pool.groups[0]) for index, runner in staying.items()}


def plan_children(
    pool: PoolObject,
    digest: str,
    wanted_runners: int,
    bounds: Bounds,
    state: ClusterState,
    defaults: RunnerDefaults,
    now: float,
    *,
    waited: bool,
) -> tuple[list[Action], str]:
    """Plan runners as pods: deletion costs of the victims, then every child that is not as it should be.

    Also returns the awaited step of a replacement of runners.
    """
    ref, live = pool.meta.ref, state.observed.children.get(pool.meta.ref, {})
    owned = {key: obj for key, obj in live.items() if _is_owned(obj, pool.meta.uid)}
    present, report = _live_sizes(live), state.observed.pool_reports.get(str(ref))
    sizes = scaling.sizes(pool, wanted_runners, report, bounds, present)
    orders, retained, successors = list[Action](), set[ObjectKey](), dict[ObjectKey, Child]()
    revision = revision_of(pool, digest, defaults)
    if pool.spec.parallelism.pods_per_runner > 1:
        outside = any(from_outside(obj, revision) for key, obj in owned.items() if key.kind == "StatefulSet")
        reason = await_turn(pool, state, revision) if outside else ""
        replacing = 0 if reason else scaling.rollout_limits(pool, wanted_runners)[0]
        sets, retained, is_outdated, successors = _plan_sets(
            pool, digest, sizes, bounds, state, defaults, owned, waited=waited, replacing=replacing
        )
        waiting = Held(reason=(reason and f"{OUTSIDE}: {reason}") or REPLACING) if is_outdated else Held()
        intended = make_children(pool, digest, defaults, sizes) + sets
    else:
        may = _sizes_now(pool, sizes, present, wanted_runners, bounds, state, owned, now, waited=waited)
        sizes, orders = may.sizes, may.orders
        intended = make_children(pool, digest, defaults, sizes)
        waiting = hold(pool, intended, owned, state, revision)
        settling = {key for key, obj in owned.items() if key.kind == "Deployment" and _group(obj) in may.settling}
        waiting = Held(waiting.children | settling, "; ".join(filter(None, [*may.reason, waiting.reason])))
        orders += [
            ScaleChild(ref, key, owned[key]["metadata"]["uid"], owned[key]["metadata"]["resourceVersion"], size)
            for key in sorted(waiting.children)
            if (size := sizes[_group(owned[key])]) != _replicas(owned[key])
        ]
    free = [child for child in intended if child.key in owned or child.key not in live]
    failures, foreign = state.expectations.apply_failures.get(ref, {}), state.observed.foreign.get(ref, {})
    adopted = {key: child.obj for key, child in foreign.items() if is_adoptable(child.obj, pool.meta)}
    taken_names = {key for key, child in foreign.items() if key not in adopted and now < child.again_at}
    orders += [
        ApplyChild(ref, child, resource_version(live.get(child.key) or adopted.get(child.key)))
        for child in free
        if child.key not in taken_names | waiting.children
        and not _is_refused(child, failures.get(child.key), now)
        and _differs(child, live.get(child.key), state)
    ]
    sizes_left = _retiring(pool, owned, wanted_runners, state)
    orders += [
        ScaleChild(ref, key, owned[key]["metadata"]["uid"], owned[key]["metadata"]["resourceVersion"], size)
        for key, size in sizes_left.items()
        if size < _replicas(owned[key])
    ]
    # Children of an earlier pool of the same name are deleted; ours are applied once they are gone.
    refused = [key.name for key, child in successors.items() if _is_refused(child, failures.get(key), now)]
    keep = (
        {child.key for child in intended if child.key in owned}
        | retained
        | sizes_left.keys()
        | _of_runners(refused, owned)
    )
    return orders + _deletions(ref, live, keep, successors), waiting.reason


class _Sizes(NamedTuple):
    """The present replicas of each group's Deployment.

    `orders`: the actions before they change. `reason`: the awaited steps. `settling`: the groups whose victims are
    known in a moment. A new template of theirs waits, and is written together with their size.
    """

    sizes: dict[str, int]
    orders: list[Action]
    reason: list[str]
    settling: set[str]


def _sizes_now(
    pool: PoolObject,
    wanted_sizes: Mapping[str, int],
    present: Mapping[str, int],
    wanted_runners: int,
    bounds: Bounds,
    state: ClusterState,
    owned: Mapping[ObjectKey, Object],
    now: float,
    *,
    waited: bool,
) -> _Sizes:
    moving = {group: move for group, size in wanted_sizes.items() if (move := move_off(pool, group, size, state, now))}
    may = _Sizes(dict(wanted_sizes), [], [move.reason for move in moving.values()], set())
    pods = state.observed.pods.get(pool.meta.ref, {}).values()
    deployments = {_group(obj): obj for key, obj in owned.items() if key.kind == "Deployment"}
    for group, size in wanted_sizes.items():
        if group in moving or size >= present.get(group, 0):
            continue
        if size and group in deployments and is_replacing(deployments[group], pods, now):
            may.sizes[group] = present[group]
            may.reason.append(f"group {group} shrinks to {size} of {present[group]} runners once they are replaced")
            continue
        shrinking = shrink(pool, group, present[group], size, bounds, state, now, waited=waited)
        may.sizes[group] = shrinking.size
        may.orders.extend(shrinking.orders)
        may.settling.update(() if shrinking.settled else (group,))
    if scaling.counts_apart(pool):
        may.sizes.update(scaling.one_for_one(may.sizes, present, wanted_runners))
    may.sizes.update({group: move.size for group, move in moving.items()})
    may.orders.extend(order for move in moving.values() for order in move.orders)
    return may


def plan_teardown(ref: Ref, state: ClusterState) -> list[Action]:
    """Plan the end of a pool that is gone, refused, or without a base: it keeps no runner and no child."""
    processes = scaling.not_terminating(state.observed.runners.get(ref, {}))
    orders: list[Action] = [RemoveRunner(ref, index) for index in sorted(processes, reverse=True)]
    return orders + _deletions(ref, state.observed.children.get(ref, {}), set(), {})


def grace_elapsed(ref: Ref, state: ClusterState, now: float) -> bool:
    """Whether the scheduler has had time to answer to the published pool."""
    return now >= state.expectations.published_at.get(ref, -inf) + ANSWER_S


def deadlines(ref: Ref, state: ClusterState) -> list[float]:
    """Return the times at which waiting ends: for the scheduler, for deletion costs, for the next attempt to apply."""
    times = [state.expectations.published_at[ref] + ANSWER_S] if ref in state.expectations.published_at else []
    uids = {pod.uid for pod in state.observed.pods.get(ref, {}).values()}
    times += [failure.again_at for failure in state.expectations.apply_failures.get(ref, {}).values()]
    times += [child.again_at for child in state.observed.foreign.get(ref, {}).values()]
    return times + [at + SEEN_S for uid, (_, at) in state.expectations.deletion_costs.items() if uid in uids]


def _plan_sets(
    pool: PoolObject, digest: str, sizes: Mapping[str, int], bounds: Bounds, state: ClusterState,
    defaults: RunnerDefaults, owned: Mapping[ObjectKey, Object], *, waited: bool, replacing: int,
) -> tuple[list[Child], set[ObjectKey], bool, dict[ObjectKey, Child]]:  # fmt: skip
    """Plan the runners with several pods of a pool.

    Returns the children to apply, the children to keep, whether a runner has an old launch, and the successors of
    replaced runners. All remaining children are deleted.

    A runner with an old launch is replaced as a whole, as long as at most `replacing` runners of the pool are not
    ready. Runners of retired groups end as runners of the named groups become ready: each ready runner frees an old
    runner.
    """
    launch, sets = (
        make_runner_config(pool, digest),
        {key: obj for key, obj in owned.items() if key.kind == "StatefulSet"},
    )
    report = state.observed.pool_reports.get(str(pool.meta.ref))
    pods = [pod for pod in runner_pods(state.observed.pods.get(pool.meta.ref, {}).values()) if pod.runner]
    states: dict[str, RunnerState] = {pod.runner: pod.state for pod in pods}
    ready = {key.name: _group(obj) for key, obj in sorted(sets.items()) if states.get(key.name) == "Ready"}
    retired = [name for name, group in ready.items() if group not in sizes]
    room = max(0, sum(sizes.values()) - 1 - (len(ready) - len(retired)))
    retained, intended, is_outdated = _of_runners(retired[:room], owned), list[Child](), False
    named = Counter(ready[name] for name in ready)
    lacking = {group: max(0, size - named[group]) for group, size in sizes.items()}
    coming, left, successors = list[tuple[Group, int]](), sum(sizes.values()), dict[ObjectKey, Child]()
    for group in pool.groups:
        live = {_index(obj): obj for obj in sets.values() if _group(obj) == group.name}
        parts = {index: runner_children(pool, group, digest, defaults, index) for index in live}
        present = {index: _as_process(obj, parts[index][0], launch, states) for index, obj in live.items()}
        together = scaling.counted_together(pool, group.name)
        other_ready = {pod.name for pod in pods if pod.group in together and pod.state == "Ready"}
        elsewhere = sum(count for name, count in lacking.items() if name != group.name)
        removed, replaced, new = _changes(
            present,
            launch,
            sizes[group.name],
            report,
            bounds,
            other_ready,
            waited=waited,
            is_separate=scaling.counts_apart(pool),
            replacing=replacing - elsewhere,
        )
        lacking[group.name] += sum(present[index].state == "Ready" for index in removed)
        successors |= {parts[index][0].key: parts[index][0] for index in replaced}
        staying = sorted(scaling.not_terminating(present).keys() - removed)
        coming, left = coming + [(group, index) for index in new], left - len(staying)
        for index in staying:
            if present[index].launch == launch:
                intended += parts[index]
            else:
                retained |= _of_runners([live[index]["metadata"]["name"]], owned)
        is_outdated = is_outdated or any(
            process.launch != launch for process in scaling.not_terminating(present).values()
        )
    if scaling.counts_apart(pool):
        coming = coming[: max(0, left)]  # one for one
    intended += [part for group, index in coming for part in runner_children(pool, group, digest, defaults, index)]
    # Pods may reach each other while they end.
    retained |= {key for key in owned if key.kind == "NetworkPolicy" and key.name in states}
    return intended, retained, is_outdated, successors


def _changes(
    present: Mapping[int, RunnerProcess], launch: RunnerConfig, size: int, report: PoolStatus | None, bounds: Bounds,
    other_ready: set[str], *, waited: bool, is_separate: bool, replacing: int,
) -> tuple[set[int], set[int], list[int]]:  # fmt: skip
    """Choose for a group with several pods per runner: the removed runners, the replaced runners among them, and new
    runners.

    `other_ready`: ready runners of groups counted together.
    """
    names = {runner.name: index for index, runner in scaling.not_terminating(present).items()}
    runners = [ScaledRunner(name, present[index].state == "Ready") for name, index in names.items()]
    elsewhere = len(other_ready.intersection(report.victims)) if report else 0
    going = scaling.select_victims(
        runners, size, report, bounds, waited=waited, is_separate=is_separate, elsewhere=elsewhere
    )
    if going is None or going:
        return {names[runner.name] for runner in going or ()}, set(), []
    started = scaling.to_start(lambda _: launch, size, present, replacing)
    replaced = {index for index in started if index in present}
    return replaced, replaced, [index for index in started if index not in present]


def _as_process(
    live: Object, intended: Child, launch: RunnerConfig, states: Mapping[str, RunnerState]
) -> RunnerProcess:
    """Describe a runner of several pods as a process. It has a different launch if its pods differ in template or
    number.
    """
    name = live["metadata"]["name"]
    state: RunnerState = states.get(name, "Starting")
    if _is_deleting(live):
        state = "Leaving"
    elif state == "Leaving":
        state = "Starting"  # its pods are replaced
    is_unchanged = (template_hash(live), live["spec"].get("replicas")) == (
        template_hash(intended.manifest), intended.manifest["spec"]["replicas"],
    )  # fmt: skip
    return RunnerProcess(launch if is_unchanged else replace(launch, base_digest=""), state, name=f"{name}-0")


def _index(obj: Object) -> int:
    """The index of a runner of several pods in its group."""
    return int((obj["metadata"].get("labels") or {}).get(INDEX_LABEL, 0))


def _of_runners(names: Sequence[str], owned: Mapping[ObjectKey, Object]) -> set[ObjectKey]:
    """Return the children of these runners with several pods."""
    return {key for key in owned if key.kind in RUNNER_KINDS and key.name in names}


def _retiring(
    pool: PoolObject, owned: Mapping[ObjectKey, Object], wanted_runners: int, state: ClusterState
) -> dict[ObjectKey, int]:
    """Return the kept replicas of retiring Deployments, by key. Deployments without an entry end at once.

    The pool no longer names the groups of retiring Deployments. As in a rolling update, a runner ends before a new
    runner starts. Then each ready runner of a named group ends an old runner. A runner that is not ready serves no
    requests and may hold resources of the new runners: it ends first.
    """
    named, ready = {group.name for group in pool.groups}, Counter[str]()
    for pod in state.observed.pods.get(pool.meta.ref, {}).values():
        ready[pod.group] += pod.state == "Ready"
    room, sizes = wanted_runners - 1 - sum(ready[group] for group in named), dict[ObjectKey, int]()
    for key, obj in sorted(owned.items()):
        if key.kind == "Deployment" and _group(obj) not in named and not _is_deleting(obj):
            size = min(_replicas(obj), ready[_group(obj)], room - sum(sizes.values()))
            sizes |= {key: size} if size > 0 else {}
    return sizes


def _differs(child: Child, live: Object | None, state: ClusterState) -> bool:
    if live is None:
        return True
    if _is_deleting(live) or matches(live, child.manifest):
        return False
    # The API server made this object of exactly this intent: it gets no nearer.
    return state.expectations.applied.get(child.key) != (spec_hash(child.manifest), object_revision(live))


def _is_refused(child: Child, failure: ApplyFailure | None, now: float) -> bool:
    return failure is not None and failure.intent == spec_hash(child.manifest) and now < failure.again_at


def _is_owned(obj: Object, uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in obj["metadata"].get("ownerReferences") or ())


def _deletions(
    ref: Ref, live: Mapping[ObjectKey, Object], keep: set[ObjectKey], successors: Mapping[ObjectKey, Child]
) -> list[Action]:
    return [
        DeleteChild(ref, key.kind, key.namespace, key.name, obj["metadata"]["uid"], successors.get(key))
        for key, obj in sorted(live.items())
        if key not in keep and not _is_deleting(obj)
    ]


def object_revision(live: Object) -> str:
    """Return a text of the object's generation. It changes with the spec and not with the status."""
    metadata = live["metadata"]
    return str(metadata.get("generation") or metadata.get("resourceVersion"))


def _live_sizes(live: Mapping[ObjectKey, Object]) -> dict[str, int]:
    """Count the runners of each group: replicas of its Deployment, and StatefulSets."""
    sizes = Counter[str]()
    for key, obj in live.items():
        if key.kind in ("Deployment", "StatefulSet") and not _is_deleting(obj):
            sizes[_group(obj)] += _replicas(obj) if key.kind == "Deployment" else 1
    return sizes


def _group(obj: Object) -> str:
    return str((obj["metadata"].get("labels") or {}).get(GROUP_LABEL, ""))


def _replicas(deployment: Object) -> int:
    return int(deployment["spec"]["replicas"])


def _is_deleting(obj: Object) -> bool:
    return obj["metadata"].get("deletionTimestamp") is not None

"""How runners are replaced: within a pool's bounds, one group at a time, and pool by pool where a version comes."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.operator.cluster import SITE, ClusterWorld, cluster_world
from tests.unit.operator.planning import fetched_base, pool_object, pool_ref, stored
from weft_operator.core import OperatorPolicy, RunnerProcess, SetStatus, requeue_at
from weft_operator.core.children import GROUP_LABEL, template_hash
from weft_operator.core.resources import parse_pool
from weft_operator.core.rollout import RETRY_S, is_replacing
from weft_operator.core.scaling import rollout_limits, to_start
from weft_operator.core.state import ObjectKey, SharedFolders
from weft_operator.local import ObjectStore

OLD, NEW = {"kvPages": 1024}, {"kvPages": 2048}
NEXT = replace(SITE, image="registry.example/weft-runner:2")


START = 1_000_000.0


def new_world() -> ClusterWorld:
    return cluster_world(ObjectStore(lambda: 0.0), {}, START)


def started(world: ClusterWorld, *names: str, **spec: Any) -> None:
    for name in names:
        world.contents[f"file:{name}"] = fetched_base()
        world.apply(pool_object(name, **spec))
    world.at_rest()


def ready(world: ClusterWorld, name: str = "base") -> int:
    return sum(pod.ready for pod in world.cluster.pods.values() if pod.pool == pool_ref(name))


def message(world: ClusterWorld, ref: Any, kind: str) -> str:
    return next(c["message"] for c in world.status(ref)["conditions"] if c["type"] == kind)


def images(world: ClusterWorld, name: str) -> set[str]:
    pods = [pod for pod in world.cluster.pods.values() if pod.pool == pool_ref(name)]
    return {pod.template["spec"]["containers"][0]["image"] for pod in pods}


@pytest.mark.parametrize(
    ("rollout", "wanted", "limits"),
    [
        ({}, 10, (1, 0)),
        ({"maxUnavailable": "25%", "maxSurge": "25%"}, 10, (2, 3)),
        ({"maxUnavailable": "5%", "maxSurge": 0}, 10, (1, 0)),
        ({"maxUnavailable": 0, "maxSurge": "1%"}, 10, (0, 1)),
        ({"maxUnavailable": "100%", "maxSurge": 0}, 3, (3, 0)),
    ],
)
def test_bounds_are_numbers_or_shares_of_the_wanted_runners(rollout: Any, wanted: int, limits: tuple[int, int]) -> None:
    assert rollout_limits(parse_pool(stored(pool_object(rollout=rollout))), wanted) == limits


STATES = st.lists(st.sampled_from(["Ready", "Ready", "Ready", "Starting", "CrashLoop"]), max_size=8)


@given(states=STATES, outdated=st.sets(st.integers(0, 7)), unavailable=st.integers(1, 4))
def test_processes_are_replaced_within_the_bound(states: list[Any], outdated: set[int], unavailable: int) -> None:
    launches: dict[int, Any] = {index: "old" if index in outdated else "new" for index in range(len(states))}
    present = {i: RunnerProcess(launches[i], state, name=str(i)) for i, state in enumerate(states)}
    started = to_start(lambda _: "new", len(states), present, unavailable)  # type: ignore[arg-type, return-value]
    missing = sum(state != "Ready" for state in states)
    taken = sum(states[index] == "Ready" for index in started)
    assert all(launches[index] == "old" for index in started)
    assert taken == 0 or missing + taken <= unavailable
    behind = [index for index in launches if launches[index] == "old"]
    assert started or not behind or missing > 0, "somebody goes as long as all are ready"


GROUPS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3, unique=True)


@given(
    groups=GROUPS, size=st.integers(1, 3), unavailable=st.integers(0, 3), surge=st.integers(0, 2),
    missing=st.integers(0, 2), steps=st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30),
    outside=st.booleans(),
)  # fmt: skip
def test_no_more_runners_are_missing_than_were_and_the_bound_allows(
    groups: list[str], size: int, unavailable: int, surge: int, missing: int, steps: list[tuple[bool, bool]],
    outside: bool,
) -> None:  # fmt: skip
    assume(unavailable + surge)  # the API refuses that nobody may be missing nor come
    wanted, bounds = size * len(groups), {"maxUnavailable": unavailable, "maxSurge": surge}
    spec = {"replicas": wanted, "runnerGroups": [{"name": name, "minRunners": size} for name in groups]}
    world = new_world()
    started(world, "base", rollout=bounds, advanced=OLD, **spec)
    for name in sorted(world.cluster.pods)[:missing]:
        world.cluster.pods[name] = replace(world.cluster.pods[name], ready=False)
    world.cluster.pods_become_ready = False
    world.answers()
    before = wanted - ready(world)
    edits = 0
    if outside:
        world.policy = OperatorPolicy(defaults=NEXT)
    else:
        world.apply(pool_object(rollout=bounds, advanced=NEW, **spec))
    for become_ready, edited in steps:
        world.cluster.pods_become_ready = become_ready
        if edited and not outside:  # while it goes on
            edits += 1
            world.apply(pool_object(rollout=bounds, advanced={"kvPages": 2048 + edits}, **spec))
        world.step()
        assert wanted - ready(world) <= before + unavailable
        assert len(world.cluster.pods) <= wanted + surge
    world.cluster.pods_become_ready = True
    world.now += 60
    world.at_rest()
    assert ready(world) == wanted
    templates = {str(pod.template["spec"]["containers"][0]) for pod in world.cluster.pods.values()}
    assert len(templates) == 1
    assert ("weft-runner:2" in templates.pop()) == outside
    assert world.condition(pool_ref(), "Ready") == ("True", "RunnersReady")


def test_a_group_waits_until_the_one_before_it_is_ready_and_the_status_says_so(cluster: ClusterWorld) -> None:
    groups = [{"name": name, "minRunners": 2} for name in ("a", "b")]
    started(cluster, "base", replicas=4, runnerGroups=groups, advanced=OLD)
    cluster.cluster.pods_become_ready = False
    cluster.settle(pool_object(replicas=4, runnerGroups=groups, advanced=NEW))
    assert ready(cluster) == 3
    assert message(cluster, pool_ref(), "Progressing") == "group b waits for group a, with 1 of 2 runners ready"
    assert cluster.condition(pool_ref(), "Ready") == ("False", "Converging")
    cluster.apply(pool_object(replicas=4, runnerGroups=groups, advanced=OLD))  # back: the first group is not stuck
    cluster.cluster.pods_become_ready = True
    cluster.at_rest()
    assert ready(cluster) == 4


@pytest.mark.parametrize(("surge", "changed"), [(0, {"b", "c"}), (1, {"b"}), (2, {"b"})])
def test_groups_without_a_ready_runner_change_at_once_where_there_is_room(
    cluster: ClusterWorld, surge: int, changed: set[str]
) -> None:
    """Such groups serve nobody. With maxSurge each would have runners of both templates."""
    groups = [{"name": name, "minRunners": 1} for name in ("a", "b", "c")]
    spec = {"replicas": 3, "runnerGroups": groups, "rollout": {"maxUnavailable": 1, "maxSurge": surge}}
    started(cluster, "base", advanced=OLD, **spec)
    before = templates(cluster)
    cluster.cluster.pods_become_ready = False
    for name, pod in cluster.cluster.pods.items():
        cluster.cluster.pods[name] = replace(pod, ready=pod.group == "a")
    cluster.answers()
    cluster.apply(pool_object(advanced=NEW, **spec))
    cluster.step()
    after = templates(cluster)
    assert {group for group in after if after[group] != before[group]} == changed


def templates(world: ClusterWorld) -> dict[str, str]:
    """Return the hash of each group's template."""
    return {
        obj["metadata"]["labels"][GROUP_LABEL]: template_hash(obj)
        for key, obj in world.cluster.objects.items()
        if key.kind == "Deployment"
    }


GETS_ON = {"type": "Progressing", "status": "True", "lastUpdateTime": "1970-01-12T13:46:40Z"}  # when a world begins


@pytest.mark.parametrize(
    ("status", "after_s", "replaces"),
    [
        ({}, 0, False),
        ({"replicas": 1}, 0, True),  # a number that is left out is zero
        ({"replicas": 1, "updatedReplicas": 1}, 0, False),
        ({"replicas": 1, "conditions": [GETS_ON]}, 599, True),
        ({"replicas": 1, "conditions": [GETS_ON]}, 600, False),  # it may stand still, and another size ends that
        ({"replicas": 1, "conditions": [GETS_ON | {"status": "False"}]}, 0, False),
    ],
)
def test_a_deployment_replaces_its_pods_while_it_gets_on(status: Any, after_s: float, replaces: bool) -> None:
    assert is_replacing({"metadata": {}, "spec": {}, "status": status}, (), START + after_s) == replaces


def test_a_group_that_waits_is_scaled_all_the_same(cluster: ClusterWorld) -> None:
    groups = [{"name": name, "minRunners": 2} for name in ("a", "b")]
    started(cluster, "base", replicas=4, runnerGroups=groups, advanced=OLD)
    cluster.cluster.pods_become_ready = False
    cluster.settle(pool_object(replicas=6, runnerGroups=[groups[0], {"name": "b", "minRunners": 4}], advanced=NEW))
    assert cluster.sizes(pool_ref()) == {"a": 2, "b": 4}


def deployment(world: ClusterWorld) -> tuple[ObjectKey, Any]:
    ((key, obj),) = [(key, obj) for key, obj in world.cluster.objects.items() if key.kind == "Deployment"]
    return key, obj


def test_fewer_runners_of_another_template_are_one_write(cluster: ClusterWorld) -> None:
    started(cluster, "base", replicas=3, advanced=OLD)
    before = template_hash(deployment(cluster)[1])
    cluster.apply(pool_object(replicas=1, advanced=NEW))
    seen = list[tuple[bool, int]]()
    for _ in range(12):
        cluster.step()
        obj = deployment(cluster)[1]
        seen.append((template_hash(obj) != before, obj["spec"]["replicas"]))
        cluster.now += 1
    assert list(dict.fromkeys(seen)) == [(False, 3), (True, 1)]


@pytest.mark.parametrize("waits", [True, False])
def test_fewer_runners_wait_while_they_are_replaced_and_that_gets_on(cluster: ClusterWorld, waits: bool) -> None:
    started(cluster, "base", replicas=3, advanced=OLD)
    cluster.cluster.pods_become_ready = False
    cluster.settle(pool_object(replicas=3, advanced=NEW))
    key, obj = deployment(cluster)
    cluster.cluster.store(key, {**obj, "status": {"conditions": [GETS_ON]}})
    cluster.now = START + (0 if waits else 600)
    cluster.apply(pool_object(replicas=2, advanced=NEW))
    for _ in range(3):
        cluster.now += 0.1
        cluster.step()
    assert deployment(cluster)[1]["spec"]["replicas"] == (3 if waits else 2)
    if waits:
        assert "shrinks to 2 of 3 runners once they are replaced" in message(cluster, pool_ref(), "Progressing")
    cluster.cluster.pods_become_ready = True
    cluster.at_rest()
    assert ready(cluster) == 2


def test_no_runner_at_all_waits_for_nothing(cluster: ClusterWorld) -> None:
    started(cluster, "base", replicas=3, advanced=OLD)
    cluster.cluster.pods_become_ready = False
    cluster.settle(pool_object(replicas=3, advanced=NEW))
    cluster.settle(pool_object(replicas=0, advanced=NEW))
    assert not cluster.cluster.pods


@pytest.mark.parametrize("pods", [1, 2])
def test_a_new_version_comes_pool_by_pool_and_one_that_does_not_come_stops_it(cluster: ClusterWorld, pods: int) -> None:
    grid = {"tensor": pods, "pipeline": 1, "podsPerRunner": pods}
    started(cluster, "one", "two", "three", replicas=2, parallelism=grid)
    cluster.policy = OperatorPolicy(defaults=NEXT, resolve_period_s=60.0)
    cluster.cluster.pods_become_ready = False
    for _ in range(6):
        cluster.step()
    names = ("one", "two", "three")
    assert [ready(cluster, name) for name in names] == [pods, 2 * pods, 2 * pods]
    words = message(cluster, pool_ref("two"), "Progressing")
    assert words.endswith("waits until the runners of ServingPool default/one are ready"), words
    assert cluster.due(pool_ref("two")) == cluster.now + RETRY_S
    cluster.apply(pool_object("three", replicas=2, parallelism=grid, advanced=NEW))  # its own change waits for nobody
    cluster.step()
    cluster.step()
    assert [ready(cluster, name) for name in names] == [pods, 2 * pods, pods]
    cluster.cluster.pods_become_ready = True
    for _ in range(40):
        cluster.step()
        assert sum(ready(cluster, name) < 2 * pods for name in names) <= 2
        assert min(ready(cluster, name) for name in names) >= pods
    assert [images(cluster, name) for name in names] == [{NEXT.image}] * 3
    cluster.at_rest()


@pytest.mark.parametrize("at_a_time", [1, 2, 0])
def test_no_more_pools_are_replaced_at_a_time_than_the_platform_allows(cluster: ClusterWorld, at_a_time: int) -> None:
    names = ("a", "b", "c", "d")
    started(cluster, *names, replicas=2)
    cluster.policy = OperatorPolicy(defaults=replace(NEXT, pools_at_a_time=at_a_time))
    most = 0
    for _ in range(60):
        cluster.step()
        most = max(most, sum(ready(cluster, name) < 2 for name in names))
    assert most == (at_a_time or 4)
    assert [images(cluster, name) for name in names] == [{NEXT.image}] * 4


def test_a_pool_that_is_paused_or_broken_keeps_no_other_from_a_new_version(cluster: ClusterWorld) -> None:
    started(cluster, "broken", "good", "paused", replicas=2)
    cluster.apply(pool_object("paused", replicas=2, paused=True))
    broken = {name for name, pod in cluster.cluster.pods.items() if pod.pool == pool_ref("broken")}
    cluster.cluster.pods_become_ready = False
    for name in broken:
        cluster.cluster.pods[name] = replace(cluster.cluster.pods[name], ready=False)
    cluster.answers()
    cluster.policy = OperatorPolicy(defaults=NEXT, resolve_period_s=60.0)
    for _ in range(20):
        for name, pod in cluster.cluster.pods.items():
            cluster.cluster.pods[name] = replace(pod, ready=pod.pool != pool_ref("broken"))
        cluster.step()
    assert images(cluster, "good") == {NEXT.image}
    assert images(cluster, "paused") == {SITE.image}
    assert requeue_at(pool_ref("paused"), cluster.state, cluster.now) != cluster.now + RETRY_S


FOLDER, CLAIM = {"hostPath": {"path": "/srv/weft"}}, {"persistentVolumeClaim": {"claimName": "cache"}}


@pytest.mark.parametrize(
    ("cache", "site"),
    [
        (FOLDER, SharedFolders()),
        (FOLDER, SharedFolders(frozenset({"/srv", "/srv/weft-2"}), frozenset({"/srv/weft"}))),
        (CLAIM, SharedFolders()),
        (CLAIM, SharedFolders(frozenset({"cache", "default/cache"}), frozenset({"elsewhere/cache", "cache"}))),
    ],
)
def test_runners_with_a_folder_that_the_site_does_not_list_stay_and_none_is_made(
    cluster: ClusterWorld, cache: Any, site: SharedFolders
) -> None:
    started(cluster, "before", "good", replicas=2)
    cluster.apply(pool_object("before", replicas=2, modelCache=cache))  # admitted while the site listed it
    cluster.at_rest()
    names = {name for name, pod in cluster.cluster.pods.items() if pod.pool == pool_ref("before")}
    cluster.policy = OperatorPolicy(defaults=NEXT, resolve_period_s=60.0, shared_folders=site)
    cluster.contents["file:new"] = fetched_base()
    cluster.apply(pool_object("before", replicas=3, modelCache=cache))
    cluster.apply(pool_object("new", modelCache=cache))
    for _ in range(40):
        cluster.step()
    assert names == {name for name, pod in cluster.cluster.pods.items() if pod.pool == pool_ref("before")}
    assert (images(cluster, "before"), images(cluster, "good"), images(cluster, "new")) == (
        {SITE.image}, {NEXT.image}, set[str](),
    )  # fmt: skip
    for name in ("before", "new"):
        cluster.check(pool_ref(name), Progressing="False VolumeNotAllowed", Ready="False VolumeNotAllowed")
        assert "operator.modelCache." in message(cluster, pool_ref(name), "Progressing")
        assert requeue_at(pool_ref(name), cluster.state, cluster.now) != cluster.now + RETRY_S
    every = SharedFolders(frozenset({"/srv/weft"}), frozenset({"default/cache"}))
    cluster.policy = replace(cluster.policy, shared_folders=every)
    cluster.at_rest()
    assert (images(cluster, "before"), images(cluster, "new")) == ({NEXT.image}, {NEXT.image})


def test_a_rollout_that_begins_says_that_no_runner_is_of_the_new_template(cluster: ClusterWorld) -> None:
    started(cluster, "base", replicas=3, advanced=OLD)
    cluster.apply(pool_object(replicas=3, advanced=NEW))
    said = [str(action) for action in cluster.plan() if isinstance(action, SetStatus)]
    assert any(": 0 of 3 are of the new template" in status for status in said), said


def test_before_the_first_pool_has_begun_the_others_wait_for_it_by_name(cluster: ClusterWorld) -> None:
    started(cluster, "one", "two", replicas=2)
    cluster.policy = OperatorPolicy(defaults=NEXT)
    said = [str(action) for action in cluster.plan() if isinstance(action, SetStatus) and action.ref == pool_ref("two")]
    assert ["waits until the runners of ServingPool default/one are ready" in status for status in said] == [True]


def test_a_new_pool_of_runners_of_several_pods_keeps_no_other_from_a_new_version(cluster: ClusterWorld) -> None:
    started(cluster, "base", replicas=2)
    cluster.policy = OperatorPolicy(defaults=NEXT)
    cluster.apply(pool_object("new", parallelism={"tensor": 2, "pipeline": 1, "podsPerRunner": 2}))
    assert any(NEXT.image in str(action) for action in cluster.plan()), "the new one has not even a status"


@pytest.mark.parametrize("is_seen", [True, False])
@pytest.mark.parametrize("spec", [{}, {"parallelism": {"tensor": 2, "pipeline": 1, "podsPerRunner": 2}}])
def test_from_the_first_status_of_a_template_a_pool_is_not_ready_until_all_have_it(
    cluster: ClusterWorld, spec: Any, is_seen: bool
) -> None:
    """Nor where the scheduler's report still counts runners whose pods are not ready any more."""
    started(cluster, "base", replicas=2, advanced=OLD, **spec)
    cluster.cluster.pods = {name: replace(pod, ready=is_seen) for name, pod in cluster.cluster.pods.items()}
    cluster.cluster.seen_by(cluster.observed)
    cluster.apply(pool_object(replicas=2, advanced=NEW, **spec))
    told = list[str]()
    for _ in range(40):
        cluster.step()
        told.append(cluster.condition(pool_ref(), "Ready")[0])
    assert (told[0], told[-1]) == ("False", "True")
    assert told == sorted(told)


def test_runners_of_several_pods_stay_where_a_change_is_not_of_their_pods(cluster: ClusterWorld) -> None:
    """Only the scheduler reads a change of the phases; what is noted at the runners' objects follows."""
    spec = {"parallelism": {"tensor": 1, "pipeline": 2, "podsPerRunner": 2}, "replicas": 2}
    started(cluster, "base", **spec)
    before = {key: obj["metadata"]["uid"] for key, obj in cluster.cluster.objects.items()}
    phases = {"mode": "Split"}
    cluster.apply(pool_object(phases=phases, **spec))
    cluster.at_rest()
    assert {key: obj["metadata"]["uid"] for key, obj in cluster.cluster.objects.items()} == before
    assert cluster.plan() == []

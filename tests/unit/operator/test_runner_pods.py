"""Runners of several pods: a StatefulSet each, started, replaced and counted as one."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.operator.cluster import SITE, ClusterWorld
from tests.unit.operator.planning import pool_object, pool_ref
from weft.domain.routes import PhaseCounts, PoolStatus
from weft_operator.core import OperatorPolicy
from weft_operator.core.actions import DeleteChild
from weft_operator.core.children import GROUP_LABEL, INDEX_LABEL, RUNNER_LABEL
from weft_operator.core.state import APPLY_RETRY_S, ObjectKey, Pod, runner_pods
from weft_runner.settings import parse_settings

GRID = {"tensor": 2, "pipeline": 2, "podsPerRunner": 4}
SCALING = {"idleSeconds": 60}


@pytest.fixture
def pool(cluster: ClusterWorld) -> ClusterWorld:
    """Two runners of four pods, in a site with network policies."""
    cluster.policy = OperatorPolicy(defaults=replace(SITE, network_policies=True))
    cluster.apply(pool_object(replicas=2, parallelism=GRID))
    cluster.at_rest()
    return cluster


def manifests(cluster: ClusterWorld) -> list[dict[str, Any]]:
    """Return the manifests of StatefulSets."""
    return [obj for key, obj in cluster.cluster.objects.items() if key.kind == "StatefulSet"]


def sets(cluster: ClusterWorld) -> dict[str, dict[str, Any]]:
    """Return the manifests of StatefulSets by the runner's index."""
    return {obj["metadata"]["labels"][INDEX_LABEL]: obj for obj in manifests(cluster)}


def uids(cluster: ClusterWorld) -> dict[str, str]:
    return {index: obj["metadata"]["uid"] for index, obj in sets(cluster).items()}


def kinds(cluster: ClusterWorld) -> list[str]:
    return sorted(key.kind for key in cluster.cluster.objects)


def test_a_runner_is_a_set_of_pods_and_is_counted_once(pool: ClusterWorld) -> None:
    assert kinds(pool) == [
        *["NetworkPolicy"] * 2, "PodDisruptionBudget", "Service", "ServiceAccount", *["StatefulSet"] * 2,
    ]  # fmt: skip
    assert len(pool.cluster.pods) == 8
    status = pool.status(pool_ref())
    assert (status["desiredReplicas"], status["replicas"], status["readyReplicas"]) == (2, 2, 2)
    assert pool.condition(pool_ref(), "Progressing") == ("False", "RunnersReady")
    requests = pool.cluster.requests
    after = pool.restarted()
    after.policy = pool.policy
    after.at_rest()
    assert after.cluster.requests == requests


@pytest.mark.parametrize(("pods", "index"), [(4, 0), (4, 1), (4, 2), (4, 3), (2, 0), (2, 1)])
def test_the_pods_of_a_set_have_one_command_and_ranks_by_their_index(pool: ClusterWorld, pods: int, index: int) -> None:
    pool.apply(pool_object(replicas=2, parallelism=GRID | {"podsPerRunner": pods}))
    pool.at_rest()
    runner = sets(pool)["0"]
    assert runner["spec"]["replicas"] == pods
    (container,) = runner["spec"]["template"]["spec"]["containers"]
    filled = {"POD_IP": "10.0.0.7", "POD_NAME": "x", "POD_INDEX": str(index)}
    assert filled.keys() <= {one["name"] for one in container["env"]}
    words = list(container["args"])
    for name, value in filled.items():
        words = [word.replace(f"$({name})", value) for word in words]
    settings = parse_settings(words)
    assert (settings.tensor_parallel, settings.pipeline_parallel) == (2, 2)
    assert settings.ranks_here == range(index * 4 // pods, (index + 1) * 4 // pods)
    name, service = runner["metadata"]["name"], runner["spec"]["serviceName"]
    assert settings.leader == f"{name}-0.{service}.default.svc:7470"
    assert settings.ranks_listen == "10.0.0.7:7470"
    (ranks,) = [obj for key, obj in pool.cluster.objects.items() if (key.kind, key.name) == ("Service", service)]
    assert ranks["spec"]["publishNotReadyAddresses"], "ranks look for the first one before it is ready"


def test_the_policy_of_a_runner_lets_its_own_pods_in_and_those_of_no_other(pool: ClusterWorld) -> None:
    for index, runner in sets(pool).items():
        policy = pool.cluster.objects[ObjectKey("NetworkPolicy", "default", runner["metadata"]["name"])]["spec"]
        chosen = policy["podSelector"]["matchLabels"]
        assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": chosen}}]}]
        assert policy["egress"] == [{"to": [{"podSelector": {"matchLabels": chosen}}]}]
        for other, obj in sets(pool).items():
            labels = obj["spec"]["template"]["metadata"]["labels"]
            assert (chosen.items() <= labels.items()) == (index == other)


def test_without_network_policies_of_the_site_a_runner_has_none(cluster: ClusterWorld) -> None:
    cluster.apply(pool_object(parallelism=GRID))
    cluster.at_rest()
    assert "NetworkPolicy" not in kinds(cluster)


def test_another_launch_replaces_whole_runners_one_after_the_other(pool: ClusterWorld) -> None:
    before = uids(pool)
    pool.apply(pool_object(replicas=2, parallelism=GRID, advanced={"kvPages": 2048}))
    seen = {tuple(sorted(uids(pool).values()))}
    for _ in range(40):
        pool.step()
        seen.add(tuple(sorted(uids(pool).values())))
        assert len(pool.ready_names(pool_ref())) >= 4, "a runner serves throughout"
    after = uids(pool)
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    assert any(set(some) & set(before.values()) and set(some) & set(after.values()) for some in seen), "one at a time"
    assert all("2048" in obj["spec"]["template"]["spec"]["containers"][0]["args"] for obj in sets(pool).values())


def test_runners_of_two_groups_are_replaced_one_after_the_other(cluster: ClusterWorld) -> None:
    groups = [{"name": name, "minRunners": 1} for name in "ab"]
    for pages in (1024, 2048):
        cluster.apply(pool_object(replicas=2, parallelism=GRID, runnerGroups=groups, advanced={"kvPages": pages}))
        for _ in range(40):
            cluster.step()
            assert pages == 1024 or len(cluster.ready_names(pool_ref())) >= 4, "a runner serves throughout"
        containers = [obj["spec"]["template"]["spec"]["containers"][0] for obj in manifests(cluster)]
        assert [str(pages) in container["args"] for container in containers] == [True, True]


def test_scale_in_deletes_the_victims_statefulset_and_its_policy_once_its_pods_are_gone(pool: ClusterWorld) -> None:
    victim, stays = (sets(pool)[index]["metadata"]["name"] for index in ("0", "1"))
    pool.scheduler_speaks = False
    pool.apply(pool_object(replicas=1, parallelism=GRID))
    pool.step()
    assert len(sets(pool)) == 2, "the scheduler was not asked yet"
    pool.observed.pool_reports[str(pool_ref())] = PoolStatus(2, 1, (f"{victim}-0",), pool.generation(pool_ref()))
    pool.step()
    assert [obj["metadata"]["name"] for obj in sets(pool).values()] == [stays]
    pool.at_rest()
    assert {key.name for key in pool.cluster.objects if key.kind == "NetworkPolicy"} == {stays}


def test_the_policy_of_a_runner_that_ends_stays_while_it_has_pods(pool: ClusterWorld) -> None:
    ref, name = pool_ref(), sets(pool)["1"]["metadata"]["name"]
    pool.scheduler_speaks = False
    pool.apply(pool_object(replicas=1, parallelism=GRID))
    pool.step()
    pool.observed.pool_reports[str(ref)] = PoolStatus(2, 1, (f"{name}-0",), pool.generation(ref))
    del pool.observed.children[ref][ObjectKey("StatefulSet", "default", name)]
    pods = pool.observed.pods[ref]
    ending = {n: replace(pod, state="Leaving") for n, pod in pods.items() if pod.runner == name}
    pool.observed.pods[ref] = pods | ending
    assert not any(isinstance(order, DeleteChild) for order in pool.plan())
    pool.observed.pods[ref] = {n: pod for n, pod in pods.items() if n not in ending}
    (gone,) = [order for order in pool.plan() if isinstance(order, DeleteChild)]
    assert (gone.kind, gone.name) == ("NetworkPolicy", name)


def test_runners_of_a_group_that_is_no_longer_named_go_as_others_become_ready(pool: ClusterWorld) -> None:
    pool.apply(pool_object(replicas=2, parallelism=GRID, runnerGroups=[{"name": "new", "minRunners": 0}]))
    fewest = 8
    for _ in range(40):
        pool.step()
        fewest = min(fewest, len(pool.ready_names(pool_ref())))
    assert fewest >= 4, "a runner at a time"
    assert [obj["metadata"]["labels"]["serving.weft.dev/group"] for obj in sets(pool).values()] == ["new", "new"]


def test_a_runner_that_the_api_server_refuses_is_reported(pool: ClusterWorld) -> None:
    pool.cluster.refuses["StatefulSet"] = "no"
    pool.settle(pool_object(replicas=3, parallelism=GRID))
    assert pool.condition(pool_ref(), "Progressing") == ("False", "ChildRefused")


def test_a_runner_stays_as_long_as_the_api_server_would_refuse_its_next_one(pool: ClusterWorld) -> None:
    before = uids(pool)
    pool.cluster.refuses["StatefulSet"] = "no"
    pool.settle(pool_object(replicas=2, parallelism=GRID, advanced={"kvPages": 2048}))
    requests = pool.cluster.requests
    pool.wait(APPLY_RETRY_S - 1)
    assert pool.condition(pool_ref(), "Progressing") == ("False", "ChildRefused")
    assert (uids(pool), pool.cluster.requests) == (before, requests)
    pool.settle(pool_object(replicas=1, parallelism=GRID, advanced={"kvPages": 2048}))
    assert len(sets(pool)) == 1, "what nothing comes in the place of goes"
    pool.cluster.refuses.clear()
    pool.wait(APPLY_RETRY_S)
    pool.at_rest()
    assert pool.condition(pool_ref(), "Progressing") == ("False", "RunnersReady")


def test_while_the_scheduler_is_away_each_runner_counts_once(pool: ClusterWorld) -> None:
    pool.scheduler_speaks = False
    del pool.observed.pool_reports[str(pool_ref())]
    pool.apply(pool_object(parallelism=GRID, autoscaling={"minReplicas": 0, "maxReplicas": 9} | SCALING))
    pool.at_rest()
    assert pool.status(pool_ref())["desiredReplicas"] == len(sets(pool)) == 2


@pytest.mark.parametrize(
    "scaling",
    [{"replicas": 4}, {"autoscaling": {"minReplicas": 2, "maxReplicas": 4} | SCALING}],
    ids=["fixed", "autoscaled"],
)
def test_a_runner_for_one_phase_waits_for_a_victim_of_the_other(cluster: ClusterWorld, scaling: dict[str, Any]) -> None:
    """The new runner waits where the pool may have no more."""
    ref = pool_ref()
    groups = [{"name": phase.lower(), "minRunners": 0, "phase": phase} for phase in ("Prompt", "Token")]
    phases = {"mode": "Split"}
    cluster.scheduler_speaks = False
    cluster.apply(pool_object(parallelism=GRID, runnerGroups=groups, phases=phases, **scaling))

    def wanted(prompt: int, token: int, *victims: str) -> Counter[str]:
        counts = PhaseCounts(prompt, token)
        report = PoolStatus(4, prompt + token, victims, cluster.generation(ref), wanted=counts)
        cluster.observed.pool_reports[str(ref)] = report
        cluster.at_rest()
        return Counter(obj["metadata"]["labels"][GROUP_LABEL] for obj in manifests(cluster))

    assert wanted(3, 1) == {"prompt": 3, "token": 1}
    assert wanted(1, 3) == {"prompt": 3, "token": 1}, "none goes that was not named, and there is no room for more"
    victim = next(obj for obj in manifests(cluster) if obj["metadata"]["labels"][GROUP_LABEL] == "prompt")
    assert wanted(1, 3, f"{victim['metadata']['name']}-0") == {"prompt": 2, "token": 2}
    assert victim["metadata"]["uid"] not in {obj["metadata"]["uid"] for obj in manifests(cluster)}


@pytest.mark.parametrize(
    ("states", "together"),
    [
        (("Ready", "Ready"), "Ready"),
        (("Ready", "Starting"), "Starting"),
        (("Starting", "Ready"), "Starting"),
        (("Ready", "Leaving"), "Starting"),
        (("Leaving", "Leaving"), "Leaving"),
        (("Starting",), "Starting"),  # its others are not there yet
        (("Starting", "CrashLoop"), "CrashLoop"),
        (("Unschedulable", "Starting"), "Unschedulable"),
    ],
)
def test_the_pods_of_a_runner_are_one_in_the_state_of_all(states: tuple[Any, ...], together: str) -> None:
    alone = Pod("a", "u", "g", "Ready")
    pods = [Pod(f"r-{i}", f"u{i}", "g", state, f"why {i}", runner="r") for i, state in enumerate(states)]
    found = runner_pods([*pods, alone])
    assert [(pod.name, pod.state) for pod in found] == [("a", "Ready"), ("r-0", together)]
    if together in states and together in ("CrashLoop", "Unschedulable"):
        assert found[1].message == f"why {states.index(together)}"


def test_a_pods_label_says_whose_it_is(pool: ClusterWorld) -> None:
    for obj in sets(pool).values():
        assert obj["spec"]["template"]["metadata"]["labels"][RUNNER_LABEL] == obj["metadata"]["name"]
        assert obj["spec"]["selector"]["matchLabels"].items() <= obj["spec"]["template"]["metadata"]["labels"].items()

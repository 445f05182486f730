"""The life of pools and adapters against a real API server, depot, scheduler and supervisor; pods are played.

One operator and one player of pods for all tests: each test begins with nothing of ours in the namespace.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness.bad_manifests import pool
from harness.cluster.cluster import OURS
from harness.cluster.fake_kubelet import NODE, FakeKubelet
from harness.operator.stage import Stage, until
from weft_devcluster.api import is_so

BASE_NAME = "weft-quickstart"
OBJECTS = (("servingpool", "base"), ("loraadapter", "upper"), ("loraadapter", "nowhere"))


@pytest.fixture(scope="module")
def kubelet(running: Stage) -> Iterator[FakeKubelet]:
    with running.kubelet() as made:
        running.replica()
        yield made


@pytest.fixture(autouse=True)
def _an_operator_works(running: Stage, kubelet: FakeKubelet) -> None:
    kubelet.check()
    assert [replica.running for replica in running.replicas] == [True]


def with_pool(stage: Stage, **spec: Any) -> None:
    stage.apply_pool(**spec)
    stage.wait_for("servingpool", "base", "Available")


def with_adapter(stage: Stage, name: str = "upper", uri: str = "file:adapters/upper") -> None:
    with_pool(stage)
    stage.apply_adapter(name, uri)
    stage.wait_for("loraadapter", name, "Ready")


def test_an_applied_adapter_becomes_ready_with_its_digest(stage: Stage) -> None:
    with_adapter(stage)
    stage.wait_for_value("loraadapter", "upper", "status.unavailableRunners", 0)
    upper, pool = stage.get("loraadapter", "upper"), stage.get("servingpool", "base")
    assert upper["status"]["digest"].startswith("sha256:")
    assert upper["status"]["rank"] > 0
    assert upper["metadata"]["finalizers"] == ["serving.weft.dev/unload"]
    assert {pool["status"][name] for name in ("replicas", "readyReplicas", "desiredReplicas")} == {1}
    assert pool["status"]["selector"] == "serving.weft.dev/pool=base,app.kubernetes.io/component=runner"


def test_a_deleted_pool_takes_everything_that_it_owns_with_it(stage: Stage) -> None:
    with_pool(stage)
    stage.kubectl("delete", "servingpool", "base")
    for kind in ("deployment", "pod", "service", "poddisruptionbudget"):
        until(lambda kind=kind: not stage.names(kind), f"no {kind} is left")


def test_the_drain_of_a_node_waits_until_its_only_runner_has_moved(stage: Stage) -> None:
    stage.apply_pool("drained", disruptionBudget={"maxUnavailable": 0})
    stage.wait_for("servingpool", "drained", "Available")
    stage.wait_for_value("poddisruptionbudget", "drained-runners", "status.currentHealthy", 1)
    before = stage.names("pod")
    with stage.kubelet("another-node"), ThreadPoolExecutor() as threads:
        flags = ("--pod-selector=serving.weft.dev/pool=drained", "--delete-emptydir-data")
        drain, fewest = threads.submit(stage.control_plane.kubectl, "drain", NODE, *flags), 1
        while not drain.done():
            fewest = min(fewest, len(ready_pods(stage)))
        stage.control_plane.kubectl("uncordon", NODE)
        drain.result()
        assert fewest == 1
        assert len(ready_pods(stage)) == 1
        assert not before & ready_pods(stage)
        stage.kubectl("delete", "servingpool", "drained")
        until(lambda: not stage.names("pod"), "no pod is left")


def ready_pods(stage: Stage) -> set[str]:
    listed = stage.control_plane.get("pods", namespace=stage.namespace)["items"]
    return {
        pod["metadata"]["name"] for pod in listed if is_so("Ready")(pod) and "deletionTimestamp" not in pod["metadata"]
    }


GRID = {"tensor": 2, "podsPerRunner": 2}


@pytest.mark.usefixtures("audited")
def test_runners_of_several_pods_are_sets_that_come_change_and_go_as_one(stage: Stage) -> None:
    with_pool(stage, replicas=2, parallelism=GRID)
    stage.wait_for_value("servingpool", "base", "status.readyReplicas", 2)
    sets, pods = stage.names("statefulset"), stage.names("pod")
    assert stage.names("networkpolicy") == sets
    assert pods == {f"{name}-{index}" for name in sets for index in (0, 1)}
    uids = {stage.get("statefulset", name)["metadata"]["uid"] for name in sets}
    victim = sorted(pods)[0]
    uid = stage.get("pod", victim)["metadata"]["uid"]
    mark = stage.control_plane.mark()
    stage.delete("pod", victim)
    stage.wait_until("pod", victim, lambda pod: pod["metadata"]["uid"] != uid, "comes again under its name")
    stage.wait_for_value("servingpool", "base", "status.readyReplicas", 2)
    assert not [write for write in stage.writes(mark) if "statefulsets" in write], "a pod is Kubernetes' own business"
    stage.apply_pool(replicas=2, parallelism=GRID, advanced={"kvPages": 2048})

    def replaced() -> bool:
        listed = stage.control_plane.get("statefulsets", namespace=stage.namespace)["items"]
        found = {item["metadata"]["uid"] for item in listed}
        return len(found) == 2 and not uids & found

    until(replaced, "both runners are others")
    stage.wait_for_value("servingpool", "base", "status.readyReplicas", 2)
    stage.apply_pool(replicas=1, parallelism=GRID, advanced={"kvPages": 2048})
    until(lambda: len(stage.names("statefulset")) == len(stage.names("networkpolicy")) == 1, "one runner is left")
    until(lambda: len(stage.names("pod")) == 2, "and its pods")


@pytest.mark.parametrize(
    ("affinity", "says"),
    [
        ({"nodeAffinty": {}}, "nodeAffinty"),
        (
            {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Like"}]}]
                    }
                }
            },
            "not a valid selector operator",
        ),
    ],
)
@pytest.mark.parametrize(("kind", "spec"), [("deployment", {}), ("statefulset", {"parallelism": GRID})])
def test_scheduling_that_the_api_server_refuses_is_a_condition_and_no_runner_is_replaced(
    stage: Stage, affinity: dict[str, Any], says: str, kind: str, spec: dict[str, Any]
) -> None:
    def made() -> tuple[str, dict[str, Any]]:
        (name,) = stage.names(kind)
        found = stage.get(kind, name)
        return found["metadata"]["uid"], found["spec"]["template"]

    with_pool(stage, **spec)
    pods, before = stage.names("pod"), made()
    stage.apply_pool(template={"affinity": affinity}, **spec)

    def refused() -> bool:
        found = stage.condition("servingpool", "base", "Progressing")
        return found["reason"] == "ChildRefused" and says in found["message"]

    until(refused, "the condition has the API server's words")
    assert (stage.names("pod"), made()) == (pods, before)
    right = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    stage.apply_pool(template={"affinity": right, "labels": {"team": "red"}}, **spec)
    until(lambda: stage.names(kind) and made()[1] != before[1], "what it takes replaces them")


def test_what_others_change_in_children_is_put_back(stage: Stage) -> None:
    with_pool(stage)
    stage.kubectl("scale", "deployment/base-runners", "--replicas=3")
    stage.wait_for_value("deployment", "base-runners", "spec.replicas", 1)
    stage.kubectl("label", "deployment/base-runners", "--overwrite", "app.kubernetes.io/managed-by=me")
    managed_by = "app.kubernetes.io/managed-by"
    stage.wait_until(
        "deployment", "base-runners", lambda d: d["metadata"]["labels"][managed_by] == "weft-operator", "is ours again"
    )
    orphan = '[{"op": "remove", "path": "/metadata/ownerReferences"}]'
    stage.kubectl("patch", "serviceaccount/base-runners", "--type=json", "-p", orphan)

    def is_owned(account: dict[str, Any]) -> bool:
        return [owner["name"] for owner in account["metadata"].get("ownerReferences", ())] == ["base"]

    stage.wait_until("serviceaccount", "base-runners", is_owned, "is owned again")
    uid = stage.get("poddisruptionbudget", "base-runners")["metadata"]["uid"]
    stage.delete("poddisruptionbudget", "base-runners")
    stage.wait_until("poddisruptionbudget", "base-runners", lambda found: found["metadata"]["uid"] != uid, "is new")


def test_a_runner_that_ends_again_and_again_is_reported_with_its_last_words(stage: Stage, kubelet: FakeKubelet) -> None:
    kubelet.crash("base-")
    stage.apply_pool()
    until(lambda: stage.condition("servingpool", "base", "Progressing").get("reason") == "CrashLoop", "it is told")
    condition = stage.condition("servingpool", "base", "Progressing")
    assert (condition["status"], "cannot start: told to by the test" in condition["message"]) == ("False", True)
    kubelet.heal("base-")
    stage.wait_for("servingpool", "base", "Available")


def test_a_pool_where_none_are_served_says_what_to_do(stage: Stage) -> None:
    elsewhere = stage.control_plane.create_namespace("elsewhere")
    stage.control_plane.apply(pool("base", elsewhere, model={"name": BASE_NAME, "uri": "file:model"}))
    stage.control_plane.wait_until("servingpool", "base", elsewhere, is_so("Accepted", "False"), "is not accepted")
    conditions = stage.control_plane.get("servingpool", "base", elsewhere)["status"]["conditions"]
    assert conditions[0]["reason"] == "NamespaceNotServed"
    stage.control_plane.empty(elsewhere, OURS)
    stage.control_plane.delete_namespace(elsewhere)


@pytest.mark.usefixtures("audited")
def test_events_report_transitions_and_of_nothing_else(stage: Stage) -> None:
    with_adapter(stage)
    stage.apply_adapter("nowhere", "file:adapters/absent")
    stage.wait_for("loraadapter", "nowhere", "Fetched", "False")

    ours = {stage.get(kind, name)["metadata"]["uid"] for kind, name in OBJECTS}

    def told() -> list[tuple[str, str, str]]:
        events = stage.control_plane.get("events.events.k8s.io", namespace=stage.namespace)["items"]
        of_ours = [event for event in events if event["regarding"].get("uid") in ours]
        assert {event["reportingController"] for event in of_ours} <= {"serving.weft.dev/weft-operator"}
        return [(event["regarding"]["name"], event["reason"], event["note"]) for event in of_ours]

    announced = {("nowhere", "SourceNotFound"), ("upper", "Published")}
    until(lambda: announced <= {event[:2] for event in told()}, "both are announced")
    before, mark = sorted(told()), stage.control_plane.mark()
    stage.kubectl("label", "loraadapter", "upper", "touched=yes")
    stage.kubectl("scale", "servingpool/base", "--replicas=2")
    stage.wait_for_value("servingpool", "base", "status.readyReplicas", 2)
    assert [write for write in stage.writes(mark) if "events" in write and " upper" in write] == []
    now = sorted(told())
    assert len(now) == len(set(now)), json.dumps(now)
    assert [event for event in now if event[0] != "base"] == [event for event in before if event[0] != "base"]


def test_the_status_of_an_adapter_is_the_operators_alone(stage: Stage) -> None:
    """What a tenant writes into a status is put right."""
    with_adapter(stage)
    digest = stage.get("loraadapter", "upper")["status"]["digest"]
    lie = json.dumps({"status": {"digest": "sha256:" + "0" * 64}})
    stage.kubectl("patch", "loraadapter", "upper", "--subresource=status", "--type=merge", "-p", lie)
    stage.wait_for_value("loraadapter", "upper", "status.digest", digest)

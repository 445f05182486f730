"""A pod as the planner sees it, from what API servers really say."""

from typing import Any

import pytest

from weft_operator.core import Object, Ref
from weft_operator.core.state import ObjectKey, Pod
from weft_operator.kubernetes import EventMapper, is_unschedulable, observed_pod, owner_of, pool_of, strip_unused

POOL = Ref("ServingPool", "ml", "base")
LABELS = {"serving.weft.dev/pool": "base", "serving.weft.dev/group": "runners"}


def pod(status: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    meta = {"name": "base-runners-x", "namespace": "ml", "uid": "u1", "resourceVersion": "1", "labels": LABELS}
    return {"kind": "Pod", "metadata": {**meta, **metadata}, "status": status}


def container(**fields: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "runner", **fields}]}


READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
BACK_OFF = {"state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}}


@pytest.mark.parametrize(
    ("obj", "state", "message"),
    [
        (pod(READY), "Ready", ""),
        (pod({}), "Starting", ""),
        (pod({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]}), "Starting", ""),
        (pod(container(state={"waiting": {"reason": "ContainerCreating"}})), "Starting", ""),
        (pod(READY, deletionTimestamp="2026-01-01T00:00:00Z"), "Leaving", ""),
        (pod({"phase": "Failed", "reason": "Evicted"}), "Leaving", ""),
        (
            pod({"conditions": [_unschedulable := {
                "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no GPU",
            }]}),
            "Unschedulable",
            "0/3 nodes: no GPU",
        ),
        (
            pod(container(**BACK_OFF, lastState={"terminated": {"exitCode": 2, "message": "--pool: wrong\n"}})),
            "CrashLoop",
            "runner: CrashLoopBackOff: exit code 2: --pool: wrong",
        ),
        (
            pod(container(**BACK_OFF, lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}})),
            "CrashLoop",
            "runner: CrashLoopBackOff: exit code 137: OOMKilled",
        ),
        (
            pod(container(state={"waiting": {"reason": "ErrImageNeverPull", "message": "image weft is not present"}})),
            "CrashLoop",
            "runner: ErrImageNeverPull: image weft is not present",
        ),
    ],
)  # fmt: skip
def test_the_state_of_a_pod_and_why(obj: Object, state: str, message: str) -> None:
    seen = observed_pod(obj)
    assert (seen.state, seen.message) == (state, message)
    assert (seen.name, seen.uid, seen.group) == ("base-runners-x", "u1", "runners")


def test_why_a_pod_crashes_is_reported_in_the_same_words_while_the_kubelet_waits_longer_and_longer() -> None:
    last = {"lastState": {"terminated": {"exitCode": 1, "message": "no such device"}}}
    words = [
        observed_pod(pod(container(state={"waiting": {"reason": "CrashLoopBackOff", "message": text}}, **last))).message
        for text in ("back-off 10s", "back-off 20s")
    ]
    assert words[0] == words[1]


@pytest.mark.parametrize(("text", "cost"), [(None, None), ("-3", -3), ("many", None), ("", None)])
def test_the_cost_of_a_pod_is_a_number_or_nothing(text: str | None, cost: int | None) -> None:
    annotations = {} if text is None else {"controller.kubernetes.io/pod-deletion-cost": text}
    assert observed_pod(pod(READY, annotations=annotations)).cost == cost


def owned(kind: str = "Deployment", owner: str | None = "base", **metadata: Any) -> dict[str, Any]:
    reference = {"apiVersion": "serving.weft.dev/v1alpha1", "kind": "ServingPool", "name": owner, "controller": True}
    meta = {"name": "base-runners", "namespace": "ml", "uid": "u2", "resourceVersion": "1", "labels": LABELS}
    return {"kind": kind, "metadata": {**meta, "ownerReferences": ([reference] if owner else []), **metadata}}


def test_what_a_pool_owns_is_said_by_its_owner_not_by_its_labels() -> None:
    assert owner_of(owned()) == POOL
    assert owner_of(owned(owner=None)) is None
    assert pool_of(pod(READY)) == POOL
    assert pool_of(pod(READY, labels=None)) is None


class Recorder:
    """A planner that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, bool]] = []

    def on_object(self, obj: Object, *, gone: bool = False) -> None:
        self.calls.append(("object", obj["metadata"]["name"], gone))

    def on_child(self, pool: Ref, key: ObjectKey, obj: Object | None) -> None:
        self.calls.append((pool.name, key.name, obj is None))

    def on_pod(self, pool: Ref, name: str, pod: Pod | None) -> None:
        self.calls.append((pool.name, name, pod is None))

    def on_node(self, name: str, *, unschedulable: bool) -> None:
        self.calls.append(("node", name, unschedulable))


@pytest.mark.parametrize(
    ("spec", "leaving"),
    [
        ({}, False),
        ({"unschedulable": True}, True),
        ({"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}, False),
        ({"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]}, True),
        ({"taints": [{"key": "karpenter.sh/disrupted", "effect": "PreferNoSchedule"}]}, False),
        ({"taints": None, "unschedulable": None}, False),
    ],
)
def test_a_node_is_left_once_it_is_cordoned_or_about_to_be_taken_away(spec: Object, leaving: bool) -> None:
    assert is_unschedulable({"kind": "Node", "metadata": {"name": "n"}, "spec": spec}) == leaving


@pytest.mark.parametrize(
    ("tolerations", "node"),
    [
        (None, "n"),
        ([{"key": "nvidia.com/gpu", "operator": "Exists"}], "n"),
        ([{"operator": "Exists"}], ""),
        ([{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}], ""),
    ],
)
def test_a_pod_leaves_its_node_unless_it_might_be_placed_there_again(tolerations: Any, node: str) -> None:
    obj = {**pod(READY), "spec": {"nodeName": "n", "tolerations": tolerations}}
    assert observed_pod(strip_unused(obj)).node == node


def test_a_child_whose_owner_is_taken_off_leaves_its_pool_and_returns_with_it() -> None:
    recorder = Recorder()
    feed = EventMapper(recorder)
    feed.on_event(owned(), False)
    feed.on_event(owned(owner=None), False)
    feed.on_event(owned(), False)
    feed.on_event(owned(), True)
    assert recorder.calls == [
        ("base", "base-runners", False),
        ("base", "base-runners", True),
        ("base", "base-runners", False),
        ("base", "base-runners", True),
    ]


def test_a_pod_that_is_given_to_another_pool_leaves_the_first() -> None:
    recorder = Recorder()
    feed = EventMapper(recorder)
    feed.on_event(pod(READY), False)
    feed.on_event(pod(READY, labels={"serving.weft.dev/pool": "other"}), False)
    assert recorder.calls == [
        ("base", "base-runners-x", False),
        ("base", "base-runners-x", True),
        ("other", "base-runners-x", False),
    ]

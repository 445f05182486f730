"""The life of pools and adapters against a real API server, depot, scheduler and supervisor; pods are played."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.control_plane import ControlPlane
from cluster.errors import KubectlFailed
from tests.operator.stage import PATIENCE_S, Stage, playing, until

BASE_NAME = "weft-quickstart"
MANAGED_BY = r".metadata.labels.app\.kubernetes\.io/managed-by"


@pytest.fixture
def stage(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Stage]:
    with Stage(control_plane, namespace, tmp_path) as made:
        yield made


def with_pool(stage: Stage, **spec: Any) -> None:
    stage.apply_pool(**spec)
    stage.wait_for("servingpool", "base", "Available")


def test_an_applied_adapter_becomes_ready_with_its_digest(stage: Stage) -> None:
    with playing(stage):
        with_pool(stage)
        stage.apply_adapter("upper", "file:adapters/upper")
        stage.wait_for("loraadapter", "upper", "Ready")
        stage.wait_for_value("loraadapter", "upper", ".status.readyRunners", 1)
        upper, pool = stage.get("loraadapter", "upper"), stage.get("servingpool", "base")
    assert upper["status"]["digest"].startswith("sha256:")
    assert upper["status"]["rank"] > 0
    assert upper["metadata"]["finalizers"] == ["serving.weft.dev/unload"]
    assert {pool["status"][name] for name in ("replicas", "readyReplicas", "desiredReplicas")} == {1}
    assert pool["status"]["selector"] == "serving.weft.dev/pool=base,app.kubernetes.io/component=runner"


def test_a_replaced_source_is_another_digest_and_stays_ready(stage: Stage) -> None:
    source = stage.file_root / "mine"
    shutil.copytree(stage.file_root / "adapters" / "upper", source)
    with playing(stage):
        with_pool(stage)
        stage.apply_adapter("mine", "file:mine")
        stage.wait_for("loraadapter", "mine", "Ready")
        before = stage.get("loraadapter", "mine")["status"]["digest"]
        stage.replace_folder(source, stage.file_root / "adapters" / "digits")
        after = until(
            lambda: (digest := stage.get("loraadapter", "mine")["status"]["digest"]) != before and digest,
            "the new digest is told",
        )
        assert stage.condition("loraadapter", "mine", "Ready")["status"] == "True"
    assert after.startswith("sha256:")


def test_a_deleted_adapter_goes_once_no_runner_holds_it(stage: Stage) -> None:
    with playing(stage):
        with_pool(stage)
        stage.apply_adapter("upper", "file:adapters/upper")
        stage.wait_for("loraadapter", "upper", "Ready")
        stage.kubectl("delete", "loraadapter", "upper", f"--timeout={PATIENCE_S:.0f}s")
        assert stage.names("loraadapter") == set()


def test_a_deleted_pool_takes_everything_that_it_owns_with_it(stage: Stage) -> None:
    with playing(stage):
        with_pool(stage)
        stage.kubectl("delete", "servingpool", "base", f"--timeout={PATIENCE_S:.0f}s")
        for kind in ("deployment", "pod", "service", "poddisruptionbudget"):
            until(lambda kind=kind: not stage.names(kind), f"no {kind} is left")


def test_a_renamed_group_gives_its_runners_over_one_by_one(stage: Stage) -> None:
    with playing(stage):
        with_pool(stage, replicas=3, runnerGroups=[{"name": "old"}])
        stage.wait_for_value("servingpool", "base", ".status.readyReplicas", 3)
        stage.wait_for_value("deployment", "base-old", ".status.readyReplicas", 3)  # else its version still changes
        mark = stage.control_plane.mark()
        stage.apply_pool(replicas=3, runnerGroups=[{"name": "new"}])
        until(lambda: stage.names("deployment") == {"base-new"}, "only the new group is there")
        stage.wait_for_value("servingpool", "base", ".status.readyReplicas", 3)
        written = [write for write in stage.writes(mark) if "deployments/ base-old" in write]
    assert written[0] == "patch deployments/ base-old 200", "first fewer"
    assert "delete deployments/ base-old 200" in written


def test_bad_adapters_have_their_reasons_and_a_good_one_beside_them_is_untouched(stage: Stage) -> None:
    with playing(stage):
        with_pool(stage, lora={"maxRank": 8})
        stage.apply_adapter("good", "file:adapters/upper")
        stage.apply_adapter("nowhere", "file:adapters/absent")
        stage.apply_adapter("other-pool", "file:adapters/upper", pool="absent")
        stage.apply_adapter("wrong-digest", "file:adapters/upper", digest="sha256:" + "0" * 64)
        for name, condition, reason in (
            ("nowhere", "Fetched", "SourceNotFound"),
            ("other-pool", "Accepted", "PoolNotFound"),
            ("wrong-digest", "Fetched", "DigestMismatch"),
        ):
            stage.wait_for("loraadapter", name, condition, "False")
            assert stage.condition("loraadapter", name, condition)["reason"] == reason
        stage.wait_for("loraadapter", "good", "Ready")


def test_a_bad_adapter_that_is_mended_recovers(stage: Stage) -> None:
    with playing(stage):
        with_pool(stage)
        stage.apply_adapter("mended", "file:adapters/absent")
        stage.wait_for("loraadapter", "mended", "Fetched", "False")
        stage.apply_adapter("mended", "file:adapters/upper")
        stage.wait_for("loraadapter", "mended", "Ready")


def test_what_others_change_in_children_is_put_back(stage: Stage) -> None:
    with playing(stage):
        with_pool(stage)
        stage.kubectl("scale", "deployment/base-runners", "--replicas=3")
        stage.wait_for_value("deployment", "base-runners", ".spec.replicas", 1)
        stage.kubectl("label", "deployment/base-runners", "--overwrite", "app.kubernetes.io/managed-by=me")
        stage.wait_for_value("deployment", "base-runners", MANAGED_BY, "weft-operator")
        orphan = '[{"op": "remove", "path": "/metadata/ownerReferences"}]'
        stage.kubectl("patch", "service/base-runners", "--type=json", "-p", orphan)
        stage.wait_for_value("service", "base-runners", ".metadata.ownerReferences[0].name", "base")
        stage.kubectl("delete", "poddisruptionbudget", "base-runners")
        stage.kubectl("wait", "--for=create", "poddisruptionbudget/base-runners", "--timeout=30s")


def test_scaling_up_and_down_marks_the_runners_that_go_before_the_number_is_lowered(stage: Stage) -> None:
    with playing(stage):
        with_pool(stage)
        stage.kubectl("scale", "servingpool/base", "--replicas=3")
        stage.wait_for_value("servingpool", "base", ".status.readyReplicas", 3)
        stage.wait_for_value("deployment", "base-runners", ".status.readyReplicas", 3)  # else its version still changes
        mark = stage.control_plane.mark()
        stage.kubectl("scale", "servingpool/base", "--replicas=1")
        stage.wait_for_value("servingpool", "base", ".status.replicas", 1)
        assert stage.get("servingpool", "base")["status"]["lastScale"]["to"] == 1
        written = [w for w in stage.writes(mark) if " pods/" in w or " deployments/" in w]
    marked, lowered = written[:2], written[2:]
    assert [w.split()[:2] for w in marked] == [["patch", "pods/"]] * 2
    assert [w.split()[:3] for w in lowered] == [["patch", "deployments/", "base-runners"]]


def test_a_runner_that_ends_again_and_again_is_told_with_its_last_words(stage: Stage) -> None:
    with stage.kubelet() as kubelet:
        stage.replica()
        kubelet.crash("base-")
        stage.apply_pool()
        stage.wait_for("servingpool", "base", "Progressing", "False")
        condition = stage.condition("servingpool", "base", "Progressing")
        assert (condition["reason"], "cannot start: told to by the test" in condition["message"]) == ("CrashLoop", True)
        kubelet.heal("base-")
        stage.wait_for("servingpool", "base", "Available")


def test_a_pool_where_none_are_served_says_what_to_do(stage: Stage) -> None:
    elsewhere = stage.control_plane.create_namespace("elsewhere")
    stage.replica()
    manifest = {
        "apiVersion": "serving.weft.dev/v1alpha1",
        "kind": "ServingPool",
        "metadata": {"name": "base", "namespace": elsewhere},
        "spec": {"model": {"name": BASE_NAME, "uri": "file:model"}},
    }
    stage.control_plane.apply(manifest)
    refused = ("servingpool/base", "--for=condition=Accepted=False", "--timeout=30s")
    stage.control_plane.kubectl("wait", "-n", elsewhere, *refused)
    conditions = stage.control_plane.get("servingpool", "base", "-n", elsewhere)["status"]["conditions"]
    assert conditions[0]["reason"] == "NamespaceNotServed"
    stage.control_plane.kubectl("delete", "servingpool", "base", "-n", elsewhere, "--wait=false")
    stage.control_plane.delete_namespace(elsewhere)


def test_events_tell_of_transitions_and_of_nothing_else(stage: Stage) -> None:
    with playing(stage):
        with_pool(stage)
        stage.apply_adapter("upper", "file:adapters/upper")
        stage.wait_for("loraadapter", "upper", "Ready")
        stage.apply_adapter("nowhere", "file:adapters/absent")
        stage.wait_for("loraadapter", "nowhere", "Fetched", "False")

        def told() -> list[tuple[str, str, str]]:
            events = stage.control_plane.get("events.events.k8s.io", "-n", stage.namespace)["items"]
            ours = [event for event in events if event["reportingController"] == "serving.weft.dev/weft-operator"]
            return [(event["regarding"]["name"], event["reason"], event["note"]) for event in ours]

        until(lambda: ("nowhere", "SourceNotFound") in {event[:2] for event in told()}, "the failure is announced")
        assert ("upper", "Published") in {event[:2] for event in told()}
        before, mark = sorted(told()), stage.control_plane.mark()
        stage.kubectl("label", "loraadapter", "upper", "touched=yes")
        stage.kubectl("scale", "servingpool/base", "--replicas=2")
        stage.wait_for_value("servingpool", "base", ".status.readyReplicas", 2)
        again = [write for write in stage.writes(mark) if "events" in write and " upper" in write]
        assert again == []
        assert len(told()) == len(set(told())), json.dumps(told())
        assert [event for event in sorted(told()) if event[0] != "base"] == [e for e in before if e[0] != "base"]


def test_the_status_of_an_adapter_is_the_operators_alone(stage: Stage) -> None:
    """What a tenant writes into a status is put right."""
    with playing(stage):
        with_pool(stage)
        stage.apply_adapter("upper", "file:adapters/upper")
        stage.wait_for("loraadapter", "upper", "Ready")
        digest = stage.get("loraadapter", "upper")["status"]["digest"]
        lie = json.dumps({"status": {"digest": "sha256:" + "0" * 64}})
        stage.kubectl("patch", "loraadapter", "upper", "--subresource=status", "--type=merge", "-p", lie)
        stage.wait_for_value("loraadapter", "upper", ".status.digest", digest)


def test_the_stage_notices_what_is_not_there(stage: Stage) -> None:
    """The waits of this file can fail."""
    with pytest.raises(KubectlFailed):
        stage.wait_for("servingpool", "absent", "Available", timeout_s=1)

"""What a pool should own and cannot have: a stranger's object is left alone, a refusal is told and comes to an end."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.control_plane import ControlPlane
from tests.operator.stage import Stage, playing, until


@pytest.fixture
def stage(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Stage]:
    with Stage(control_plane, namespace, tmp_path) as made:
        yield made


def told(stage: Stage, reason: str) -> str:
    """The message of a pool that does not progress for that reason."""

    def found() -> Any:
        conditions = stage.get("servingpool", "base").get("status", {}).get("conditions", [])
        return next((c["message"] for c in conditions if (c["type"], c["reason"]) == ("Progressing", reason)), None)

    return str(until(found, f"Progressing tells {reason}"))


def budget(stage: Stage) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "base-runners", "namespace": stage.namespace},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "somebody-elses"}}},
    }


def test_a_strangers_object_of_the_same_name_is_not_taken_over(stage: Stage) -> None:
    stage.control_plane.apply(budget(stage))
    before = stage.get("poddisruptionbudget", "base-runners")
    with playing(stage):
        stage.apply_pool()
        assert "PodDisruptionBudget base-runners" in told(stage, "ChildConflict")
        stage.wait_for("servingpool", "base", "Available")  # the rest of what it owns is made all the same
        after = stage.get("poddisruptionbudget", "base-runners")
        assert (after["spec"], "ownerReferences" in after["metadata"]) == (before["spec"], False)
        stage.kubectl("delete", "poddisruptionbudget", "base-runners")
        told(stage, "RunnersReady")
        owners = stage.get("poddisruptionbudget", "base-runners")["metadata"]["ownerReferences"]
        assert [owner["kind"] for owner in owners] == ["ServingPool"]


def test_a_quota_is_told_for_what_the_pool_owns_and_for_its_pods(stage: Stage) -> None:
    def quota(**hard: str) -> None:
        stage.control_plane.apply(
            {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "tight", "namespace": stage.namespace},
                "spec": {"hard": hard},
            }
        )
        counted = next(iter(hard))
        until(
            lambda: counted in json.dumps(stage.get("resourcequota", "tight").get("status", {}).get("hard", {})),
            "the quota is counted",
        )

    quota(**{"count/deployments.apps": "0"})
    with playing(stage):
        stage.apply_pool()
        assert "exceeded quota: tight" in told(stage, "ChildRefused")
        stage.kubectl("delete", "resourcequota", "tight")
        quota(pods="0")
        message = told(stage, "PodsRefused")
        assert "exceeded quota: tight" in message
        assert "base-runners-" not in message
        stage.kubectl("delete", "resourcequota", "tight")
        stage.kubectl("rollout", "restart", "deployment/base-runners")  # its controller waits longer each time
        told(stage, "RunnersReady")

"""What a pool should own and cannot have: a stranger's object is left alone, a refusal is told and comes to an end."""

from collections.abc import Iterator
from typing import Any

import pytest

from harness.operator.stage import Stage, playing


@pytest.fixture(scope="module", autouse=True)
def _an_operator_works(running: Stage) -> Iterator[None]:
    with playing(running):
        yield


def told(stage: Stage, reason: str) -> str:
    """The message of a pool that does not progress for that reason."""

    def message(pool: dict[str, Any]) -> str | None:
        conditions = pool.get("status", {}).get("conditions", [])
        return next((c["message"] for c in conditions if (c["type"], c["reason"]) == ("Progressing", reason)), None)

    stage.wait_until("servingpool", "base", lambda pool: message(pool) is not None, f"tells {reason}")
    return message(stage.get("servingpool", "base")) or ""


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
    stage.apply_pool()
    assert "PodDisruptionBudget base-runners" in told(stage, "ChildConflict")
    stage.wait_for("servingpool", "base", "Available")  # the rest of what it owns is made all the same
    after = stage.get("poddisruptionbudget", "base-runners")
    assert (after["spec"], "ownerReferences" in after["metadata"]) == (before["spec"], False)
    stage.delete("poddisruptionbudget", "base-runners")
    told(stage, "RunnersReady")
    owners = stage.get("poddisruptionbudget", "base-runners")["metadata"]["ownerReferences"]
    assert [owner["kind"] for owner in owners] == ["ServingPool"]


def test_a_quota_is_reported_for_what_the_pool_owns_and_for_its_pods(stage: Stage) -> None:
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
        stage.wait_until("resourcequota", "tight", lambda q: counted in q.get("status", {}).get("hard", {}), "counts")

    quota(**{"count/deployments.apps": "0"})
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

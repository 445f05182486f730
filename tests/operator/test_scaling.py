"""Pools that follow demand by the built-in autoscaler."""

import pytest

from harness.operator.demanding_gateway import DemandingGateway
from harness.operator.stage import Stage
from harness.quickstart import BASE


@pytest.fixture(autouse=True)
def _an_operator_runs(stage: Stage) -> None:
    if not any(replica.running for replica in stage.replicas):
        stage.replica()


@pytest.mark.usefixtures("audited")
def test_a_pool_goes_to_zero_and_from_zero_straight_to_what_is_wanted(stage: Stage) -> None:
    autoscaling = {"minReplicas": 0, "maxReplicas": 3, "idleSeconds": 2}
    with (
        stage.kubelet(),
        DemandingGateway(stage.scheduler, f"{stage.namespace}/base", BASE, stage.namespace) as gateway,
    ):
        stage.apply_pool(autoscaling=autoscaling, advanced={"maxSequences": 4})
        stage.wait_for("servingpool", "base", "Fetched")
        stage.wait_for_value("servingpool", "base", "status.desiredReplicas", 0)
        spec = stage.get("servingpool", "base")["spec"]
        mark = stage.control_plane.mark()
        gateway.wanted(40)
        stage.wait_for_value("servingpool", "base", "status.readyReplicas", 3)
        raised = [write for write in stage.writes(mark) if write == "patch deployments/ base-runners 200"]
        gateway.wanted(0)
        stage.wait_for_value("servingpool", "base", "status.replicas", 0)
        stage.wait_for("servingpool", "base", "Available", "False")
        assert stage.condition("servingpool", "base", "Available")["reason"] == "ScaledToZero"
        assert stage.get("servingpool", "base")["spec"] == spec, "the operator never writes spec"
    assert len(raised) <= 2, "one to wake, one to what is wanted: not one by one"

"""At rest nothing is written; a watch that hears nothing is found out."""

import pytest

from harness.operator.api_proxy import ApiProxy
from harness.operator.stage import Replica, Stage, playing, until

AUDIT_S = 0.5


def settle(stage: Stage) -> None:
    """A pool and adapters, good and bad, as they stay."""
    stage.apply_pool(replicas=2)
    for name in ("upper", "digits"):
        stage.apply_adapter(name, f"file:adapters/{name}")
    stage.apply_adapter("nowhere", "file:adapters/absent")
    for name in ("upper", "digits"):
        stage.wait_for("loraadapter", name, "Ready")
    stage.wait_for("loraadapter", "nowhere", "Fetched", "False")
    stage.wait_for_value("servingpool", "base", "status.readyReplicas", 2)
    stage.wait_for_value("servingpool", "base", "status.adapters.ready", 2)
    stage.wait_for("servingpool", "base", "Progressing", "False")


def after_audits(replica: Replica, count: int) -> None:
    """Time passes, by the operator's own rhythm."""
    goal = replica.metric("weft_operator_audits_total") + count
    until(lambda: replica.metric("weft_operator_audits_total") >= goal, f"{count} audits")


def quiet(replica: Replica) -> None:
    """The last Events are out: they are written after the statuses that they tell of."""

    def still() -> bool:
        before = replica.metric("weft_operator_writes_total")
        after_audits(replica, 3)
        return replica.metric("weft_operator_writes_total") == before

    until(still, "the operator writes no more")


@pytest.mark.usefixtures("audited")
def test_nothing_is_written_while_nothing_changes_also_by_an_operator_that_has_just_started(stage: Stage) -> None:
    with playing(stage, audit_s=AUDIT_S) as replica:
        settle(stage)
        quiet(replica)
        mark = stage.control_plane.mark()
        planned = replica.metric("weft_operator_reconciles_total")
        after_audits(replica, 5)
        until(lambda: replica.metric("weft_operator_reconciles_total") > planned, "the sources are looked at")
        assert stage.writes(mark) == []
        assert replica.metric("weft_operator_watch_late_objects_total") == 0

        assert replica.stop() == 0
        again = stage.replica(audit_s=AUDIT_S)
        until(lambda: again.leads, "the new one leads")
        until(lambda: again.metric("weft_operator_reconciles_total") >= 4, "all objects are planned")
        after_audits(again, 3)
        assert stage.writes(mark) == []
        assert again.stop() == 0


def test_a_silent_watch_is_found_out_what_it_missed_is_done_and_liveness_fails(stage: Stage) -> None:
    with ApiProxy(stage.control_plane, stage.access, stage.folder) as proxy, stage.kubelet():
        replica = stage.replica(kubeconfig=proxy.kubeconfig, audit_s=AUDIT_S)
        settle(stage)
        assert replica.get("/healthz")[0] == 200
        proxy.mute()
        stage.apply_adapter("unheard", "file:adapters/json")
        stage.wait_for("loraadapter", "unheard", "Ready")
        uid = stage.get("deployment", "base-runners")["metadata"]["uid"]
        stage.delete("deployment", "base-runners")
        stage.wait_until("deployment", "base-runners", lambda found: found["metadata"]["uid"] != uid, "is made anew")
        assert replica.metric("weft_operator_watch_late_objects_total") >= 2
        until(lambda: _touched(stage) and replica.get("/healthz")[0] == 503, "liveness fails")
        assert "was late" in replica.get("/healthz")[1]
        assert replica.stop() in (0, 1)


def _touched(stage: Stage) -> bool:
    """Something changes that the watch does not tell of."""
    version = stage.get("loraadapter", "unheard")["metadata"]["resourceVersion"]
    stage.kubectl("label", "loraadapter", "unheard", "--overwrite", f"touched=at-{version}")
    return True

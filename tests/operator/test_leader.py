"""One replica leads: whatever happens to it, another one goes on, and it never writes again."""

import signal
from typing import Any

import pytest

from harness.operator.api_proxy import ApiProxy
from harness.operator.stage import CLUSTER_RULES, OWN_RULES, POOL_RULES, Replica, Stage, until

# It has to run out while somebody waits, and not while its leader is only held up by a busy machine (it gives up after
# two thirds of it).
LEASE_S = 20.0


def leader_of(stage: Stage, **flags: Any) -> Replica:
    """The replica that leads, or a new one."""
    replica = next((one for one in stage.replicas if one.running), None) or stage.replica(lease_s=LEASE_S, **flags)
    until(lambda: replica.leads, "it leads")
    return replica


def waiting_beside(leader: Replica, stage: Stage) -> Replica:
    """A replica that waits. Of the same rights under another name, so that the audit log tells the two apart."""
    name = f"operator-{len(stage.replicas)}"
    access = stage.control_plane.service_account(stage.namespace, name, (*OWN_RULES, *POOL_RULES), CLUSTER_RULES)
    other = stage.replica(by=access, lease_s=LEASE_S)
    assert leader.leads
    assert not other.leads
    return other


def lease(stage: Stage) -> dict[str, Any]:
    return stage.get("lease", "weft-operator")["spec"]


def events(stage: Stage) -> list[str]:
    """The reasons of all Events."""
    found = stage.control_plane.get("events.events.k8s.io", namespace=stage.namespace)["items"]
    return [event["reason"] for event in found]


@pytest.mark.usefixtures("audited")
def test_a_leader_that_loses_the_api_server_ends_and_another_one_goes_on(stage: Stage) -> None:
    with ApiProxy(stage.control_plane, stage.access, stage.folder) as proxy:
        leader = leader_of(stage, kubeconfig=proxy.kubeconfig)
        other = waiting_beside(leader, stage)
        stage.apply_pool()
        stage.wait_for("servingpool", "base", "Fetched")
        assert stage.control_plane.writes(0, user=other.user) == [], "a replica that waits writes nothing"
        first = lease(stage)["leaseTransitions"]
    assert leader.ended() == 1
    until(lambda: other.leads, "the other leads")
    assert lease(stage)["leaseTransitions"] == other.metric("weft_operator_term") == first + 1


@pytest.mark.usefixtures("audited")
def test_a_leader_that_was_paused_ends_without_a_write(stage: Stage) -> None:
    with stage.kubelet():
        leader = leader_of(stage)
        other = waiting_beside(leader, stage)
        stage.apply_pool()
        stage.wait_for("servingpool", "base", "Available")
        until(lambda: "RunnersReady" in events(stage), "the leader's last word: it has no write under way")
        leader.signal(signal.SIGSTOP)
        until(lambda: other.leads, "the other leads")
        stage.kubectl("scale", "servingpool/base", "--replicas=2")
        stage.apply_adapter("upper", "file:adapters/upper")
        stage.wait_for("loraadapter", "upper", "Ready")
        mark = stage.control_plane.mark()
        leader.signal(signal.SIGCONT)
        assert leader.ended() == 1
        writes = stage.control_plane.writes(mark, user=leader.user)
        assert [write for write in writes if write.code < 400] == [], "a renewal that was under way is refused"
        until(lambda: other.leads, "the other still leads")
        stage.wait_for_value("servingpool", "base", "status.readyReplicas", 2)


def test_sigterm_hands_over_without_waiting_for_the_lease_to_run_out(stage: Stage) -> None:
    leader = leader_of(stage)
    other = waiting_beside(leader, stage)
    holder = lease(stage)["holderIdentity"]
    leader.signal(signal.SIGTERM)
    assert leader.ended() == 0
    assert lease(stage).get("holderIdentity") != holder, "it was given back"
    until(lambda: other.leads, "the other leads")
    assert "Traceback" not in leader.said()


def test_a_lease_that_somebody_deletes_is_made_anew_with_a_higher_term(stage: Stage) -> None:
    leader = leader_of(stage)
    other = waiting_beside(leader, stage)
    before = lease(stage)["leaseTransitions"]
    stage.delete("lease", "weft-operator")
    assert leader.ended() == 1
    until(lambda: other.leads, "the other leads")
    assert lease(stage)["leaseTransitions"] > before

"""One replica leads: whatever happens to it, another one goes on, and it never writes again."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.access import Access
from cluster.control_plane import ControlPlane
from tests.operator.api_proxy import ApiProxy
from tests.operator.stage import CLUSTER_RULES, LEASE_S, OWN_RULES, POOL_RULES, Replica, Stage, until

SHORT_LEASE_S = 6.0  # where one has to run out
LONG_LEASE_S = 60.0  # where none may: longer than anything here is waited for


@pytest.fixture
def stage(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Stage]:
    with Stage(control_plane, namespace, tmp_path) as made:
        yield made


def second_access(stage: Stage) -> Access:
    """The same rights under another name, so that the audit log tells replicas apart."""
    return stage.control_plane.service_account(stage.namespace, "second", (*OWN_RULES, *POOL_RULES), CLUSTER_RULES)


def pair(stage: Stage, lease_s: float = LEASE_S) -> tuple[Replica, Replica, Access]:
    """A leader, a replica that waits, and who that one is."""
    leader = stage.replica(lease_seconds=lease_s)
    until(lambda: leader.leads, "the first leads")
    access = second_access(stage)
    return leader, stage.replica(kubeconfig=access.kubeconfig, lease_seconds=lease_s), access


def term(stage: Stage) -> int:
    return stage.get("lease", "weft-operator")["spec"]["leaseTransitions"]


def events(stage: Stage) -> list[str]:
    """The reasons of all Events."""
    return stage.kubectl("get", "events.events.k8s.io", "-o", "jsonpath={.items[*].reason}").split()


def test_after_kill_9_of_the_leader_another_one_goes_on(stage: Stage) -> None:
    with stage.kubelet():
        leader, other, access = pair(stage, SHORT_LEASE_S)
        stage.apply_pool()
        stage.wait_for("servingpool", "base", "Available")
        assert stage.control_plane.writes(0, user=access.user) == [], "a replica that waits writes nothing"
        first = term(stage)
        leader.signal(signal.SIGKILL)
        stage.apply_adapter("upper", "file:adapters/upper")
        stage.wait_for("loraadapter", "upper", "Ready")
        until(lambda: other.leads, "the other leads")
        assert term(stage) == first + 1
        assert other.metric("weft_operator_term") == first + 1


def test_a_leader_that_was_paused_ends_without_a_write(stage: Stage) -> None:
    with stage.kubelet():
        leader, other, _ = pair(stage, SHORT_LEASE_S)
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
        writes = stage.control_plane.writes(mark, user=stage.access.user)
        assert [write for write in writes if write.code < 400] == [], "a renewal that was under way is refused"
        until(lambda: other.leads, "the other still leads")
        stage.wait_for_value("servingpool", "base", ".status.readyReplicas", 2)


def test_sigterm_hands_over_without_waiting_for_the_lease_to_run_out(stage: Stage) -> None:
    leader, other, _ = pair(stage, LONG_LEASE_S)
    leader.signal(signal.SIGTERM)
    assert leader.ended() == 0
    until(lambda: other.leads, "the other leads, long before the lease has run out")
    assert "Traceback" not in leader.said()


def test_a_lease_that_somebody_deletes_is_made_anew_with_a_higher_term(stage: Stage) -> None:
    leader, other, _ = pair(stage)
    before = term(stage)
    stage.kubectl("delete", "lease", "weft-operator")
    assert leader.ended() == 1
    until(lambda: other.leads, "the other leads")
    assert term(stage) > before


def test_a_leader_that_loses_the_api_server_gives_up_before_its_lease_runs_out(stage: Stage) -> None:
    with ApiProxy(stage.control_plane, stage.access, stage.folder) as proxy:
        leader = stage.replica(kubeconfig=proxy.kubeconfig, lease_seconds=LEASE_S)
        until(lambda: leader.leads, "it leads")
        began = time.monotonic()
    assert leader.ended(LEASE_S * 2) == 1
    assert time.monotonic() - began < LEASE_S + 1

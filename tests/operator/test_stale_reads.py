"""Stale reads: a new leader is told of a past that is over. It harms nothing, and ends where it should.

The history: pools and adapters are made, then scaled, edited, deleted and made again under the same names. A new leader
then gets lists as of before, of everything or of some resources alone, and either its watches tell nothing until the
truth comes, or they go on from the past. (The fault: Sieve, OSDI 2022, section 2. The API promises that a list is not
older than the request; a watch cache that has fallen behind has broken that promise before.)
"""

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from harness.cluster.cluster import Cluster
from harness.operator.api_proxy import ApiProxy
from harness.operator.stage import Replica, Stage, until
from harness.quickstart import BASE
from tests.operator.test_crash_points import state, until_settled
from weft.leadership.lease_api import load_configuration
from weft_operator.core import Ref
from weft_operator.core.actions import ApplyChild
from weft_operator.core.state import Child
from weft_operator.errors import StaleWrite
from weft_operator.kubernetes import EventRecorder, KubeApi, KubernetesBackend, ObjectCache

RUNNERS = "base-runners"
POOLS, ADAPTERS = ("servingpools",), ("loraadapters",)
CHILDREN = ("deployments", "services", "serviceaccounts", "poddisruptionbudgets", "pods")
EVERYTHING = (*POOLS, *ADAPTERS, *CHILDREN)
NAMES = {
    POOLS: "pools",
    ADAPTERS: "adapters",
    CHILDREN: "children",
    (*POOLS, *CHILDREN): "pools-and-children",
    EVERYTHING: "everything",
    True: "silent-watches",
    False: "watches-that-go-on",
}
AUDIT_S = 0.5
LEASE_S = 20.0  # a replica that waits looks at the Lease six times meanwhile
AGAIN = 4  # reconciles beyond one of each object: of what was refused


@dataclass(frozen=True)
class History:
    """A stage where everything has happened and nobody leads. Versions of the past, and uids of now."""

    stage: Stage
    empty: int
    before: int
    underway: int  # what follows was asked for, and nothing of it was done
    uids: dict[str, str]


def version(stage: Stage) -> int:
    """Return the version that the store has now."""
    path = f"/apis/serving.weft.dev/v1alpha1/namespaces/{stage.namespace}/servingpools?limit=1"
    return int(json.loads(stage.kubectl("get", "--raw", path))["metadata"]["resourceVersion"])


def uids(stage: Stage) -> dict[str, str]:
    """Return which objects they are: everything that the operator has to do with, and its pods."""
    items = stage.control_plane.get(",".join(EVERYTHING), namespace=stage.namespace)["items"]
    return {f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["uid"] for item in items}


@pytest.fixture(scope="module")
def history(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    with Stage(control_plane, tmp_path_factory.mktemp("stale")) as stage, stage.kubelet():
        yield lived(stage)


def lived(stage: Stage) -> History:
    leader = stage.replica()  # it is paused for a moment below, and leads on
    empty = version(stage)
    stage.apply_pool()
    stage.apply_pool("again", model={"name": f"{BASE}-again", "uri": "file:model"})
    for name in ("kept", "edited", "again"):
        stage.apply_adapter(name, "file:adapters/upper")
    for name in ("kept", "edited", "again"):
        stage.wait_for("loraadapter", name, "Ready")
    for pool in ("base", "again"):
        stage.wait_for("servingpool", pool, "Available")
    until_settled(stage)
    before = version(stage)
    leader.signal(signal.SIGSTOP)
    change(stage)
    underway = version(stage)
    leader.signal(signal.SIGCONT)
    again(stage)
    until_settled(stage)
    assert leader.stop() == 0
    return History(stage, empty, before, underway, uids(stage))


def change(stage: Stage) -> None:
    """Change everything that a view of the past gets wrong."""
    stage.kubectl("scale", "servingpool/base", "--replicas=3")
    stage.apply_adapter("edited", "file:adapters/digits")
    stage.apply_adapter("new", "file:adapters/json")
    stage.kubectl("delete", "loraadapter/again", "servingpool/again", "--wait=false")


def again(stage: Stage) -> None:
    """Make others under the names of those that were deleted; then everything is as it stays."""
    for kind in ("loraadapter", "servingpool"):
        stage.control_plane.wait_until_gone(kind, "again", stage.namespace)
    stage.apply_pool("again", model={"name": f"{BASE}-again", "uri": "file:model"}, replicas=2)
    stage.apply_adapter("again", "file:adapters/cipher")
    for name in ("edited", "new", "again"):
        stage.wait_for("loraadapter", name, "Ready")
    for pool, replicas in (("base", 3), ("again", 2)):
        stage.wait_for_value("servingpool", pool, "status.readyReplicas", replicas)
        stage.wait_for("servingpool", pool, "Progressing", "False")


def planned(replica: Replica) -> None:
    """Wait until the replica leads, has listed several times and planned every object, refused ones more than once."""
    until(lambda: replica.leads and replica.metric("weft_operator_audits_total") >= 4, "it leads, and lists")
    if not (objects := replica.metric("weft_operator_objects")):
        return  # it believes that there is nothing
    until(lambda: replica.metric("weft_operator_reconciles_total") >= objects + AGAIN, "it plans")


def accepted(stage: Stage, mark: int) -> list[str]:
    """Return what the operator wrote and was not refused, its Lease, Events and statuses aside."""
    return [
        write
        for write in stage.writes(mark)
        if not write.endswith((" 409", " 404")) and "/status " not in write and " events/" not in write
    ]


ONE_MORE = pytest.mark.long  # what it looks back on is a part or a mixture of the others


@pytest.mark.parametrize(
    ("past", "resources", "silent"),
    [
        ("before", EVERYTHING, True),
        pytest.param("before", EVERYTHING, False, marks=ONE_MORE),
        ("before", POOLS, True),
        ("before", ADAPTERS, True),
        pytest.param("underway", EVERYTHING, True, marks=ONE_MORE),
        ("underway", EVERYTHING, False),
        pytest.param("underway", POOLS, True, marks=ONE_MORE),
        ("before", CHILDREN, True),
        pytest.param("before", (*POOLS, *CHILDREN), False, marks=ONE_MORE),
        pytest.param("empty", POOLS, True, marks=ONE_MORE),
        pytest.param("empty", CHILDREN, True, marks=ONE_MORE),
        ("empty", EVERYTHING, True),
    ],
    ids=lambda value: NAMES.get(value, value),
)
@pytest.mark.usefixtures("audited")
def test_a_leader_that_gets_reports_of_the_past_changes_nothing(
    history: History, past: str, resources: tuple[str, ...], silent: bool
) -> None:
    stage = history.stage
    wanted, mark = state(stage), stage.control_plane.mark()
    with ApiProxy(stage.control_plane, stage.access, stage.folder) as proxy:
        proxy.rewind(getattr(history, past), resources)
        if silent:
            proxy.mute()
        leader = stage.replica(kubeconfig=proxy.kubeconfig, audit_s=AUDIT_S)
        planned(leader)
        assert uids(stage) == history.uids, "while it is told of the past"
        proxy.tell_the_truth()
        found = until_settled(stage)
        assert leader.stop() == 0
    assert accepted(stage, mark) == []
    assert uids(stage) == history.uids
    assert found == wanted


@pytest.mark.usefixtures("audited")
def test_writes_made_from_the_past_are_refused_and_what_is_there_is_looked_up(history: History) -> None:
    """The cases above do get to the fences; one that is met brings the truth though no watch tells it."""
    stage, mark = history.stage, history.stage.control_plane.mark()
    with ApiProxy(stage.control_plane, stage.access, stage.folder) as proxy:
        proxy.rewind(history.underway, EVERYTHING)
        proxy.mute()
        leader = stage.replica(kubeconfig=proxy.kubeconfig, audit_s=AUDIT_S)
        planned(leader)
        refused = {write for write in stage.writes(mark) if write.endswith((" 409", " 404"))}
        assert leader.stop() == 0
    # (What a pool owns may not even be tried: the pool is read before, and that brings the truth as well.)
    assert "update loraadapters/status edited 409" in refused
    assert accepted(stage, mark) == []


@pytest.mark.usefixtures("audited")
async def test_what_was_planned_before_an_object_was_known_is_not_applied_to_it(history: History) -> None:
    """The watch tells of a Deployment between the plan, which has it made, and the write: it is planned again."""
    stage, cache = history.stage, ObjectCache()
    api = KubeApi(await load_configuration(str(stage.access.kubeconfig)))
    events = EventRecorder(api, lead=lambda: None, write_s=60.0, instance="test", clock=time.time)
    backend = KubernetesBackend(api, cache, events, lead=lambda: None, write_s=60.0, observe=lambda *_: None)
    mark, pool, there = stage.control_plane.mark(), stage.get("servingpool", "base"), stage.get("deployment", RUNNERS)
    spec = {**there["spec"], "replicas": 1}
    manifest = {**there, "metadata": {"name": RUNNERS, "namespace": stage.namespace}, "spec": spec}
    child = Child("Deployment", stage.namespace, RUNNERS, manifest)
    cache.put(pool)
    cache.put(there)
    for version in (None, "1"):
        with pytest.raises(StaleWrite, match="was planned"):
            await backend.apply_child(ApplyChild(Ref("ServingPool", stage.namespace, "base"), child, version))
    await api.aclose()
    assert accepted(stage, mark) == []
    assert stage.get("deployment", RUNNERS)["spec"]["replicas"] == 3


@pytest.mark.usefixtures("audited")
def test_a_replica_whose_watches_fell_silent_knows_all_once_it_leads(history: History) -> None:
    stage = history.stage
    with ApiProxy(stage.control_plane, stage.access, stage.folder) as proxy:
        first = stage.replica()
        until(lambda: first.leads, "the first leads")
        second = stage.replica(kubeconfig=proxy.kubeconfig, audit_s=3600, lease_s=LEASE_S)
        until(lambda: proxy.watched >= set(EVERYTHING), "it watches")
        proxy.mute()
        stage.apply_adapter("late", "file:adapters/initials")
        stage.wait_for("loraadapter", "late", "Ready")
        until_settled(stage)
        wanted, mark = state(stage), stage.control_plane.mark()
        known = second.metric("weft_operator_objects")
        assert known < first.metric("weft_operator_objects")
        assert first.stop() == 0
        until(lambda: second.leads and second.metric("weft_operator_reconciles_total") >= known, "it leads, and plans")
        assert second.metric("weft_operator_objects") == known + 1
        assert stage.writes(mark) == []
        assert state(stage) == wanted
        proxy.tell_the_truth()
        stage.kubectl("delete", "loraadapter", "late")
        assert second.stop() == 0

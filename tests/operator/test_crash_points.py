"""The operator killed right before and right after each of its writes: the end is the undisturbed one.

One history is played twice: undisturbed, and with a `kill -9` at every write. The first attempt at a write is never
carried out, the second one is but its answer is never heard, the third one goes through; whatever the operator does
between, it does as a process that has just started.
"""

import difflib
import json
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from harness.cluster.cluster import Cluster
from harness.operator.api_proxy import ApiProxy, Gone, Write
from harness.operator.stage import Replica, Stage, until

KINDS = ("servingpool", "loraadapter", "deployment", "service", "serviceaccount", "poddisruptionbudget")
SCENES = ("create", "update", "scale", "delete")
KILLS_MAX = 60
PLANNED = "weft_operator_reconciles_total"
TOUCHED = "test.weft.dev/touched"
TIMES = ("uid", "resourceVersion", "creationTimestamp", "managedFields", "generation", TOUCHED)


class Killer:
    """Ends the replica that writes, twice for each write; a thread starts the next one, as a kubelet does.

    `kills`: how often at each write. Where it only watches (`killing` False) each write has a 0 there.
    """

    def __init__(self, stage: Stage, proxy: ApiProxy, *, killing: bool) -> None:
        self._stage, self._proxy, self._killing = stage, proxy, killing
        self._lock = threading.Lock()
        self.kills: Counter[str] = Counter()
        self.armed = False
        self._stopped = False
        self._replica = self._start()
        self._thread = threading.Thread(target=self._keep, name="restarts", daemon=True)
        self._thread.start()

    def hook(self, write: Write, when: Literal["before", "after"]) -> None:
        if not self.armed or "/leases" in write.path or "/events" in write.path:
            return
        with self._lock:
            if not self._replica.running:  # one of several requests that were under way when it was killed
                if when == "before" and self._killing:
                    raise Gone  # else the next process would find it done, and it would never be a crash point
                return
            path = write.path.replace(self._stage.namespace, "NAMESPACE")
            point = f"{write.method} {re.sub(r'[0-9a-f]{8,}.*', '', path)}"
            self.kills[point] += 0
            times = self.kills[point]
            if self._killing and (times, when) in ((0, "before"), (1, "after")) and self.kills.total() < KILLS_MAX:
                self.kills[point] += 1
                self._replica.signal(signal.SIGKILL)
                self._replica.ended()
                self._stage.free_lease()
                if when == "before":
                    raise Gone

    def stop(self) -> None:
        """End the replica; no other one comes."""
        with self._lock:
            self._stopped = True
        self._replica.stop()
        self._thread.join()

    def _keep(self) -> None:
        while True:
            self._replica.ended(None)
            with self._lock:
                if self._stopped:
                    return
                self._replica = self._start()

    def _start(self) -> Replica:
        return self._stage.replica(wait=False, kubeconfig=self._proxy.kubeconfig)


def scene(name: str) -> Callable[[Stage], None]:
    """A step of the history and the state that it ends in."""

    def create(stage: Stage) -> None:
        stage.apply_pool()
        stage.apply_adapter("upper", "file:adapters/upper")
        stage.wait_for("loraadapter", "upper", "Ready")
        stage.wait_for("servingpool", "base", "Progressing", "False")
        stage.wait_for("servingpool", "base", "Available")

    def update(stage: Stage) -> None:
        stage.apply_adapter("upper", "file:adapters/digits")
        stage.wait_for_value("loraadapter", "upper", "status.observedGeneration", 2)
        stage.wait_for("loraadapter", "upper", "Ready")

    def scale(stage: Stage) -> None:
        stage.kubectl("scale", "servingpool/base", "--replicas=3")
        stage.wait_for_value("servingpool", "base", "status.readyReplicas", 3)
        stage.kubectl("scale", "servingpool/base", "--replicas=1")
        stage.wait_for_value("servingpool", "base", "status.replicas", 1)
        stage.wait_for_value("servingpool", "base", "status.readyReplicas", 1)
        stage.wait_for("servingpool", "base", "Progressing", "False")

    def delete(stage: Stage) -> None:
        stage.kubectl("delete", "loraadapter", "upper")

    return {"create": create, "update": update, "scale": scale, "delete": delete}[name]


def state(stage: Stage) -> dict[str, Any]:
    """Return everything that the operator has to do with, without identities and times."""
    found: dict[str, list[Any]] = {}
    for obj in stage.control_plane.get(",".join(KINDS), namespace=stage.namespace)["items"]:
        if obj["kind"] == "Deployment":  # its status is the Deployment controller's
            del obj["status"]
        found.setdefault(obj["kind"], []).append(obj)
    text = json.dumps(found).replace(stage.namespace, "NAMESPACE").replace(stage.supervisor, "SUPERVISOR")
    return _timeless(json.loads(text))


def _timeless(value: Any) -> Any:
    if isinstance(value, list):
        return [_timeless(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(value, dict):
        return "a hash" if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else value
    kept: dict[str, Any] = value
    return {
        name: _timeless(item)
        for name, item in kept.items()
        if name not in TIMES and not name.lower().endswith("time") and name != "deployment.kubernetes.io/revision"
    }


def played(stage: Stage, *, killing: bool) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Return the states after each scene, and how often the operator was killed at each write."""
    states: list[dict[str, Any]] = []
    with ApiProxy(stage.control_plane, stage.access, stage.folder) as proxy, stage.kubelet():
        killer = Killer(stage, proxy, killing=killing)
        proxy.hook = killer.hook
        try:
            for name in SCENES:
                killer.armed = True
                scene(name)(stage)
                killer.armed = False
                until(lambda: stage.replicas[-1].get("/readyz")[0] == 200, "an operator runs")
                states.append(until_settled(stage))
        finally:
            killer.stop()
        return states, killer.kills


def on_a_stage_of_its_own(
    control_plane: Cluster, folder: Path, *, killing: bool
) -> tuple[list[dict[str, Any]], Counter[str]]:
    folder.mkdir()
    with Stage(control_plane, folder) as stage:
        return played(stage, killing=killing)


def until_settled(stage: Stage) -> dict[str, Any]:
    """Return the state once it stays what it is while a leader plans everything anew."""
    seen: list[dict[str, Any]] = []

    def is_settled() -> bool:
        before = state(stage)
        leader = until(lambda: next((one for one in stage.replicas if one.running and one.leads), None), "one leads")
        seen[:] = [before]
        return plans_on(stage, leader) and state(stage) == before

    until(is_settled, "the state stays what it is")
    return seen[0]


def plans_on(stage: Stage, leader: Replica) -> bool:
    """Let it plan each object of ours, twice; False: it has ended, and another one has to be asked."""
    names = [f"{kind}/{name}" for kind in ("servingpool", "loraadapter") for name in stage.names(kind)]
    for _ in range(2):
        goal = leader.metric(PLANNED) + len(names)
        stage.kubectl("annotate", *names, "--overwrite", f"{TOUCHED}=at-{goal:.0f}-of-{leader.name}")
        until(lambda goal=goal: not leader.running or leader.metric(PLANNED) >= goal, "it plans")
    return leader.running


def _lines(state: dict[str, Any]) -> list[str]:
    return json.dumps(state, indent=1, sort_keys=True).splitlines()


def _difference(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return list(difflib.unified_diff(_lines(wanted), _lines(found), "undisturbed", "killed", n=4, lineterm=""))


def test_the_end_is_the_undisturbed_one_wherever_the_operator_is_killed(control_plane: Cluster, tmp_path: Path) -> None:
    undisturbed, writes = on_a_stage_of_its_own(control_plane, tmp_path / "undisturbed", killing=False)
    killed, kills = on_a_stage_of_its_own(control_plane, tmp_path / "killed", killing=True)
    assert not {write for write in writes if not kills[write]}, "each write of the history is a crash point"
    assert sum(times == 2 for times in kills.values()) > len(kills) // 2, "before it, and most also after it"
    for name, wanted, found in zip(SCENES, undisturbed, killed, strict=True):
        assert _lines(found) == _lines(wanted), f"{name}:\n" + "\n".join(_difference(wanted, found))

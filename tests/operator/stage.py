"""A stage for the operator: the real depot, scheduler and supervisor as processes, and replicas of the operator.

Only runner pods are played (`cluster.fake_kubelet`). The operator runs under a ServiceAccount with exactly the rights
that it says it needs.
"""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.access import Access, Rules
from cluster.certificates import Authority
from cluster.control_plane import ControlPlane
from cluster.fake_kubelet import FakeKubelet
from quickstart import BASE, QUICKSTART
from weft_operator.local.components import port_source

PATIENCE_S = 30.0
LEASE_S = 15.0  # an operator that a busy machine holds up for some seconds leads on

# What the operator may do. In the release's namespace: its Lease.
OWN_RULES: Rules = (
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
)
# In each namespace of pools: what pools own, and their pods.
POOL_RULES: Rules = (
    {
        "apiGroups": ["apps"],
        "resources": ["deployments"],
        "verbs": ["get", "list", "watch", "create", "patch", "delete"],
    },
    {
        "apiGroups": [""],
        "resources": ["services", "serviceaccounts"],
        "verbs": ["get", "list", "watch", "create", "patch", "delete"],
    },
    {
        "apiGroups": ["policy"],
        "resources": ["poddisruptionbudgets"],
        "verbs": ["get", "list", "watch", "create", "patch", "delete"],
    },
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "patch"]},
)
# In kube-system, for the metrics API: whom to believe.
SYSTEM_RULES: Rules = (
    {
        "apiGroups": [""],
        "resources": ["configmaps"],
        "resourceNames": ["extension-apiserver-authentication"],
        "verbs": ["get"],
    },
)
# Everywhere: our own objects, and Events about them.
CLUSTER_RULES: Rules = (
    {
        "apiGroups": ["serving.weft.dev"],
        "resources": ["loraadapters", "servingpools"],
        "verbs": ["get", "list", "watch", "patch"],
    },
    {
        "apiGroups": ["serving.weft.dev"],
        "resources": ["loraadapters/status", "servingpools/status"],
        "verbs": ["update"],
    },
    {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch"]},
)


class Process:
    """One of ours, with its log."""

    def __init__(self, name: str, module: str, flags: Mapping[str, object], folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        with self.log.open("ab") as log:
            self._child = subprocess.Popen([sys.executable, "-m", module, *words], stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.poll() is None

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._child.pid, number)

    def ended(self, timeout_s: float | None = PATIENCE_S) -> int:
        """Wait for its end; its exit code."""
        return self._child.wait(timeout_s)

    def terminate(self) -> None:
        if self.running:
            self._child.terminate()

    def stop(self) -> int:
        self.terminate()
        try:
            return self._child.wait(15)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait()

    def said(self) -> str:
        return self.log.read_text(errors="replace")


class Replica(Process):
    """A process of the operator."""

    probes: str
    metrics_api: str = ""

    def get(self, path: str) -> tuple[int, str]:
        """A probe's answer; (0, why) while nobody listens."""
        try:
            with urllib.request.urlopen(f"http://{self.probes}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    @property
    def leads(self) -> bool:
        return self.metric("weft_operator_leader") == 1.0


class Stage:
    """See the module. `namespace` is where pools live."""

    def __init__(self, control_plane: ControlPlane, namespace: str, folder: Path) -> None:
        self.control_plane, self.namespace, self.folder = control_plane, namespace, folder
        self._exits, self._ports = contextlib.ExitStack(), port_source()
        self.replicas: list[Replica] = []
        self._processes: list[Process] = []
        self.access: Access

    def __enter__(self) -> "Stage":
        self.access = self.control_plane.service_account(
            self.namespace, "weft-operator", (*OWN_RULES, *POOL_RULES), CLUSTER_RULES, {"kube-system": SYSTEM_RULES}
        )
        ports = [f"127.0.0.1:{port}" for port in self._ports(5)]
        self.depot, self.scheduler, scheduler_probes, self.supervisor, supervisor_probes = ports
        self.file_root = self.folder / "sources"
        for name in ("model", "adapters"):
            shutil.copytree(QUICKSTART / name, self.file_root / name)
        self._start("depot", {"http": self.depot, "file-root": self.file_root})
        self.start_scheduler = lambda: self._start(
            "scheduler", {"listen": self.scheduler, "probes": scheduler_probes, "status-ms": 50}
        )
        self.scheduler_process = self.start_scheduler()
        self._start("supervisor", {"listen": self.supervisor, "probes": supervisor_probes, "scheduler": self.scheduler})
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()  # all at once; each is waited for below
        self._exits.close()
        for log in sorted(self.folder.glob("*.log")):  # pytest shows it where a test has failed
            print(f"----- {log.name}\n{log.read_text(errors='replace')[-6000:]}")

    def _start(self, name: str, flags: Mapping[str, object]) -> Process:
        data_dir = self.folder / name
        process = Process(name, f"weft_{name}", {**flags, "data-dir": data_dir}, self.folder)
        self._exits.callback(process.stop)
        self._processes.append(process)
        return process

    def port(self) -> int:
        """A free one, outside of the range that outgoing connections take theirs from."""
        return self._ports(1)[0]

    def kubelet(self) -> FakeKubelet:
        """Enter it: from then on pods run."""
        return FakeKubelet(self.control_plane.kubeconfig, self.namespace, self.supervisor)

    def replica(self, *, wait: bool = True, **flags: object) -> Replica:
        """Start a replica of the operator; wait until it is ready."""
        site = self.folder / "site.yaml"
        site.write_text(
            json.dumps({"image": "weft-runner:test", "supervisor": self.supervisor, "depot": "http://depot"})
        )
        probes = f"127.0.0.1:{self.port()}"
        settings: dict[str, object] = {
            "namespace": self.namespace,
            "pool-namespaces": self.namespace,
            "scheduler": self.scheduler,
            "depot": f"http://{self.depot}",
            "site": site,
            "probes": probes,
            "lease-seconds": LEASE_S,
            "audit-seconds": 5,
            "drain-seconds": 0,
            "kubeconfig": self.access.kubeconfig,
            **{name.replace("_", "-"): value for name, value in flags.items()},
        }
        name = f"operator-{len(self.replicas)}"
        replica = Replica(name, "weft_operator.kubernetes", settings, self.folder)
        replica.probes = probes
        self._exits.callback(replica.stop)
        self._processes.append(replica)
        self.replicas.append(replica)
        if wait:
            until(lambda: replica.get("/readyz")[0] == 200, f"{name} is ready")
        return replica

    @staticmethod
    def replace_folder(folder: Path, by: Path) -> None:
        """Another content in the place of a source, in one step."""
        new, old = folder.with_suffix(".new"), folder.with_suffix(".old")
        shutil.copytree(by, new)
        folder.rename(old)
        new.rename(folder)

    def certificates(self, *hosts: str) -> tuple[Path, str]:
        """A folder with tls.crt and tls.key for these names, and the CA as the API writes it (base64)."""
        folder = self.folder / "serving"
        folder.mkdir(exist_ok=True)
        authority = Authority(folder, "ca")
        authority.issue("tls", "weft-operator", hosts)
        return folder, base64.b64encode(authority.crt.read_bytes()).decode()

    # ---------------------------------------------------------------------------------------------------- objects

    def apply_pool(self, name: str = "base", **spec: Any) -> None:
        whole = {"model": {"name": BASE, "uri": "file:model"}, "lora": {"maxRank": 32}, **spec}
        self._apply("ServingPool", name, whole)

    def apply_adapter(
        self, name: str, uri: str, pool: str = "base", *, model_name: str | None = None, **source: Any
    ) -> None:
        named = {"modelName": model_name} if model_name else {}
        self._apply("LoRAAdapter", name, {"poolRef": {"name": pool}, "source": {"uri": uri, **source}, **named})

    def _apply(self, kind: str, name: str, spec: dict[str, Any]) -> None:
        metadata = {"name": name, "namespace": self.namespace}
        self.control_plane.apply(
            {"apiVersion": "serving.weft.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}
        )

    def kubectl(self, *words: str | Path) -> str:
        return self.control_plane.kubectl("-n", self.namespace, *words)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        return self.control_plane.get(kind, name, "-n", self.namespace)

    def names(self, kind: str) -> set[str]:
        return {word.partition("/")[2] for word in self.kubectl("get", kind, "-o", "name").split()}

    def wait_for(
        self, kind: str, name: str, condition: str, status: str = "True", timeout_s: float = PATIENCE_S
    ) -> None:
        """kubectl's own wait, which watches."""
        what = f"--for=condition={condition}={status}"
        self.kubectl("wait", f"{kind}/{name}", what, f"--timeout={timeout_s:.0f}s")

    def wait_for_value(self, kind: str, name: str, path: str, value: object, timeout_s: float = PATIENCE_S) -> None:
        self.kubectl("wait", f"{kind}/{name}", f"--for=jsonpath={{{path}}}={value}", f"--timeout={timeout_s:.0f}s")

    def condition(self, kind: str, name: str, of: str) -> dict[str, Any]:
        conditions = self.get(kind, name).get("status", {}).get("conditions", ())
        return next((one for one in conditions if one["type"] == of), {})

    def writes(self, mark: int) -> list[str]:
        """What the operator wrote since the mark, its Lease aside, as `verb resource/subresource name code`."""
        found = self.control_plane.writes(mark, user=self.access.user)
        return [f"{w.verb} {w.resource}/{w.subresource} {w.name} {w.code}" for w in found if w.resource != "leases"]


def until(holds: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """The first true value; for what other processes do and tell nobody of."""
    end = time.monotonic() + timeout_s
    while not (value := holds()):
        assert time.monotonic() < end, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.05)
    return value


@contextlib.contextmanager
def playing(stage: Stage, replicas: int = 1, **flags: Any) -> Generator[Sequence[Replica]]:
    """Replicas, and pods that run."""
    with stage.kubelet():
        yield [stage.replica(**flags) for _ in range(replicas)]

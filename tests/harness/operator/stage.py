"""A stage for the operator: the real depot, scheduler and supervisor as processes, and replicas of the operator.

Only runner pods are played (`cluster.fake_kubelet`). The operator runs under a ServiceAccount with exactly the rights
that it says it needs.
"""

import base64
import contextlib
import json
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from harness.bad_manifests import manifest
from harness.cluster.cluster import OURS, Cluster
from harness.cluster.fake_kubelet import NODE, FakeKubelet
from harness.cluster.rights import Rules, rule
from harness.other_constants import NO_OTHERS, Constants, command
from harness.ports import free_addresses
from harness.quickstart import BASE
from harness.waiting import PATIENCE_S, wait_until
from weft_devcluster import processes
from weft_devcluster.access import Access
from weft_devcluster.api import is_so
from weft_devcluster.certificates import Authority
from weft_stage.operator_stage import Services

T = TypeVar("T")
QUICK = {"weft_scheduler": {"weft_scheduler.settings:SchedulerConfig": {"status_s": 0.05}}}
SELECTOR = "app.kubernetes.io/managed-by=weft-operator"

# Nothing here waits for a Lease to run out: it is long, so an operator that a busy machine holds up leads on.
LEASE_S = 120.0
PROBE_S = 10.0  # asked again after that
ASK_S = 0.1  # between questions: answers cost whoever is asked
CHILDREN = "deployments,statefulsets,services,serviceaccounts,poddisruptionbudgets,networkpolicies"
PODS = "replicasets,pods"
LOG_CHARS = 6000

# What the operator may do. In the release's namespace: its Lease.
OWN_RULES: Rules = (rule("coordination.k8s.io", "leases", "get create update"),)
# In each namespace of pools: what pools own, and their pods; where APIKeys are served, Secrets, too.
OWNED = "get list watch create patch delete"
POOL_RULES: Rules = (
    rule("apps", "deployments statefulsets", OWNED),
    rule("", "services serviceaccounts", OWNED),
    rule("policy", "poddisruptionbudgets", OWNED),
    rule("networking.k8s.io", "networkpolicies", OWNED),
    rule("", "pods", "get list watch patch"),
    rule("", "secrets", "get create"),
)
# Everywhere: our own objects, and Events about them; nodes.
CLUSTER_RULES: Rules = (
    rule("serving.weft.dev", "apikeys loraadapters servingpools", "get list watch patch"),
    rule("serving.weft.dev", "apikeys/status loraadapters/status servingpools/status", "update"),
    rule("events.k8s.io", "events", "create patch"),
    rule("", "nodes", "get list watch"),
)


class Process(processes.Process):
    """One of ours, with its log; it does not outlive the test run."""

    def __init__(
        self,
        name: str,
        module: str,
        flags: Mapping[str, object],
        folder: Path,
        *,
        kubeconfig: Path | None = None,
        constants: Constants = NO_OTHERS,
    ) -> None:
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        access = {"KUBECONFIG": str(kubeconfig)} if kubeconfig else {}
        super().__init__(name, [*command(module, constants), *words], folder, access)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def ended(self, timeout_s: float | None = PATIENCE_S) -> int:
        """Wait for the process's end. Returns its exit code."""
        return self._process.wait(timeout_s)

    def terminate(self) -> None:
        if self.running:
            self.signal(signal.SIGTERM)

    def stop(self) -> int:
        """Send SIGTERM and wait for the end; killed when it does not end."""
        self.terminate()
        try:
            return self.ended()
        except subprocess.TimeoutExpired:
            self.end()
            return self.ended()

    def said(self) -> str:
        return self.log_path.read_text(errors="replace")


class Replica(Process):
    """A process of the operator."""

    probes: str
    user: str

    def get(self, path: str) -> tuple[int, str]:
        """Ask a probe; return its answer, or (0, why) while nobody listens."""
        try:
            with urllib.request.urlopen(f"http://{self.probes}{path}", timeout=PROBE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def metric(self, name: str) -> float:
        """Return the sum of a metric over all labels."""
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    @property
    def leads(self) -> bool:
        return self.metric("weft_operator_leader") == 1.0


class Stage:
    """Depot, scheduler and supervisor with replicas of the operator. `namespace`, a new one, is where pools live."""

    def __init__(self, control_plane: Cluster, folder: Path, scheduler_probes: str | None = None) -> None:
        """Prepare the stage. `scheduler_probes`: HOST:PORT of the scheduler's probes, where loopback is not enough."""
        self.control_plane, self.folder = control_plane, folder
        self.scheduler_probes = scheduler_probes or free_addresses(1)[0]
        self._exits = contextlib.ExitStack()
        self.replicas: list[Replica] = []
        self._processes: list[Process] = []
        self._shown: dict[Path, int] = {}  # by log: how much of it was shown
        self.namespace: str
        self.access: Access

    def __enter__(self) -> "Stage":
        self.namespace = self.control_plane.create_namespace()
        self._exits.callback(self.control_plane.delete_namespace, self.namespace)
        self._exits.callback(self.control_plane.empty, self.namespace, OURS)
        self.access = self.control_plane.service_account(
            self.namespace, "weft-operator", (*OWN_RULES, *POOL_RULES), CLUSTER_RULES
        )
        self._services = Services(self.folder, free_addresses, self._start)
        self.file_root, self.scheduler, self.supervisor = (
            self._services.sources,
            self._services.scheduler,
            self._services.supervisor,
        )
        _, self.scheduler_process, _ = self._services.start(probes=self.scheduler_probes)
        return self

    def start_scheduler(self) -> Process:
        """Start another scheduler on the same address and data."""
        return self._services.start_scheduler(probes=self.scheduler_probes)

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()  # all at once; each is waited for below
        self._exits.close()
        self.show_logs()

    def clear(self) -> None:
        """Clear the stage as before the first test: no objects of ours, nothing they owned. Replicas that run stay."""
        self.show_logs()

        def is_empty() -> bool:
            """Delete until all is gone: an operator that has not heard yet makes some of it anew."""
            self.control_plane.empty(self.namespace, OURS)
            left = self.control_plane.get(CHILDREN, namespace=self.namespace, selector=SELECTOR)["items"]
            left += self.control_plane.get(PODS, namespace=self.namespace)["items"]
            self.control_plane.delete(*left)
            return not left

        until(is_empty, "everything is gone")

    def show_logs(self) -> None:
        """Show what was said since the last time; pytest tells it where a test has failed."""
        for log in sorted(self.folder.glob("*.log")):
            said = log.read_text(errors="replace")
            new, self._shown[log] = said[self._shown.get(log, 0) :], len(said)
            print(f"----- {log.name}\n{new[-LOG_CHARS:]}")

    def _start(self, name: str, module: str, flags: Mapping[str, object]) -> Process:
        flags = {"probes": free_addresses(1)[0], **flags}
        process = Process(name, module, flags, self.folder, constants=QUICK.get(module, NO_OTHERS))
        self._exits.callback(process.stop)
        self._processes.append(process)
        return process

    def kubelet(self, node: str = NODE) -> FakeKubelet:
        """Enter it: from then on pods run on that node."""
        self.control_plane.require_no_nodes()
        return FakeKubelet(self.control_plane.kubeconfig, self.namespace, self.supervisor, node)

    def replica(
        self,
        *,
        wait: bool = True,
        by: Access | None = None,
        kubeconfig: Path | None = None,
        lease_s: float = LEASE_S,
        audit_s: float = 5.0,
        **flags: object,
    ) -> Replica:
        """Start a replica of the operator, with rights of its own if they are given; wait until it is ready."""
        access = by or self.access
        (probes,) = free_addresses(1)
        settings: dict[str, object] = {
            **self._services.operator_flags(self.namespace, networkPolicies=True),
            "probes": probes,
            **{name.replace("_", "-"): value for name, value in flags.items()},
        }
        name = f"operator-{len(self.replicas)}"
        times = {"LEASE_S": lease_s, "AUDIT_S": audit_s, "DRAIN_S": 0.0}
        constants = {f"weft_operator.kubernetes.manager:{time}": value for time, value in times.items()}
        replica = Replica(
            name,
            "weft_operator.kubernetes",
            settings,
            self.folder,
            kubeconfig=kubeconfig or access.kubeconfig,
            constants=constants,
        )
        replica.probes, replica.user = probes, access.user
        self._exits.callback(replica.stop)
        self._processes.append(replica)
        self.replicas.append(replica)
        if wait:
            until(lambda: replica.get("/readyz")[0] == 200, f"{name} is ready")
        return replica

    def gateway(self) -> str:
        """Start a gateway that asks for keys. Returns its URL."""
        http, nobody = free_addresses(2)
        flags = {
            "http": http,
            "scheduler": self.scheduler,
            "depot": f"http://{self._services.depot}",
            "predictor": nobody,
        }
        process = Process("gateway", "weft_gateway", {**flags, "data-dir": self.folder / "gateway"}, self.folder)
        self._exits.callback(process.stop)
        self._processes.append(process)
        return f"http://{http}"

    def certificates(self, *hosts: str) -> tuple[Path, str]:
        """Write tls.crt and tls.key for these names. Returns their folder, and the CA as the API writes it (base64)."""
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
        self.control_plane.apply(manifest(kind, name, spec, self.namespace))

    def kubectl(self, *words: str | Path) -> str:
        return self.control_plane.kubectl("-n", self.namespace, *words)

    def delete(self, kind: str, name: str) -> None:
        """Ask for the deletion of an object that comes again under its name, and do not wait for it.

        `kubectl delete` waits for an event of the name: it misses the deletion, and hangs, where the next object of
        that name is there before its watch begins.
        """
        self.kubectl("delete", kind, name, "--wait=false")

    def get(self, kind: str, name: str) -> dict[str, Any]:
        return self.control_plane.get(kind, name, self.namespace)

    def names(self, kind: str) -> set[str]:
        return {word.partition("/")[2] for word in self.kubectl("get", kind, "-o", "name").split()}

    def wait_for(self, kind: str, name: str, condition: str, status: str = "True") -> None:
        """Wait until that condition is so, as of the object's present generation."""
        self.wait_until(kind, name, is_so(condition, status), f"is {condition}={status}")

    def wait_for_value(self, kind: str, name: str, path: str, value: object) -> None:
        """Wait until `path` (A.B.C) of the object is the value."""
        self.wait_until(kind, name, lambda found: value_at(found, path) == value, f"has {path}={value}")

    def wait_until(self, kind: str, name: str, holds: Callable[[dict[str, Any]], bool], what: str) -> None:
        self.control_plane.wait_until(kind, name, self.namespace, holds, what)

    def free_lease(self) -> None:
        """Free the Lease in the name of a leader that was killed: nobody has to wait until it has run out."""
        patch = json.dumps({"spec": {"holderIdentity": ""}})
        self.kubectl("patch", "lease", "weft-operator", "--type=merge", "-p", patch)

    def condition(self, kind: str, name: str, of: str) -> dict[str, Any]:
        conditions = self.get(kind, name).get("status", {}).get("conditions", ())
        return next((one for one in conditions if one["type"] == of), {})

    def writes(self, mark: int) -> list[str]:
        """Return what the operator wrote since the mark, its Lease aside, as `verb resource/subresource name code`."""
        found = self.control_plane.writes(mark, user=self.access.user)
        return [f"{w.verb} {w.resource}/{w.subresource} {w.name} {w.code}" for w in found if w.resource != "leases"]


def value_at(found: Any, path: str) -> Any:
    """Return what stands at a path; None where there is no such path."""
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def until(holds: Callable[[], T | None], what: str) -> T:
    """Poll for the first true value; for what other processes do and tell nobody of."""
    found: list[T] = []

    def is_there() -> bool:
        value = holds()
        if value:
            found.append(value)
        else:
            time.sleep(ASK_S)
        return bool(value)

    wait_until(is_there, what)
    return found[0]


@contextlib.contextmanager
def playing(stage: Stage, **flags: Any) -> Generator[Replica]:
    """Run a replica, and pods that run."""
    with stage.kubelet():
        yield stage.replica(**flags)

"""KEDA beside a control plane: its operator and its metrics adapter as processes, and the HPA asks the adapter.

They run under KEDA's own ServiceAccount with the rights of its own manifests, which come with its source. Only its
Deployments are not there: no node runs pods.
"""

import base64
import contextlib
import urllib.request
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.autoscalers import programs
from harness.cluster.cluster import Cluster
from harness.ports import free_addresses
from harness.waiting import wait_until
from weft_devcluster.api import is_so
from weft_devcluster.certificates import Authority
from weft_devcluster.processes import Process, free_ports

PROBE_S = 10.0
NAMESPACE = "keda"
ACCOUNT = "keda-operator"
ADAPTER = "keda-metrics-apiserver"  # its Service
METRICS = "v1beta1.external.metrics.k8s.io"
MANIFESTS = (
    "general/namespace.yaml", "service_account/service_account.yaml", "rbac/role.yaml", "rbac/role_binding.yaml",
    "metrics-server/role.yaml", "metrics-server/role_binding.yaml",
)  # fmt: skip


@contextlib.contextmanager
def keda(plane: Cluster, folder: Path) -> Generator[None]:
    """While the block runs ScaledObjects are followed. Raises ToolMissing."""
    built = programs.folder_of(programs.KEDA)
    config = built / "config"
    for made in plane.apply(*(crd for path in (config / "crd" / "bases").iterdir() for crd in _objects(path))):
        plane.wait_until(made["kind"], made["metadata"]["name"], "", is_so("Established"), "is served")
    plane.apply(*(found for name in MANIFESTS for found in _objects(config / name)))
    authority = Authority(folder, "ca")
    authority.issue("tls", ACCOUNT, [f"{ADAPTER}.{NAMESPACE}.svc", "127.0.0.1"])
    access = plane.token_of(NAMESPACE, ACCOUNT)
    environment = {
        "KUBECONFIG": str(access.kubeconfig),
        "POD_NAMESPACE": NAMESPACE,
        "KEDA_CLUSTER_OBJECT_NAMESPACE": NAMESPACE,
        "WATCH_NAMESPACE": "",
    }
    metrics, probes, values = free_addresses(3)
    (port, own_metrics) = free_ports(2, plane.own_address)
    operator = [
        built / "operator", f"--cert-dir={folder}", f"--metrics-bind-address={metrics}",
        f"--health-probe-bind-address={probes}", f"--metrics-service-bind-address={values}",
    ]  # fmt: skip
    adapter = [
        built / "adapter", f"--cert-dir={folder}", f"--tls-cert-file={folder / 'tls.crt'}",
        f"--tls-private-key-file={folder / 'tls.key'}", f"--bind-address={plane.own_address}", f"--secure-port={port}",
        f"--port={own_metrics}", f"--metrics-service-address={values}", f"--lister-kubeconfig={access.kubeconfig}",
        f"--authentication-kubeconfig={access.kubeconfig}", f"--authorization-kubeconfig={access.kubeconfig}",
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        processes = [
            Process(name, command, folder, environment)
            for name, command in (("keda-operator", operator), ("keda-adapter", adapter))
        ]
        for process in processes:
            stack.callback(process.end)
        wait_until(lambda: _answers(processes, f"http://{probes}/readyz"), "KEDA's operator is ready")
        plane.expose(NAMESPACE, ADAPTER, port)
        (service,) = _objects(config / "metrics-server" / "api_service.yaml")
        service["spec"]["caBundle"] = base64.b64encode(authority.crt.read_bytes()).decode()
        plane.apply(service)
        plane.wait_until("apiservice", METRICS, "", is_so("Available"), "is answered by KEDA")
        yield


def _answers(processes: Sequence[Process], url: str) -> bool:
    """Raises StartFailed where one of the processes has ended."""
    for process in processes:
        process.check()
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=PROBE_S) as answer:
        return answer.status == 200
    return False


def _objects(path: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found]

"""What a test does with an API server: kubectl, objects as values, a client, namespaces, accounts."""

import contextlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kubernetes import client as kubernetes_client

from cluster import tools
from cluster.access import Access, Endpoint, Rules, access, grants
from cluster.errors import KubectlFailed
from cluster.machine import own_address

ROOT = Path(__file__).parents[3]
KUBECTL_S = 90.0


class Api:
    """A way into an API server as its admin. `folder` takes the kubeconfigs that are made."""

    folder: Path
    endpoint: Endpoint
    admin: Access
    _namespaces = 0

    @property
    def kubeconfig(self) -> Path:
        """The admin's."""
        return self.admin.kubeconfig

    @property
    def url(self) -> str:
        return self.endpoint.url

    @property
    def ca(self) -> Path:
        return self.endpoint.ca

    @property
    def token(self) -> str:
        """The admin's."""
        return self.admin.token

    @property
    def own_address(self) -> str:
        """An address of this machine that EndpointSlices accept; listen on it behind `expose`."""
        return own_address()

    def kubectl(
        self, *arguments: str | Path, stdin: str | None = None, by: Access | None = None, timeout_s: float = KUBECTL_S
    ) -> str:
        """Run kubectl (as the admin, or `by` somebody); returns its output. Raises KubectlFailed."""
        command = [str(tools.path("kubectl")), f"--kubeconfig={(by or self.admin).kubeconfig}", *map(str, arguments)]
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise KubectlFailed(" ".join(command[2:]), f"no end after {timeout_s:.0f} s") from error
        if done.returncode != 0:
            raise KubectlFailed(" ".join(command[2:]), done.stderr or done.stdout)
        return done.stdout

    def get(self, *arguments: str, by: Access | None = None) -> dict[str, Any]:
        """`kubectl get ... -o json` as a value."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json", by=by))

    def apply(self, *objects: Mapping[str, Any], by: Access | None = None) -> None:
        """Server-side apply of manifests given as values."""
        content = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=content, by=by)

    def client(self, by: Access | None = None) -> kubernetes_client.ApiClient:
        """A client of the `kubernetes` package, with a pool of connections of its own: close it."""
        configuration = kubernetes_client.Configuration()
        configuration.host, configuration.ssl_ca_cert = self.url, str(self.ca)
        configuration.api_key = {"authorization": f"Bearer {(by or self.admin).token}"}
        return kubernetes_client.ApiClient(configuration)

    def apply_crds(self, folder: Path = ROOT / "crds") -> None:
        """Apply every CRD of `folder` and wait until the API server serves them."""
        self.kubectl("apply", "--server-side", "-f", folder)
        self.kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", folder)

    def create_namespace(self, prefix: str = "test", labels: Mapping[str, str] | None = None) -> str:
        """A new namespace in which pods can be made at once (its default ServiceAccount is there)."""
        self._namespaces += 1
        name = f"{prefix}-{self._namespaces}"
        metadata = {"name": name, "labels": dict(labels or {})}
        self.kubectl(
            "create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        )
        self.kubectl("wait", "--for=create", "serviceaccount/default", "-n", name, "--timeout=30s")
        return name

    def service_account(
        self,
        namespace: str,
        name: str,
        rules: Rules = (),
        cluster_rules: Rules = (),
        elsewhere: Mapping[str, Rules] | None = None,
    ) -> Access:
        """A ServiceAccount with exactly these rights: in its namespace, in others (`elsewhere`), cluster-wide."""
        by_namespace = {**(elsewhere or {}), **({namespace: rules} if rules else {})}
        self.apply(*grants(namespace, name, by_namespace, cluster_rules))
        return self.token_of(namespace, name)

    def token_of(self, namespace: str, name: str) -> Access:
        """A way in as an existing ServiceAccount, for an hour."""
        token = self.kubectl("create", "token", name, "-n", namespace, "--duration=1h").strip()
        return access(self.folder, f"system:serviceaccount:{namespace}:{name}", token, self.endpoint)

    def expose(self, namespace: str, name: str, port: int, service_port: int = 443) -> None:
        """A Service whose only endpoint is `own_address`:`port` of this machine."""
        meta = {"name": name, "namespace": namespace}
        ports = [{"name": "https", "port": service_port, "protocol": "TCP", "targetPort": port}]
        self.apply(
            {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"ports": ports}},
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {**meta, "labels": {"kubernetes.io/service-name": name}},
                "addressType": "IPv4",
                "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
                "endpoints": [{"addresses": [self.own_address], "conditions": {"ready": True}}],
            },
        )

    def empty(self, namespace: str, resources: Sequence[str]) -> None:
        """Delete all objects of these resources, finalizers or not: for when their controller is gone."""
        for resource in resources:
            for name in self.kubectl("get", resource, "-n", namespace, "-o", "name").split():
                self.kubectl("delete", name, "-n", namespace, "--wait=false", "--ignore-not-found")
                patch = '{"metadata":{"finalizers":null}}'
                with contextlib.suppress(KubectlFailed):  # gone by itself is what we want
                    self.kubectl("patch", name, "-n", namespace, "--type=merge", "-p", patch)

    def delete_namespace(self, name: str) -> None:
        """Begin its end; nobody waits for it."""
        self.kubectl("delete", "namespace", name, "--wait=false")

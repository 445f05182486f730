"""What a test does with an API server: kubectl, objects as values, a client, namespaces, accounts."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client as kubernetes_client

from harness.cluster import tools
from harness.cluster.access import Access, Endpoint, Rules, access, grants
from harness.cluster.errors import Refused
from harness.cluster.machine import own_address
from harness.cluster.objects import Objects, path_of
from harness.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]
APPLY = "application/apply-patch+yaml"
KUBECTL_S = 300.0  # ends a hang


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
        """Run kubectl (as the admin, or `by` somebody); returns its output. Raises Refused."""
        command = [str(tools.path("kubectl")), f"--kubeconfig={(by or self.admin).kubeconfig}", *map(str, arguments)]
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False,
                env=self.environment,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise Refused(" ".join(command[2:]), f"no end after {timeout_s:.0f} s") from error
        if done.returncode != 0:
            raise Refused(" ".join(command[2:]), done.stderr or done.stdout)
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        """For kubectl and helm: what they learn of this server is kept beside its kubeconfig, not in one's home."""
        return {**os.environ, "KUBECACHEDIR": str(self.folder / "kubectl-cache")}

    @cached_property
    def objects(self) -> Objects:
        """The same without a process for each question."""
        return Objects(self.client(), self.folder)

    def get(
        self, kinds: str, name: str = "", namespace: str = "", *, selector: str = "", fields: str = ""
    ) -> dict[str, Any]:
        """An object, or (without a name) all of one or several kinds A,B, in a namespace or everywhere.

        Raises Refused, also for an object that is not there.
        """
        if name:
            return self.objects.request("GET", path_of(self.objects.resource(kinds), namespace, name))
        asked = {"labelSelector": selector, "fieldSelector": fields}
        query = {option: value for option, value in asked.items() if value}
        items: list[dict[str, Any]] = []
        for kind in kinds.split(","):
            resource = self.objects.resource(kind)
            found = self.objects.request("GET", path_of(resource, namespace), query=query)["items"]
            items += [{"apiVersion": resource.group_version, "kind": resource.kind, **item} for item in found]
        return {"items": items}

    def wait(self, *arguments: str | Path) -> None:
        """`kubectl wait`, which watches."""
        self.kubectl("wait", *arguments, f"--timeout={PATIENCE_S:.0f}s")

    def wait_until(
        self, kind: str, name: str, namespace: str, holds: Callable[[dict[str, Any]], bool], what: str
    ) -> None:
        """Watch until there is such an object of which it holds. Raises TimeoutError."""
        self.objects.until(
            kind, name, namespace, lambda found: found is not None and holds(found), f"{kind}/{name} {what}"
        )

    def wait_until_gone(self, kind: str, name: str, namespace: str) -> None:
        """Watch until there is no such object. Raises TimeoutError."""
        self.objects.until(kind, name, namespace, lambda found: found is None, f"{kind}/{name} is gone")

    def apply(self, *objects: Mapping[str, Any], manager: str = "test", dry_run: bool = False) -> list[dict[str, Any]]:
        """Server-side apply, forced and strict, of manifests given as values. The objects as they are then."""
        query = {"fieldManager": manager, "force": "true", "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if dry_run else {}
        return [self.objects.request("PATCH", self._path(obj), obj, content=APPLY, query=query) for obj in objects]

    def delete(self, *objects: Mapping[str, Any]) -> None:
        """At once, without a grace; what is not there is not missed."""
        for obj in objects:
            with contextlib.suppress(Refused):
                self.objects.request("DELETE", self._path(obj), query={"gracePeriodSeconds": "0"})

    def _path(self, obj: Mapping[str, Any]) -> str:
        resource = self.objects.resource(f"{obj['kind']}.{obj['apiVersion']}")
        meta = obj["metadata"]
        return path_of(resource, meta.get("namespace", "default"), meta["name"])

    def client(self, by: Access | None = None) -> kubernetes_client.ApiClient:
        """A client of the `kubernetes` package, with a pool of connections of its own: close it."""
        configuration = kubernetes_client.Configuration()
        configuration.host, configuration.ssl_ca_cert = self.url, str(self.ca)
        configuration.api_key = {"authorization": f"Bearer {(by or self.admin).token}"}
        return kubernetes_client.ApiClient(configuration)

    def apply_crds(self, folder: Path = ROOT / "crds") -> None:
        """Apply every CRD of `folder` and wait until the API server serves them."""
        for made in self.apply(*(yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml")))):
            self.wait_until(made["kind"], made["metadata"]["name"], "", is_so("Established"), "is served")

    def create_namespace(self, prefix: str = "test", labels: Mapping[str, str] | None = None) -> str:
        """A new namespace in which pods can be made at once (its default ServiceAccount is there)."""
        self._namespaces += 1
        name = f"{prefix}-{self._namespaces}"
        metadata = {"name": name, "labels": dict(labels or {})}
        self.objects.request(
            "POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
        )
        self.wait_until("serviceaccount", "default", name, lambda _: True, "is there")
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
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        answer = self.objects.request("POST", path, {"spec": {"expirationSeconds": 3600, "audiences": None}})
        token = answer["status"]["token"]
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
        patch, content = {"metadata": {"finalizers": None}}, "application/merge-patch+json"
        for resource in resources:
            for found in self.get(resource, namespace=namespace)["items"]:
                path = path_of(self.objects.resource(resource), namespace, found["metadata"]["name"])
                with contextlib.suppress(Refused):  # gone by itself is what we want
                    self.objects.request("DELETE", path)
                    self.objects.request("PATCH", path, patch, content=content)

    def delete_namespace(self, name: str) -> None:
        """Begin its end; nobody waits for it."""
        self.objects.request("DELETE", f"/api/v1/namespaces/{name}")


def is_so(condition: str, status: str = "True") -> Callable[[dict[str, Any]], bool]:
    """Is this condition of an object so, as of the generation that it has now? As `kubectl wait` judges it."""

    def judge(obj: dict[str, Any]) -> bool:
        told: dict[str, Any] = obj.get("status") or {}
        found = next((one for one in told.get("conditions") or () if one["type"] == condition), {"status": None})
        generation = obj["metadata"].get("generation", 0)
        of = found.get("observedGeneration", told.get("observedGeneration", generation))
        return found["status"] == status and of >= generation

    return judge

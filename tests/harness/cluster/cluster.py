"""What a test does with an API server, our own or the one that KUBECONFIG names.

- `own_cluster()` starts a control plane (`weft_devcluster`) and ends it; `given_cluster()` takes what KUBECONFIG names:
  its current context, which has to be an administrator's. `cluster_of_tests()` is the given one, if there is one.
- Namespaces have names of their own, and whatever is made beside them is gone at the end.
- `service_account(namespace, name, rules, cluster_rules)`: a token and kubeconfig with exactly these rights.
- `mark()` and `writes(mark, ...)`: who wrote what, from the audit log.
- `expose(namespace, name, port)`: a Service in front of a server of the test itself, for webhooks (the API server sends
  requests straight to the EndpointSlice's address).

A test that needs what a given cluster does not have is skipped and says what that is.
"""

import contextlib
import ipaddress
import json
import os
import secrets
import socket
import subprocess
from base64 import b64decode
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from kubernetes.client import AuthenticationV1Api, V1SelfSubjectReview

from harness.cluster.rights import Rules, grants
from weft_devcluster import machine, tools
from weft_devcluster.access import Access, Endpoint, access
from weft_devcluster.api import Api, definitions
from weft_devcluster.certificates import Authority
from weft_devcluster.control_plane import ControlPlane
from weft_devcluster.errors import ClusterError, Refused
from weft_devcluster.folders import owned_folder
from weft_devcluster.objects import path_of
from weft_devcluster.processes import wait_until
from weft_stage.audit import AuditLog, Write

GIVEN = bool(os.environ.get("KUBECONFIG"))  # as it was when the tests began: some set it for themselves
CONTEXT = "weft-test"
OURS = ("apikeys", "loraadapters", "servingpools")
PLAYED_NODE: dict[str, Any] = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "fake-node"}}
NO_AUDIT = "the audit log of KUBECONFIG's API server cannot be read from here"
NO_RESTART = "KUBECONFIG's API server is not restarted by tests"
NO_WAY_BACK = "KUBECONFIG's API server runs on another machine and may not reach a server on this one"
HAS_NODES = "KUBECONFIG's cluster has nodes, which would run the pods that this test plays"


def needs_own(why: str) -> pytest.MarkDecorator:
    """Marks what is skipped where a cluster is given; `why` is a clause."""
    return pytest.mark.skipif(GIVEN, reason=f"KUBECONFIG is set, and this test {why}")


class Cluster(Api):
    """An API server as tests use it. `own` is the control plane, where it is ours."""

    def __init__(self, folder: Path, endpoint: Endpoint, admin: Access, own: ControlPlane | None = None) -> None:
        self.folder, self.endpoint, self.admin, self._own = folder, endpoint, admin, own
        self._run, self._namespaces = secrets.token_hex(3), list[str]()
        self._cluster_wide: list[Mapping[str, Any]] = []

    def close(self) -> None:
        """Take away what lies in no namespace of ours. A control plane of our own takes it along."""
        if self._own is None:
            self.delete(*self._cluster_wide)
        self.objects.close()

    def _remove_namespaces(self) -> None:
        """Remove all namespaces made here, with pods that no real kubelet ends, and the played node; wait for that."""

        def is_gone(name: str) -> bool:
            self.delete(*self.get("pods", namespace=name)["items"])
            return not self.get("namespaces", fields=f"metadata.name={name}")["items"]

        for name in self._namespaces:
            self.empty(name, OURS)
            self.delete({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        self.delete(PLAYED_NODE)
        for name in self._namespaces:
            wait_until(lambda name=name: is_gone(name), f"namespace {name} is gone")

    # ------------------------------------------------------------------------------------------- what it may not have

    @property
    def own_address(self) -> str:
        """An address of this machine that EndpointSlices accept; listen on it behind `expose`."""
        if self._own is None and not _is_here(urlsplit(self.url).hostname or ""):
            pytest.skip(NO_WAY_BACK)
        return machine.own_address()

    @cached_property
    def authority(self) -> Authority:
        """The authority of certificates for the test's own servers."""
        return Authority(self.folder, "tests-ca")

    @property
    def audit_log(self) -> Path | None:
        return self._own.audit_log if self._own else None

    def require_audit_log(self) -> None:
        """Skip a test of who wrote what where there is no audit log."""
        if self.audit_log is None:
            pytest.skip(NO_AUDIT)

    def mark(self) -> int:
        """Return a point in the audit log for `writes`: what was answered until now lies before it."""
        self._flush_audit()
        return self._audit.mark()

    def writes(self, mark: int = 0, user: str | None = None) -> list[Write]:
        """Return writing requests answered since the mark, of `user` (any); flushes are left out."""
        self._flush_audit()
        return [
            write
            for write in self._audit.since(mark)
            if write.resource != "selfsubjectreviews" and user in (None, write.user)
        ]

    @property
    def _audit(self) -> AuditLog:
        if self.audit_log is None:
            pytest.skip(NO_AUDIT)
        return AuditLog(self.audit_log)

    def _flush_audit(self) -> None:
        """Write and wait until the log shows it: what was answered before it is in the log too."""
        audit = self._audit
        mark = audit.mark()
        with self.client() as client:
            api = AuthenticationV1Api(client)
            _, _, headers = api.create_self_subject_review_with_http_info(V1SelfSubjectReview())
        wait_until(lambda: any(write.audit_id == headers["Audit-Id"] for write in audit.since(mark)), "the log grows")

    def restart_api_server(self) -> None:
        """Kill the API server, start another one on the same address and data, and wait until it answers."""
        if self._own is None:
            pytest.skip(NO_RESTART)
        self._own.restart_api_server()

    def require_no_nodes(self) -> None:
        """Skip a test that plays a kubelet where there are nodes."""
        if self._own is None and self.nodes:
            pytest.skip(HAS_NODES)

    @cached_property
    def nodes(self) -> list[str]:
        """The nodes that were there at the first question."""
        return [node["metadata"]["name"] for node in self.get("nodes")["items"]]

    # --------------------------------------------------------------------------------------------------- what it has

    def wait_until_gone(self, kind: str, name: str, namespace: str) -> None:
        """Watch until there is no such object. Raises TimeoutError."""
        self.objects.until(kind, name, namespace, lambda found: found is None, f"{kind}/{name} is gone")

    def delete(self, *objects: Mapping[str, Any]) -> None:
        """Delete objects at once, without a grace; what is not there is not missed."""
        for obj in objects:
            with contextlib.suppress(Refused):
                self.objects.request("DELETE", self.path_of(obj), query={"gracePeriodSeconds": "0"})

    def create_namespace(self, prefix: str = "test", labels: Mapping[str, str] | None = None) -> str:
        """Make a new namespace in which pods can be made at once (its default ServiceAccount is there)."""
        name = f"{prefix}-{self._run}-{len(self._namespaces) + 1}"
        self._namespaces.append(name)
        metadata = {"name": name, "labels": dict(labels or {})}
        self.objects.request(
            "POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
        )
        self.wait_until("serviceaccount", "default", name, lambda _: True, "is there")
        return name

    def service_account(self, namespace: str, name: str, rules: Rules = (), cluster_rules: Rules = ()) -> Access:
        """Make a ServiceAccount with exactly these rights: in its namespace, and cluster-wide."""
        made = grants(namespace, name, {namespace: rules} if rules else {}, cluster_rules)
        self._cluster_wide += [obj for obj in made if obj["kind"].startswith("Cluster")]
        self.apply(*made)
        return self.token_of(namespace, name)

    def token_of(self, namespace: str, name: str) -> Access:
        """Return a way in as an existing ServiceAccount, for an hour."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        answer = self.objects.request("POST", path, {"spec": {"expirationSeconds": 3600, "audiences": None}})
        token = answer["status"]["token"]
        return access(self.folder, f"system:serviceaccount:{namespace}:{name}", token, self.endpoint)

    def expose(self, namespace: str, name: str, port: int, service_port: int = 443) -> None:
        """Make a Service whose only endpoint is `own_address`:`port` of this machine."""
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
        """Begin a namespace's end; nobody waits for it."""
        self.objects.request("DELETE", f"/api/v1/namespaces/{name}")

    @contextlib.contextmanager
    def free_of(self, namespaces: Sequence[str]) -> Generator[None]:
        """Make room for a release: these namespaces are not there before, our CRDs not after. Raises ClusterError."""
        there = {item["metadata"]["name"] for item in self.get("namespaces,crds")["items"]}
        ours = {obj["metadata"]["name"] for obj in definitions()}
        if found := sorted(there & {*namespaces, *ours}):
            raise ClusterError(f"KUBECONFIG's cluster has {', '.join(found)}: somebody's Weft, which is left alone")
        yield
        self.delete(*definitions())

    @contextlib.contextmanager
    def crds(self) -> Generator[None]:
        """Have our CRDs during the block. A cluster that had them keeps them; from another one they are taken away.

        Raises ClusterError for other ones: somebody's objects are stored by them.
        """
        there = {crd["metadata"]["name"]: crd["spec"] for crd in self.get("crds")["items"]}
        for obj in definitions():
            name = obj["metadata"]["name"]
            if name in there and self.apply(obj, dry_run=True)[0]["spec"] != there[name]:
                raise ClusterError(f"{name} of KUBECONFIG's cluster is not this checkout's")
        made = [obj for obj in definitions() if obj["metadata"]["name"] not in there]
        self.apply_crds()
        try:
            yield
        finally:
            if self._own is None:
                self._remove_namespaces()
                self.delete(*made)


@contextlib.contextmanager
def own_cluster() -> Generator[Cluster]:
    """Run a control plane of our own, without our CRDs. Raises ToolMissing."""
    with ControlPlane() as made, of(made) as cluster:
        yield cluster


@contextlib.contextmanager
def of(plane: ControlPlane) -> Generator[Cluster]:
    """Give a Cluster on that control plane."""
    with contextlib.closing(Cluster(plane.folder, plane.endpoint, plane.admin, plane)) as cluster:
        yield cluster


@contextlib.contextmanager
def given_cluster() -> Generator[Cluster]:
    """Give the cluster that KUBECONFIG names."""
    with owned_folder("weft-given-") as folder, contextlib.closing(_given(folder)) as cluster:
        yield cluster


def cluster_of_tests() -> contextlib.AbstractContextManager[Cluster]:
    """Give the given cluster, else one of our own."""
    return given_cluster() if GIVEN else own_cluster()


def _given(folder: Path) -> Cluster:
    """Copy KUBECONFIG's current context alone, without its namespace, to a file of ours. Raises ClusterError."""
    command = [tools.client("kubectl"), "config", "view", "--minify", "--flatten", "--raw", "--output=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"KUBECONFIG={os.environ['KUBECONFIG']}: {done.stderr.strip()}")
    config = json.loads(done.stdout)
    (there,), (user,) = config["clusters"], config["users"]
    authority = there["cluster"].get("certificate-authority-data")
    if authority is None:
        raise ClusterError(f"KUBECONFIG names no authority for {there['cluster']['server']}: tests check who answers")
    config["contexts"] = [{"name": CONTEXT, "context": {"cluster": there["name"], "user": user["name"]}}]
    config["current-context"] = CONTEXT
    kubeconfig, ca = folder / "admin.kubeconfig", folder / "ca.crt"
    kubeconfig.touch(mode=0o600)
    kubeconfig.write_text(json.dumps(config))
    ca.write_bytes(b64decode(authority))
    endpoint = Endpoint(there["cluster"]["server"].rstrip("/"), ca)
    return Cluster(folder, endpoint, Access(user["name"], user["user"].get("token", ""), kubeconfig))


def _is_here(host: str) -> bool:
    """True for an address of this machine."""
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_INET) as probe:
        probe.bind((str(ipaddress.ip_address(socket.gethostbyname(host))), 0))
        return True
    return False

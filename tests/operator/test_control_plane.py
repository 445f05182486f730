"""The test cluster itself: what other tests rely on when they say "the API server did"."""

import base64
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue

import pytest
from kubernetes import client as kubernetes_client

from cluster.control_plane import ControlPlane
from cluster.errors import KubectlFailed
from cluster.owner import kill_owner

CONFIG_MAPS = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create", "patch"]}]


def config_map(namespace: str, name: str = "thing") -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace}}


def test_our_crds_are_served(control_plane: ControlPlane) -> None:
    served = control_plane.kubectl("api-resources", "--api-group=serving.weft.dev", "-o", "name").split()
    assert set(served) == {"loraadapters.serving.weft.dev", "servingpools.serving.weft.dev"}


def test_the_audit_log_tells_who_wrote_what_and_what_was_refused(control_plane: ControlPlane, namespace: str) -> None:
    writer = control_plane.service_account(namespace, "writer", CONFIG_MAPS)
    mark = control_plane.mark()

    control_plane.apply(config_map(namespace), by=writer)
    with pytest.raises(KubectlFailed, match="cannot delete resource"):
        control_plane.kubectl("delete", "configmap", "thing", "-n", namespace, by=writer)

    writes = control_plane.writes(mark, user=writer.user)
    assert [(write.verb, write.resource, write.name, write.accepted) for write in writes] == [
        ("patch", "configmaps", "thing", True),
        ("delete", "configmaps", "thing", False),
    ]
    assert control_plane.writes(control_plane.mark(), user=writer.user) == []


def test_a_dry_run_is_not_an_accepted_write(control_plane: ControlPlane, namespace: str) -> None:
    mark = control_plane.mark()
    control_plane.kubectl("create", "configmap", "thing", "-n", namespace, "--dry-run=server")
    (write,) = control_plane.writes(mark, user="admin")
    assert write.dry_run
    assert not write.accepted


def test_a_service_account_can_do_what_it_was_given_and_no_more(control_plane: ControlPlane, namespace: str) -> None:
    nobody = control_plane.service_account(namespace, "nobody")
    with pytest.raises(KubectlFailed, match="Forbidden"):
        control_plane.apply(config_map(namespace), by=nobody)
    reader = control_plane.service_account(
        namespace, "reader", cluster_rules=[{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}]
    )
    nodes = control_plane.kubectl("get", "nodes", "-o", "name")  # other tests may have made some
    assert control_plane.kubectl("get", "nodes", "-o", "name", by=reader) == nodes


def test_garbage_collection_and_workload_controllers_run(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.kubectl("create", "deployment", "app", "--image=none", "-n", namespace)
    pods = ("pods", "-n", namespace, "-l", "app=app")
    control_plane.kubectl("wait", "--for=create", *pods, "--timeout=30s")
    control_plane.kubectl("delete", "deployment", "app", "-n", namespace, "--cascade=foreground", "--timeout=60s")
    assert control_plane.get(*pods)["items"] == []


def test_a_namespace_can_demand_restricted_pods(control_plane: ControlPlane) -> None:
    name = control_plane.create_namespace(labels={"pod-security.kubernetes.io/enforce": "restricted"})
    with pytest.raises(KubectlFailed, match='violates PodSecurity "restricted'):
        control_plane.kubectl("run", "bare", "--image=none", "-n", name)
    control_plane.delete_namespace(name)


def test_objects_that_nobody_finalizes_are_gone_before_the_next_test(
    control_plane: ControlPlane, namespace: str
) -> None:
    held = config_map(namespace)
    held["metadata"] = {"name": "held", "namespace": namespace, "finalizers": ["test.weft.dev/nobody"]}
    control_plane.apply(held)
    control_plane.empty(namespace, ["configmaps"])
    names = [item["metadata"]["name"] for item in control_plane.get("configmaps", "-n", namespace)["items"]]
    assert "held" not in names


def test_the_client_library_gets_in(control_plane: ControlPlane, namespace: str) -> None:
    with control_plane.client() as client:
        found = kubernetes_client.CoreV1Api(client).read_namespace(namespace)
    assert found.metadata is not None
    assert found.metadata.name == namespace


class Aggregated:
    """A server behind an APIService: it notes who asks, as the request-header certificate lets it believe."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self.callers: SimpleQueue[tuple[str, str]] = SimpleQueue()
        callers = self.callers

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                certificate = self.connection.getpeercert()
                name = dict(pair[0] for pair in certificate["subject"])["commonName"]
                callers.put((name, self.headers["X-Remote-User"]))
                body = b'{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"test.weft.dev/v1","resources":[]}'
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
                """Quiet."""

        pair = control_plane.authority.issue("aggregated", "aggregated", ["aggregated.default.svc"])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.crt, pair.key)
        context.load_verify_locations(control_plane.front_proxy.crt)
        context.verify_mode = ssl.CERT_REQUIRED
        self.server = ThreadingHTTPServer((control_plane.own_address, 0), Handler)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]


@pytest.fixture
def aggregated(control_plane: ControlPlane) -> Iterator[Aggregated]:
    made = Aggregated(control_plane)
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def test_an_aggregated_api_of_the_test_is_reached_with_the_request_header_certificate(
    control_plane: ControlPlane, aggregated: Aggregated
) -> None:
    control_plane.expose("default", "aggregated", aggregated.port)
    service = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": "v1.test.weft.dev"},
        "spec": {
            "group": "test.weft.dev",
            "version": "v1",
            "service": {"namespace": "default", "name": "aggregated", "port": 443},
            "caBundle": _base64(control_plane.ca),
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        },
    }
    control_plane.apply(service)
    try:
        control_plane.kubectl("wait", "--for=condition=Available", "apiservice/v1.test.weft.dev", "--timeout=60s")
        control_plane.kubectl("get", "--raw", "/apis/test.weft.dev/v1")
        seen = [aggregated.callers.get_nowait() for _ in range(aggregated.callers.qsize())]
        assert ("front-proxy-client", "admin") in seen
    finally:
        control_plane.kubectl("delete", "apiservice", "v1.test.weft.dev")


def test_nothing_survives_a_test_run_that_is_killed() -> None:
    pids = kill_owner("control_plane", "ControlPlane", "[process.pid for process in made.processes]")
    assert len(pids) == 3


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()

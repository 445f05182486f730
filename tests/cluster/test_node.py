"""The node itself: what other tests rely on when they say "the pod did"."""

import json
import socket
import subprocess
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster import tools
from cluster.bag import Bag
from cluster.errors import KubectlFailed
from cluster.image import PAUSE_IMAGE
from cluster.node import Node
from cluster.node_files import NODE_NAME
from cluster.owner import kill_owner
from cluster.processes import wait_until

pytestmark = pytest.mark.timeout(400)  # with the node and the installation, where it is the first

USER = 10001
PORT = 8080
CONFINED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": USER,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
# Answers with the caller's address; a claim of its own under /data, everything else read-only.
SERVER = f"""
import http.server

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = self.client_address[0].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

print("serving", flush=True)
http.server.ThreadingHTTPServer(("", {PORT}), Handler).serve_forever()
"""


def server_pod(node: Node, namespace: str, name: str) -> dict[str, Any]:
    python = node.python_volumes()
    probe = {"httpGet": {"path": "/", "port": PORT}, "periodSeconds": 1}
    container = {
        "name": "server",
        "image": PAUSE_IMAGE,
        "imagePullPolicy": "Never",
        "command": [python.python, "-c", SERVER],
        "env": python.env,
        "volumeMounts": [*python.mounts, {"name": "data", "mountPath": "/data"}],
        "securityContext": CONFINED,
        "readinessProbe": probe,
    }
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    data = {"name": "data", "ephemeral": {"volumeClaimTemplate": {"spec": claim}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"fsGroup": USER},
            "containers": [container],
            "volumes": [*python.volumes, data],
        },
    }


def service(namespace: str, name: str, selects: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"selector": {"app": selects}, "ports": [{"port": 80, "targetPort": PORT}]},
    }


def python_in(node: Node, namespace: str, pod: str, code: str) -> str:
    python = node.python_volumes().python
    return node.control_plane.kubectl("exec", pod, "-n", namespace, "--", python, "-c", code).strip()


@pytest.fixture
def pods(node: Node, namespace: str) -> str:
    """Two server pods, `one` and `two`, ready, and a Service `front` before `one`. Returns their namespace."""
    objects: list[Mapping[str, Any]] = [server_pod(node, namespace, name) for name in ("one", "two")]
    node.control_plane.apply(*objects, service(namespace, "front", "one"))
    node.control_plane.kubectl("wait", "--for=condition=Ready", "pod/one", "pod/two", "-n", namespace, "--timeout=60s")
    return namespace


def test_a_confined_python_pod_is_reached_by_name_address_and_from_here(node: Node, pods: str) -> None:
    plane = node.control_plane
    address = plane.get("service", "front", "-n", pods)["spec"]["clusterIP"]
    assert urllib.request.urlopen(f"http://{address}/", timeout=10).status == 200

    one = plane.get("pod", "one", "-n", pods)["status"]["podIP"]
    assert urllib.request.urlopen(f"http://{one}:{PORT}/", timeout=10).status == 200

    ask = f"import urllib.request as u; print(u.urlopen('http://front.{pods}/', timeout=10).read().decode())"
    two = plane.get("pod", "two", "-n", pods)["status"]["podIP"]
    assert python_in(node, pods, "two", ask) == two
    assert python_in(node, pods, "one", ask), "a pod reaches itself through its Service too"

    assert plane.kubectl("logs", "one", "-n", pods).startswith("serving\n")
    write = "import os; open('/data/file', 'w').write('x'); print(os.getuid(), os.access('/usr', os.W_OK))"
    assert python_in(node, pods, "one", write) == f"{USER} False"


def test_a_port_of_a_pod_is_forwarded(node: Node, pods: str) -> None:
    command = [
        tools.path("kubectl"),
        f"--kubeconfig={node.kubeconfig}",
        "port-forward",
        "pod/one",
        f":{PORT}",
        "-n",
        pods,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forward:
        assert forward.stdout is not None
        here = forward.stdout.readline().split()[2]  # Forwarding from ADDRESS:PORT -> PORT
        assert urllib.request.urlopen(f"http://{here}/", timeout=10).read() == b"127.0.0.1"
        forward.terminate()


def test_a_pod_talks_to_the_api_server_as_its_service_account(node: Node, pods: str) -> None:
    ask = """
import pathlib, ssl, urllib.error, urllib.request
folder = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")
request = urllib.request.Request("https://kubernetes.default.svc/api/v1/namespaces")
request.add_header("Authorization", "Bearer " + (folder / "token").read_text())
try:
    urllib.request.urlopen(request, timeout=10, context=ssl.create_default_context(cafile=folder / "ca.crt"))
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
    answer = python_in(node, pods, "one", ask)
    assert answer.startswith("403 ")
    assert f"system:serviceaccount:{pods}:default" in json.loads(answer[4:])["message"]


def test_a_killed_process_is_started_again_in_its_pod(node: Node, pods: str) -> None:
    plane = node.control_plane
    before = node.pids(pods, "one")
    node.kill(pods, "one")
    restarted = "--for=jsonpath={.status.containerStatuses[0].restartCount}=1"
    plane.kubectl("wait", restarted, "pod/one", "-n", pods, "--timeout=60s")
    plane.kubectl("wait", "--for=condition=Ready", "pod/one", "-n", pods, "--timeout=60s")
    after = node.pids(pods, "one")
    assert before
    assert after
    assert set(before).isdisjoint(after)


def test_an_image_that_is_not_there_is_told(node: Node, namespace: str) -> None:
    plane = node.control_plane
    plane.kubectl("run", "lost", "--image=weft.test/lost:1", "--image-pull-policy=Never", "-n", namespace)
    reason = "--for=jsonpath={.status.containerStatuses[0].state.waiting.reason}=ErrImageNeverPull"
    plane.kubectl("wait", reason, "pod/lost", "-n", namespace, "--timeout=60s")


def test_a_restricted_namespace_refuses_the_mounts_that_only_tests_use(node: Node) -> None:
    plane = node.control_plane
    name = plane.create_namespace(labels={"pod-security.kubernetes.io/enforce": "restricted"})
    with pytest.raises(KubectlFailed, match="restricted volume types"):
        plane.apply(server_pod(node, name, "one"))
    plane.delete_namespace(name)


def test_a_killed_owner_leaves_no_process_and_no_interface(node: Node, tmp_path: Path) -> None:
    """Beside the node of this run, which does not notice."""
    before = interfaces()
    pids = kill_owner("node", "Node", "made.bag.pids() + [process.pid for process in made.control_plane.processes]")
    assert len(pids) > 6
    wait_until(lambda: interfaces() == before, "its cable is gone")  # the kernel takes a namespace apart afterwards
    with Bag(tmp_path) as bag:  # the next one sweeps what only files can remember
        assert bag.network != node.bag.network
        assert bag.pids()
    assert not list(Path("/sys/fs/cgroup").glob(f"*/{bag.cgroup}"))
    assert node.control_plane.get("node", NODE_NAME)["status"]["conditions"]


def interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}

"""The chart's NetworkPolicies, enforced: what serves goes on, and a stranger's pod reaches the gateway alone."""

from collections.abc import Iterator
from typing import Any

import pytest

from harness.cluster.cluster import Cluster, needs_own
from harness.crowd import assert_undisturbed, finished
from harness.installation import NAMESPACE, Installation
from harness.quickstart import adapter_manifest, sure_cases
from weft_devcluster.api import is_so
from weft_devcluster.image import PAUSE_IMAGE
from weft_devcluster.network_policies import NetworkPolicies
from weft_devcluster.node import Node

pytestmark = needs_own("has policies enforced by our own node")

MODELS = ("weft-quickstart", "acme/upper", "initech/cipher")
BEHIND, PORT = ("scheduler", "predictor", "depot", "supervisor", "batch", "runner"), 7400
KNOCK = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()"


class Stranger:
    """A pod of no policy's, in a namespace of its own."""

    def __init__(self, plane: Cluster, node: Node, namespace: str) -> None:
        self._plane, self._namespace = plane, namespace
        python = node.python_volumes()
        self._python = python.python
        container: dict[str, Any] = {"name": "stranger", "image": PAUSE_IMAGE, "imagePullPolicy": "Never"}
        container |= {"env": python.env, "volumeMounts": python.mounts}
        spec = {"containers": [container], "volumes": python.volumes, "terminationGracePeriodSeconds": 0}
        metadata = {"name": "stranger", "namespace": namespace}
        plane.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        plane.wait_until("pod", "stranger", namespace, is_so("Ready"), "is ready")

    def reaches(self, address: str, port: int) -> bool:
        told = ["--", "sh", "-c", '"$0" -c "$1" "$2" "$3" && echo yes || echo no']
        words = (*told, self._python, KNOCK, address, str(port))
        return self._plane.kubectl("exec", "stranger", "-n", self._namespace, *words).strip() == "yes"


@pytest.fixture
def stranger(plane: Cluster, node: Node, namespace: str) -> Stranger:
    return Stranger(plane, node, namespace)


@pytest.fixture
def enforced(installation: Installation) -> Iterator[NetworkPolicies]:
    node = installation.node
    with NetworkPolicies(node.control_plane, node.bag, node.folder) as made:
        yield made


def address(installation: Installation, component: str) -> str:
    (pod, *_) = installation.pods(f"app.kubernetes.io/component={component}")
    return pod["status"]["podIP"]


def test_a_stranger_reaches_the_gateway_and_nobody_behind_it(
    installation: Installation, stranger: Stranger, request: pytest.FixtureRequest
) -> None:
    """Before they are enforced it reaches everybody: it is the policies that it is kept off by."""
    behind = {component: address(installation, component) for component in BEHIND}

    def reached() -> set[str]:
        return {component for component, where in behind.items() if stranger.reaches(where, PORT)}

    assert reached() == set(BEHIND)
    request.getfixturevalue("enforced")
    assert reached() == set()
    assert stranger.reaches(address(installation, "gateway"), 8000)
    assert not stranger.reaches(address(installation, "gateway"), 7401), "nodes and metricsFrom alone"


async def test_new_pods_of_every_component_serve_and_adapters_come(
    installation: Installation, enforced: NetworkPolicies
) -> None:
    """All connections are new ones."""
    workloads = ("deployment", "statefulset")
    installation.plane.kubectl("rollout", "restart", *workloads[:1], "-n", NAMESPACE)
    installation.plane.kubectl("rollout", "restart", *workloads[1:], "-n", NAMESPACE)
    for kind in workloads:
        for item in installation.plane.get(kind, namespace=NAMESPACE)["items"]:
            installation.plane.kubectl("rollout", "status", f"{kind}/{item['metadata']['name']}", "-n", NAMESPACE)
    enforced.settle()
    installation.plane.apply(adapter_manifest("guarded", "acme", "file:adapters/upper"))
    installation.wait_ready("acme/guarded")
    installation.plane.kubectl("delete", "lora", "guarded", "-n", "acme")
    assert_undisturbed(await finished(installation.url, sure_cases(MODELS, 6, seed=14), "guarded"))

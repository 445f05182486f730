"""Pods that really run: on one node of this machine, or in the cluster that KUBECONFIG names.

A machine that cannot run a node (no root, no containerd) skips these tests and says what it lacks; a given one skips
what it cannot be asked for. A test that fails shows the pods, events and logs of its namespaces. Nothing is faked.
"""

import contextlib
from collections.abc import Generator, Iterator

import pytest

from harness.cluster.cluster import GIVEN, Cluster, given_cluster, of
from harness.cluster.place import OnGiven, OnNode
from harness.cluster.report import report
from harness.installation import NAMESPACE, TENANTS, Installation
from weft_devcluster.errors import ToolMissing
from weft_devcluster.machine import check_node
from weft_devcluster.node import Node

PLANE = pytest.StashKey[Cluster]()


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    """One node for the whole run."""
    try:
        check_node()
    except ToolMissing as reason:
        pytest.skip(str(reason))
    with Node() as made:
        yield made


@pytest.fixture(scope="session")
def plane(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The API server that KUBECONFIG names, or else the node's."""
    with given_cluster() if GIVEN else of(request.getfixturevalue("node").control_plane) as made:
        request.config.stash[PLANE] = made
        yield made
        del request.config.stash[PLANE]


@pytest.fixture(scope="session")
def installation(
    plane: Cluster, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """The chart and the quickstart, ready, as the README says. A given cluster is afterwards as it was."""
    folder = tmp_path_factory.mktemp("installation")
    if not GIVEN:
        node = request.getfixturevalue("node")
        made = Installation(plane, OnNode(node), folder, node)
        made.install_quickstart()
        yield made
        return
    with plane.free_of((NAMESPACE, *TENANTS)), contextlib.closing(OnGiven(plane)) as place:
        made = Installation(plane, place, folder)
        try:
            made.install_quickstart()
            yield made
        finally:
            made.remove()


@pytest.fixture
def namespace(plane: Cluster) -> Iterator[str]:
    """A namespace of the test's own."""
    name = plane.create_namespace()
    yield name
    plane.delete_namespace(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    made = yield
    plane = item.config.stash.get(PLANE, None)
    if plane is not None and made.failed:
        made.sections.append(("cluster", report(plane, (NAMESPACE, *TENANTS) if GIVEN else ())))
    return made

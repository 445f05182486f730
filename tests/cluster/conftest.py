"""Pods that really run, on one node of this machine. Nothing is faked; NetworkPolicies are not enforced by its CNI.

A machine that cannot run a node (no root, no containerd) skips these tests and says what it lacks. A test that fails
shows the pods, events and logs of its namespaces.
"""

from collections.abc import Callable, Generator, Iterator

import pytest

from harness.cluster.cluster import Cluster, of
from harness.cluster.report import report
from harness.cluster.summary import circumstances
from harness.installation import Installation
from weft_devcluster.errors import ToolMissing
from weft_devcluster.machine import check_node
from weft_devcluster.node import Node

NODE = pytest.StashKey[Node]()


@pytest.fixture(scope="session")
def node(request: pytest.FixtureRequest, record_testsuite_property: Callable[[str, object], None]) -> Iterator[Node]:
    """One node for the whole run."""
    try:
        check_node()
    except ToolMissing as reason:
        pytest.skip(str(reason))
    for name, value in circumstances().items():
        record_testsuite_property(name, value)
    with Node() as made:
        request.config.stash[NODE] = made
        yield made
        del request.config.stash[NODE]


@pytest.fixture(scope="session")
def plane(node: Node) -> Iterator[Cluster]:
    """Its API server."""
    with of(node.control_plane) as made:
        yield made


@pytest.fixture(scope="session")
def installation(plane: Cluster, node: Node, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The chart and the quickstart, ready, as the README says."""
    made = Installation(plane, node, tmp_path_factory.mktemp("installation"))
    made.install_quickstart()
    return made


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
    node = item.config.stash.get(NODE, None)
    if node is not None and made.failed:
        made.sections.append(("cluster", report(node.control_plane)))
    return made

"""The operator's tests run against a real API server, store and controller manager; only nodes and pods are absent.

What is not there: a kubelet and a scheduler, so tests write the status of pods themselves. Nothing else is faked.
Processes that take seconds to start are started once a module: `stage` is as new for each test, `running` has them.
"""

from collections.abc import Iterator

import pytest

from harness.cluster.cluster import OURS, Cluster, cluster_of_tests
from harness.operator.stage import Stage

# The files that take longest, so that no worker is left alone with one of them at the end.
LONG_ONES = ("test_crash_points.py", "test_stale_reads.py", "test_leader.py", "test_chart_install.py", "test_bench.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG_ONES.index(item.path.name) if item.path.name in LONG_ONES else len(LONG_ONES))


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Cluster]:
    """One for the whole run (of a worker), with our CRDs: the one that KUBECONFIG names, or else one of our own."""
    with cluster_of_tests() as made, made.crds():
        yield made


@pytest.fixture
def namespace(control_plane: Cluster) -> Iterator[str]:
    """A namespace of the test's own. Our objects in it are gone before the next test begins."""
    name = control_plane.create_namespace()
    yield name
    control_plane.empty(name, OURS)
    control_plane.delete_namespace(name)


@pytest.fixture
def audited(control_plane: Cluster) -> None:
    """For a test of who wrote what: it is skipped at once where nobody tells."""
    control_plane.require_audit_log()


@pytest.fixture(scope="module")
def running(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The module's depot, scheduler and supervisor; its replicas of the operator end with it."""
    with Stage(control_plane, tmp_path_factory.mktemp("stage")) as made:
        yield made


@pytest.fixture
def stage(running: Stage) -> Iterator[Stage]:
    """Empty, with whatever runs of it."""
    yield running
    running.clear()

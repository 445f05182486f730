"""The operator's tests run against a real API server, store and controller manager; only nodes and pods are absent.

What is not there: a kubelet and a scheduler, so tests write the status of pods themselves. Nothing else is faked.
"""

from collections.abc import Iterator

import pytest

from cluster.control_plane import ControlPlane

OURS = ("loraadapters.serving.weft.dev", "servingpools.serving.weft.dev")


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """One control plane for the whole run, with our CRDs."""
    with ControlPlane() as made:
        made.apply_crds()
        yield made


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A namespace of the test's own. Our objects in it are gone before the next test begins."""
    name = control_plane.create_namespace()
    yield name
    control_plane.empty(name, OURS)
    control_plane.delete_namespace(name)

"""Places where the chart's pods run in tests, and how tests reach them.

- `OnNode`: a node on this machine. Pods run this checkout, folders of it are mounted, and every address of the cluster
  is reached from here.
- `OnGiven`: the cluster that KUBECONFIG names. Pods run WEFT_IMAGE and WEFT_RUNNER_IMAGE (REPOSITORY:TAG or
  REPOSITORY@DIGEST), values of the cluster's own come from the file WEFT_VALUES, sources are copied into a volume of
  its default StorageClass, and kubectl's port-forwards reach the pods.
"""

import io
import itertools
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any, Protocol

import yaml

from harness.cluster.cluster import Cluster
from weft_devcluster import tools
from weft_devcluster.errors import ClusterError, StartFailed
from weft_devcluster.node import Node
from weft_devcluster.processes import Process, wait_until
from weft_devcluster.values import merged, node_values, overlay, small_values

IMAGE, RUNNER_IMAGE, VALUES = "WEFT_IMAGE", "WEFT_RUNNER_IMAGE", "WEFT_VALUES"
CLAIM, FILE_ROOT = "weft-test-sources", "/sources"
UNPACK = (
    f"import sys, tarfile; tarfile.open(fileobj=sys.stdin.buffer, mode='r|').extractall({FILE_ROOT!r}, filter='data')"
)
COPY_S = 120.0


class Place(Protocol):
    def values(self, sources: Path) -> dict[str, Any]:
        """Return values of the chart, with `sources` as the depot's file root."""
        ...

    def prepare(self, namespace: str) -> None:
        """Make what has to be there before the release."""
        ...

    def publish(self, sources: Path, namespace: str) -> None:
        """Show the depot what has changed in the folder."""
        ...

    def reach(self, namespace: str, target: str, port: int) -> str:
        """Return HOST:PORT for a port of `service/NAME` or `pod/NAME`."""
        ...


class OnNode:
    """A node on this machine, whose pods run this checkout."""

    def __init__(self, node: Node) -> None:
        self._plane = node.control_plane

    def values(self, sources: Path) -> dict[str, Any]:
        return node_values(sources)

    def prepare(self, namespace: str) -> None:
        pass

    def publish(self, sources: Path, namespace: str) -> None:
        pass

    def reach(self, namespace: str, target: str, port: int) -> str:
        kind, _, name = target.partition("/")
        found = self._plane.get(kind, name, namespace)
        return f"{found['spec']['clusterIP'] if kind == 'service' else found['status']['podIP']}:{port}"


class OnGiven:
    """The cluster that KUBECONFIG names; closing it ends its port-forwards. Raises ClusterError without images."""

    def __init__(self, plane: Cluster) -> None:
        self._plane, self._forwards = plane, dict[tuple[str, str, int], _Forward]()
        self._numbers = itertools.count()
        missing = [name for name in (IMAGE, RUNNER_IMAGE) if not os.environ.get(name)]
        if missing:
            raise ClusterError(f"KUBECONFIG is set, so {' and '.join(missing)} has to name what the pods run")

    def close(self) -> None:
        for forward in self._forwards.values():
            forward.end()

    def values(self, sources: Path) -> dict[str, Any]:
        own = yaml.safe_load(Path(path).read_text()) if (path := os.environ.get(VALUES)) else {}
        volume = {"name": "sources", "persistentVolumeClaim": {"claimName": CLAIM}}
        ours: dict[str, Any] = {
            "image": _image(os.environ[IMAGE]),
            "runner": {"image": _image(os.environ[RUNNER_IMAGE])},
            "depot": {
                "schemes": ["file"],
                "fileRoot": FILE_ROOT,
                "pod": overlay([volume], [{"name": "sources", "mountPath": FILE_ROOT}]),
            },
        }
        return merged(merged(small_values(), own), ours)

    def prepare(self, namespace: str) -> None:
        spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "100Mi"}}}
        metadata = {"name": CLAIM, "namespace": namespace}
        self._plane.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec})

    def publish(self, sources: Path, namespace: str) -> None:
        command = [tools.client("kubectl"), f"--kubeconfig={self._plane.kubeconfig}", "-n", namespace]
        command += ["exec", "-i", "weft-depot-0", "--", "python", "-c", UNPACK]
        done = subprocess.run(command, input=_packed(sources), capture_output=True, timeout=COPY_S, check=False)
        if done.returncode != 0:
            raise ClusterError(f"the sources were not copied: {done.stderr.decode()}")

    def reach(self, namespace: str, target: str, port: int) -> str:
        key = (namespace, target, port)
        forward = self._forwards.get(key)
        if forward is None or forward.has_ended:  # it ends with the pod that it leads to
            forward = self._forwards[key] = _Forward(self._plane, f"forward-{next(self._numbers)}", *key)
        return forward.address


class _Forward:
    """One `kubectl port-forward`. Raises StartFailed."""

    def __init__(self, plane: Cluster, name: str, namespace: str, target: str, port: int) -> None:
        command = [tools.client("kubectl"), f"--kubeconfig={plane.kubeconfig}", "-n", namespace]
        self._process = Process(name, [*command, "port-forward", target, f":{port}"], plane.folder, plane.environment)
        wait_until(self._listens, f"kubectl forwards {target} :{port}")
        self.address = self._process.log_path.read_text().split()[2]  # Forwarding from 127.0.0.1:PORT -> PORT

    def _listens(self) -> bool:
        self._process.check()
        return self._process.log_path.read_text().startswith("Forwarding from ")

    @property
    def has_ended(self) -> bool:
        try:
            self._process.check()
        except StartFailed:
            return True
        return False

    def end(self) -> None:
        self._process.end()


def _image(name: str) -> dict[str, str]:
    """Parse an image's name into the chart's values."""
    repository, at, digest = name.partition("@")
    if at:
        return {"repository": repository, "digest": digest}
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        raise ClusterError(f"{name}: an image is REPOSITORY:TAG or REPOSITORY@DIGEST")
    return {"repository": repository, "tag": tag}


def _packed(folder: Path) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.add(folder, arcname=".")
    return made.getvalue()

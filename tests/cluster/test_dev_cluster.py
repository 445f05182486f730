"""`make dev-cluster`: a node that stays behind the command that started it, for a person."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.machine import check_node
from cluster.node import Node

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def environment(node: Node, tmp_path: Path) -> dict[str, str]:
    """A state folder of the test's own, so a person's cluster is left alone. `node` skips where none can run."""
    check_node()
    return {**os.environ, "PYTHONPATH": str(SUPPORT), "XDG_STATE_HOME": str(tmp_path)}


def cluster(environment: dict[str, str], command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cluster", command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_dev_cluster_stays_until_it_is_told_to_go(environment: dict[str, str], node: Node) -> None:
    assert "no dev cluster is running" in cluster(environment, "status")
    told = cluster(environment, "up")
    try:
        (kubeconfig,) = [line.partition("=")[2] for line in told.splitlines() if line.startswith("export KUBECONFIG=")]
        assert cluster(environment, "up") == told, "starting it again is harmless"
        kubectl = ["kubectl", f"--kubeconfig={kubeconfig}", "get", "nodes", "--no-headers"]
        path = {**environment, "PATH": told.rpartition("export PATH=")[2].replace("$PATH", environment["PATH"]).strip()}
        nodes = subprocess.run(kubectl, env=path, capture_output=True, text=True, check=True).stdout
        assert nodes.split()[:2] == ["weft-node", "Ready"]
    finally:
        assert "is gone" in cluster(environment, "down")
    assert "no dev cluster is running" in cluster(environment, "status")

"""`make dev-cluster`: a node that stays behind the command that started it, for a person."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cluster.cluster import needs_own
from weft_devcluster.machine import check_node
from weft_devcluster.node import Node

pytestmark = needs_own("is of our own node")

ROOT = Path(__file__).parents[2]
ADAPTERS = 6


@pytest.fixture
def environment(node: Node, tmp_path: Path) -> dict[str, str]:
    """A state folder of the test's own, so a person's cluster is left alone. `node` skips where none can run."""
    check_node()
    return {**os.environ, **{"XDG_STATE_HOME": str(tmp_path), "KUBECACHEDIR": str(tmp_path / "kubectl-cache")}}


def cluster(environment: dict[str, str], command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "weft_devcluster", command],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def exported(told: str, environment: dict[str, str]) -> dict[str, str]:
    """The environment of a person who copied the `export` lines."""
    lines = [line.removeprefix("export ") for line in told.splitlines() if line.startswith("export ")]
    pairs = dict(line.split("=", 1) for line in lines)
    return {**environment, **{name: value.replace("$PATH", environment["PATH"]) for name, value in pairs.items()}}


def typed(line: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        shlex.split(line), env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def test_a_dev_cluster_stays_until_it_is_told_to_go_and_every_line_that_it_prints_works(
    environment: dict[str, str], node: Node
) -> None:
    assert "no dev cluster is running" in cluster(environment, "status")
    told = cluster(environment, "up")
    try:
        assert cluster(environment, "up") == told, "starting it again is harmless"
        person = exported(told, environment)
        assert typed("kubectl get nodes --no-headers", person).split()[:2] == ["weft-node", "Ready"]
        lines = [line for line in told.splitlines() if line.startswith(("helm ", "kubectl ")) and "forward" not in line]
        words = "".join(typed(line, person) for line in lines)
        assert "STATUS: deployed" in words
        assert words.count("condition met") == ADAPTERS
        assert "arning" not in words, "a first try is free of worries"
    finally:
        assert "is gone" in cluster(environment, "down")
    assert "no dev cluster is running" in cluster(environment, "status")

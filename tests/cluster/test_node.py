"""The node itself: it is alone on this machine, and nothing of it stays."""

import socket
from pathlib import Path

from harness.cluster.cluster import needs_own
from harness.cluster.owner import kill_owner
from weft_devcluster.bag import Bag, cgroups
from weft_devcluster.node import Node
from weft_devcluster.node_files import NODE_NAME
from weft_devcluster.processes import wait_until

pytestmark = needs_own("is of our own node")


def test_a_killed_owner_leaves_nothing(node: Node, tmp_path: Path) -> None:
    """Beside the node of this run, which does not notice."""
    before = left()
    pids = kill_owner("node", "Node", "made.bag.pids() + [process.pid for process in made.control_plane.processes]")
    assert len(pids) > 6
    wait_until(lambda: not added(before), "its cable, its mounts and its cgroups are gone")
    with Bag(tmp_path) as bag:  # in the place of the killed one
        assert bag.network != node.bag.network
        assert bag.pids()
        assert added(before)
    assert not added(before)
    assert node.control_plane.get("node", NODE_NAME)["status"]["conditions"]


def added(before: tuple[list[str], list[str], list[str]]) -> list[str]:
    """What is there that was not: another run's node may end meanwhile."""
    return [one for now, was in zip(left(), before, strict=True) for one in now if one not in was]


def left() -> tuple[list[str], list[str], list[str]]:
    """What a node has on this machine: interfaces, mounts, cgroups."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return sorted(name for _, name in socket.if_nameindex()), sorted(mounts), sorted(cgroups())

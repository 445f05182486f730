"""Facts about this machine, as far as a test cluster has to know them."""

import os
import shutil
import socket
from pathlib import Path

from weft_devcluster import tools
from weft_devcluster.errors import ToolMissing

CNI_PLUGINS = Path("/usr/lib/cni")
POSTGRESQL = Path("/usr/lib/postgresql")

# A program, and the Debian package that it is in.
NODE_PROGRAMS = {
    "containerd": "containerd", "ctr": "containerd", "runc": "runc", "iptables": "iptables", "conntrack": "conntrack",
    "ip": "iproute2", "nsenter": "util-linux",
}  # fmt: skip


def check_node() -> None:
    """Check that this machine can run a node. Raises ToolMissing with everything that is missing."""
    missing = [] if os.geteuid() == 0 else ["root"]
    missing += _missing_node_packages()
    missing += [] if tools.place(tools.PAUSE).exists() else [tools.PAUSE]
    if missing:
        raise ToolMissing(f"a node cannot run here without: {', '.join(missing)} (`make cluster-tools`)")


def missing_packages() -> list[str]:
    """List Debian packages that a node, its image or the store's tests would use and that are not here."""
    compiler = [] if shutil.which("cc") or shutil.which("gcc") else ["gcc", "libc6-dev"]
    return _missing_node_packages() + compiler + ([] if any(POSTGRESQL.glob("*/bin/postgres")) else ["postgresql"])


def own_address() -> str:
    """Find an IPv4 address of this machine that is not loopback; nothing is sent.

    EndpointSlices refuse loopback addresses, so servers that the API server reaches through a Service (aggregated APIs)
    have to listen on another one. Raises ToolMissing.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
        except OSError as error:
            raise ToolMissing("this machine has no IPv4 route, and no address besides loopback") from error
        return str(probe.getsockname()[0])


def _missing_node_packages() -> list[str]:
    missing = {package for program, package in NODE_PROGRAMS.items() if shutil.which(program) is None}
    if not (CNI_PLUGINS / "ptp").exists():
        missing.add("containernetworking-plugins")
    return sorted(missing)

"""A bag for a node: network, mount and process namespaces of its own, joined to this machine by one cable.

Whatever runs in the bag (containerd, its shims, every pod, mounts, interfaces, iptables chains) is gone when its first
process is, and the kernel kills that one together with the process that made the bag. This machine's own tables,
interfaces and mounts are never touched; of a bag it sees a veth pair, two routes and a cgroup.
"""

import contextlib
import ipaddress
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from weft_devcluster import tools
from weft_devcluster.errors import StartFailed, ToolMissing
from weft_devcluster.processes import Process, has_ended, wait_until

CGROUPS = Path("/sys/fs/cgroup")
CGROUP = "weft-node-"
BAGS = 16
# Once its input ends, as it does with the process that holds it: the kernel keeps a cgroup until its last process is
# buried, so this is tried for a while. It is told to end by nobody: whoever ends a run ends its processes.
SWEEP = """
trap '' INT TERM HUP
read -r _
for _ in $(seq 600); do
    find "$@" -depth -type d -exec rmdir {} + 2>/dev/null
    [ -z "$(find "$@" -maxdepth 0 2>/dev/null)" ] && exit 0
    sleep 0.1
done
exit 1
"""


@dataclass(frozen=True, slots=True)
class Network:
    """The addresses of bag `index`: one /16 of its own, so several bags may stand beside each other."""

    index: int

    @property
    def pods(self) -> ipaddress.IPv4Network:
        return self._part("0.0/22")

    @property
    def services(self) -> ipaddress.IPv4Network:
        return self._part("128.0/20")

    @property
    def machine(self) -> str:
        """The machine's end of the cable."""
        return f"10.{self._second}.255.1"

    @property
    def node(self) -> str:
        """The bag's end of the cable."""
        return f"10.{self._second}.255.2"

    @property
    def cable(self) -> str:
        return f"weft{self.index}"

    def _part(self, rest: str) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(f"10.{self._second}.{rest}")

    @property
    def _second(self) -> int:
        return 200 + self.index


class Bag:
    """The namespaces of one node. Open it with `with`. Needs root. Raises ToolMissing, StartFailed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.network = Network(_own_index(stack))
            self.cgroup = f"{CGROUP}{self.network.index}"
            _Sweeper(self.cgroup).sweep()  # of a bag that was killed with its sweeper
            stack.callback(_Sweeper(self.cgroup).sweep)
            for hierarchy in _hierarchies():
                (hierarchy / self.cgroup).mkdir()
            self._outer = self._start(stack)
            stack.callback(self.end)
            self._first = self._await_first()
            self._lay_cable()
            for place in ("/run", "/var/log"):  # containerd and the kubelet have fixed paths there
                self.run("mount", "-t", "tmpfs", "tmpfs", place)
            self._write_elsewhere("/var/lib")  # there too, beside what may have to be read
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def command(self, *command: str | Path) -> list[str]:
        """Make the command that runs inside."""
        enter = ["nsenter", f"--target={self._first}", "--net", "--mount", "--pid", "--"]
        return [*enter, *map(str, command)]

    def run(self, *command: str | Path) -> str:
        """Run a command inside to its end; returns its output. Raises StartFailed."""
        return _run(self.command(*command))

    def start(self, name: str, *command: str | Path) -> Process:
        """Start a process inside, whose log lies in the bag's folder. It ends with the bag at the latest."""
        return Process(name, self.command(*command), self._folder)

    def end(self) -> None:
        """Kill everything inside, and wait until the kernel has. May be called twice."""
        inside = _children(self._outer.pid)
        self._outer.end()
        for pid in inside:
            wait_until(lambda pid=pid: has_ended(pid), f"process {pid} ends")

    def pids(self) -> list[int]:
        """List all processes inside, as this machine numbers them."""
        ours = _namespace(str(self._first))
        numbers = [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [int(pid) for pid in numbers if _namespace(pid) == ours]

    def cgroup_pids(self, path: str) -> list[int]:
        """List processes of a cgroup below the bag's own, as this machine numbers them."""
        files = [file for top in _hierarchies() for file in top.glob(f"{self.cgroup}/{path}/cgroup.procs")]
        return sorted({int(line) for file in files for line in file.read_text().split()})

    # ------------------------------------------------------------------------------------------------ the making

    def _start(self, stack: contextlib.ExitStack) -> Process:
        if os.geteuid() != 0:
            raise ToolMissing("a node needs root: it makes namespaces and mounts")
        flags = ["--net", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--propagation=private"]
        outer = Process("bag", ["unshare", *flags, "--", tools.path(tools.PAUSE)], self._folder)
        stack.callback(outer.end)
        return outer

    def _await_first(self) -> int:
        """Wait for the process that holds the namespaces, once they are made. Raises StartFailed."""
        found: list[int] = []

        def is_there() -> bool:
            self._outer.check()
            found[:] = _children(self._outer.pid)
            return bool(found) and _executable(found[0]) == tools.path(tools.PAUSE)

        wait_until(is_there, "the namespaces are made")
        return found[0]

    def _lay_cable(self) -> None:
        net = self.network
        left = Path("/sys/class/net") / net.cable
        wait_until(lambda: not left.exists(), f"the kernel takes {net.cable} of a killed bag away")
        _run(["ip", "link", "add", net.cable, "type", "veth", "peer", "name", "cable", "netns", str(self._first)])
        _run(["ip", "address", "add", f"{net.machine}/30", "dev", net.cable])
        _run(["ip", "link", "set", net.cable, "up"])
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "address", "add", f"{net.node}/30", "dev", "cable")
        self.run("ip", "link", "set", "cable", "up")
        self.run("ip", "route", "add", "default", "via", net.machine)
        self.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for subnet in (net.pods, net.services):
            _run(["ip", "route", "add", str(subnet), "via", net.node])

    def _write_elsewhere(self, place: str) -> None:
        """Have what is written below `place` go to a folder of ours."""
        written, work = self._folder / "written", self._folder / "work"
        for folder in (written, work):
            folder.mkdir()
        options = f"lowerdir={place},upperdir={written},workdir={work}"
        self.run("mount", "-t", "overlay", "overlay", "-o", options, place)


class _Sweeper:
    """A process that removes the cgroups of that name, innermost first, when told to or when this process is gone."""

    def __init__(self, cgroup: str) -> None:
        tops = [str(hierarchy / cgroup) for hierarchy in _hierarchies()]
        self._tops = tops
        self._process = subprocess.Popen(
            ["sh", "-c", SWEEP, "sweep", *tops], stdin=subprocess.PIPE, start_new_session=True
        )

    def sweep(self) -> None:
        """Wait until the cgroups are gone. Raises StartFailed."""
        self._process.communicate()
        if self._process.returncode != 0:
            raise StartFailed(f"cgroups of a bag stay: {' '.join(self._tops)}")


def _hierarchies() -> list[Path]:
    """List the hierarchies: one for all controllers (version 2), or one for each (version 1)."""
    if (CGROUPS / "cgroup.procs").exists():
        return [CGROUPS]
    return [path for path in CGROUPS.iterdir() if (path / "cgroup.procs").exists() and not path.is_symlink()]


def cgroups() -> list[str]:
    """List the topmost cgroups of all bags of this machine."""
    return [str(found) for hierarchy in _hierarchies() for found in hierarchy.glob(f"{CGROUP}*")]


def _own_index(stack: contextlib.ExitStack) -> int:
    """Take a number that no other living bag has: the kernel frees a socket's name with its owner."""
    for index in range(BAGS):
        name = stack.enter_context(socket.socket(socket.AF_UNIX))
        with contextlib.suppress(OSError):
            name.bind(f"\0weft-node-{index}")
            return index
    raise StartFailed(f"{BAGS} nodes run on this machine already")


def _run(command: Sequence[str]) -> str:
    if shutil.which(command[0]) is None:
        raise ToolMissing(f"no {command[0]}: apt-get install util-linux iproute2")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StartFailed(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _namespace(pid: str) -> Path | None:
    try:
        return Path(f"/proc/{pid}/ns/pid").readlink()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # gone, or so foreign that we may not look
        return None


def _executable(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/exe").readlink()
    except FileNotFoundError:
        return None

"""Two hosts on one machine: this one, and a network namespace behind a cable, where one may be made."""

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple


class Hosts(NamedTuple):
    """Addresses of both. `enter`: what a command begins with to run on the other one; () where it is this one."""

    address: str
    other: str
    enter: tuple[str, ...]


@contextmanager
def two_hosts() -> Generator[Hosts]:
    """Whoever may not make namespaces has this host alone."""
    ip, name = shutil.which("ip"), f"weft-{os.getpid()}"
    if ip is None or os.geteuid() or subprocess.run([ip, "netns", "add", name], capture_output=True).returncode:
        yield Hosts("127.0.0.1", "127.0.0.1", ())
        return
    here, there, net = f"wr{os.getpid() % 10**6}a", f"wr{os.getpid() % 10**6}b", f"198.18.{os.getpid() % 256}"
    inside = [ip, "-n", name]
    try:
        for command in (
            [ip, "link", "add", here, "type", "veth", "peer", "name", there, "netns", name],
            [ip, "address", "add", f"{net}.1/30", "dev", here],
            [ip, "link", "set", here, "up"],
            [*inside, "address", "add", f"{net}.2/30", "dev", there],
            [*inside, "link", "set", there, "up"],
            [*inside, "link", "set", "lo", "up"],
        ):
            subprocess.run(command, check=True, capture_output=True)
        yield Hosts(f"{net}.1", f"{net}.2", (ip, "netns", "exec", name))
    finally:
        subprocess.run([ip, "netns", "delete", name], check=True, capture_output=True)

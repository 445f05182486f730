"""Addresses of a stack: ports for the components, and a unix socket.

The ports lie below the kernel's range for outgoing connections. A port from the range could be taken while its
component restarts: by any connection of this machine, even by the component's clients.
"""

import os
import socket
import sys
from collections import deque
from pathlib import Path
from random import Random

from weft.files import socket_name
from weft_operator.errors import PortInUse

RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST, EPHEMERAL_DEFAULT = 10_000, 32_768
LOOPBACK = "127.0.0.1"
RESERVED = 64


class PortSource:
    """A source of free ports on loopback. No port is given out twice, not even to a second process with a source.

    Each port is reserved by an abstract unix socket named after its number, which the kernel removes with this process
    (Linux; on other systems two processes may get the same port). Only the last RESERVED ports stay reserved: the
    earlier ports are by then in use, or given up.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._reserved: deque[socket.socket] = deque()

    def __call__(self, count: int) -> list[int]:
        """Reserve `count` different ports. Raises PortInUse when there are not enough."""
        top = _ephemeral_from()
        low = LOWEST if top > LOWEST + 1000 else 1024
        ports: list[int] = []
        for port in self._random.sample(range(low, top), min(top - low, 200 + 20 * count)):
            if len(ports) == count:
                break
            if _is_free(LOOPBACK, port) and self._reserve(port):
                ports.append(port)
        if len(ports) < count:
            raise PortInUse(
                f"found only {len(ports)} free ports on {LOOPBACK} between {low} and {top}, {count} are needed"
            )
        return ports

    def _reserve(self, port: int) -> bool:
        if sys.platform != "linux":
            return True
        reservation = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            reservation.bind(f"\0weft-port-{port}")
        except OSError:
            reservation.close()
            return False
        self._reserved.append(reservation)
        if len(self._reserved) > RESERVED:
            self._reserved.popleft().close()
        return True

    def close(self) -> None:
        """Give up what is reserved."""
        while self._reserved:
            self._reserved.popleft().close()


def require_free(host: str, port: int, flag: str) -> None:
    """Check that the address is free to listen on. Raises PortInUse."""
    if not _is_free(host, port):
        raise PortInUse(
            f"port {port} on {host} is in use: stop the process on it, or choose a different port with {flag}"
        )


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _ephemeral_from() -> int:
    try:
        return int(RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return EPHEMERAL_DEFAULT


def listen(path: Path) -> socket.socket:
    """Listen on a socket readable only by its owner. An old socket is replaced."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_mask = os.umask(0o177)
    try:
        with socket_name(path) as name:
            sock.bind(name)
    finally:
        os.umask(old_mask)
    sock.listen(128)
    sock.setblocking(False)
    return sock

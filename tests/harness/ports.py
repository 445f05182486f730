"""Free ports on loopback, below those that the kernel gives to outgoing connections: nobody takes one meanwhile.

Nor does another process that gets its ports here or from `weft up`: they are reserved until this process ends.
"""

import socket
from random import SystemRandom

from weft_operator.local import PortSource

_source = PortSource(SystemRandom())


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return `count` ports, all different."""
    return _source(count)


def free_addresses(count: int) -> list[str]:
    """Return HOST:PORT of `count` ports."""
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]

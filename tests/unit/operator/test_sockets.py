"""Ports that stay ours while a component is down."""

import socket
from random import Random

import pytest

from weft_operator.errors import PortInUse
from weft_operator.local import EPHEMERAL_DEFAULT, RANGE_FILE, PortSource, require_free


def test_ports_lie_below_those_of_outgoing_connections() -> None:
    top = int(RANGE_FILE.read_text().split()[0]) if RANGE_FILE.exists() else EPHEMERAL_DEFAULT
    found = PortSource(Random(1))(20)
    assert len(set(found)) == 20
    assert max(found) < top


def test_no_port_is_given_out_twice() -> None:
    """Two sources that would draw the same ports: as two processes do by chance, before either listens."""
    one, other = PortSource(Random(1)), PortSource(Random(1))
    found = [port for ports, count in ((one, 7), (other, 7), (one, 2), (other, 2)) for port in ports(count)]
    assert len(found) == len(set(found)) == 18


def test_only_the_latest_reservations_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_operator.local.sockets.RESERVED", 2)
    given = PortSource(Random(1))(3)
    assert set(PortSource(Random(1))(1)) & set(given) == {given[0]}


def test_a_port_in_use_is_named_with_the_flag_that_changes_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} .* --port"):
            require_free("127.0.0.1", port, "--port")
    require_free("127.0.0.1", port, "--port")

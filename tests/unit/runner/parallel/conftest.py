"""Two ends of a channel in one process."""

import socket
from collections.abc import Iterator

import pytest

from harness.waiting import PATIENCE_S
from weft_runner.parallel import Channel


@pytest.fixture(scope="module")
def channels() -> Iterator[tuple[Channel, Channel]]:
    with_patience = [Channel(end) for end in socket.socketpair()]
    for channel in with_patience:
        channel.set_patience(PATIENCE_S)
    yield with_patience[0], with_patience[1]
    for channel in with_patience:
        channel.close()

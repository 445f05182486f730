from collections.abc import Callable, Iterator

import pytest

from tests.integration.depot.running import Process

Run = Callable[..., Process]


@pytest.fixture
def run() -> Iterator[Run]:
    """Starts depots with flags; they end with the test."""
    started: list[Process] = []

    def start(*flags: object) -> Process:
        started.append(Process(*map(str, flags)))
        return started[-1]

    yield start
    for process in started:
        process.close()

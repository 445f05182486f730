"""The HTTP server of every process: it sleeps while nobody asks, and ends when it is told to."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn

from harness.waiting import soon
from weft.wire.quiet_server import QuietServer


async def app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nobody asks")


class Counted(QuietServer):
    """Grows with each tick."""

    ticks = 0

    async def on_tick(self, counter: int) -> bool:
        self.ticks += 1
        if self.ticks == 1:
            asyncio.get_running_loop().call_soon(self.begun.set)
        return await super().on_tick(counter)


def server(*, date_header: bool) -> Counted:
    made = Counted(uvicorn.Config(app, log_config=None, lifespan="off", date_header=date_header))
    made.begun = asyncio.Event()  # type: ignore[attr-defined]
    return made


async def serve(made: Counted, end: Callable[[], Any]) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(made.serve(sockets=[sock]))
        await soon(made.begun.wait())  # type: ignore[attr-defined]
        await asyncio.to_thread(end)
        await soon(serving)


@pytest.mark.parametrize("date_header", [False, True])
async def test_it_ends_when_another_thread_says_so(date_header: bool) -> None:
    made = server(date_header=date_header)
    await serve(made, lambda: setattr(made, "should_exit", True))
    assert [name for name, _ in made.server_state.default_headers] == [b"date"] * date_header + [b"server"]
    if not date_header:
        assert made.ticks == 2


async def test_what_is_told_to_end_before_it_serves_ends() -> None:
    made = server(date_header=False)
    made.should_exit = True
    await soon(made.main_loop())
    assert made.ticks == 1

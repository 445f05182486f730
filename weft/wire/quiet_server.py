"""uvicorn's server without its ten wake-ups a second: at rest they were a third of what an idle process did."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager, suppress

import uvicorn

DATE_S = 1.0  # the precision of the Date header


class QuietServer(uvicorn.Server):
    """A server that ends when `should_exit` is set: on its loop, in a signal handler or in another thread.

    Signals are the process's own: uvicorn would end the process by the signal instead of with 0.
    """

    _exit = False
    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, config: uvicorn.Config) -> None:
        self._wake = asyncio.Event()
        super().__init__(config)

    @property
    def should_exit(self) -> bool:
        return self._exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._exit = value
        if value and self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def main_loop(self) -> None:
        """Run until `should_exit`."""
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), DATE_S if self.config.date_header else None)
        self._loop = None

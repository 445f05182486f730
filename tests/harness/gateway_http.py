"""A connection of the gateway between bytes and the requests that it reads in them, without sockets or an app."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

from uvicorn.server import ServerState

from weft_gateway.shell import BoundedHttp, ConnectionBound

REFUSALS: Any = SimpleNamespace(auth=False, routes=SimpleNamespace(limited=False))
CONFIG: Any = SimpleNamespace(
    loaded=True, loaded_app=None, ws_protocol_class=None, root_path="", asgi_version="3.0", limit_concurrency=None,
    timeout_keep_alive=60,
)  # fmt: skip


class _Loop:
    """Whose timers never come."""

    def call_later(self, _delay_s: float, *_call: Any) -> Any:
        return SimpleNamespace(cancel=lambda: None)


LOOP: Any = _Loop()


class ReadRequest(NamedTuple):
    """A request as an app would get it. `complete`: its body is."""

    method: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    complete: bool


class _Transport:
    def __init__(self) -> None:
        self.written, self.closed = b"", False

    def write(self, data: bytes) -> None:
        if not self.closed:
            self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, _name: str) -> None:
        return None

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class PlayedConnection(BoundedHttp):
    """Each request is answered with nothing as soon as its body is complete."""

    def __init__(self) -> None:
        super().__init__(
            CONFIG, ServerState(), {}, LOOP, bound=ConnectionBound(1), refusals=REFUSALS,
        )  # fmt: skip
        self.logger: Any = SimpleNamespace(level=100, warning=lambda _message: None)  # pyright: ignore[reportUnknownLambdaType]
        self.client_side, self._cycles = _Transport(), list[Any]()
        self.connection_made(self.client_side)  # pyright: ignore[reportArgumentType]

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._cycles.append(self.cycle)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle

    def receive(self, segments: Iterable[bytes]) -> list[ReadRequest]:
        """Take what a client sends, and return all requests that were read up to now."""
        for segment in segments:
            if not self.client_side.closed:
                self.data_received(segment)
            while (running := self._running) and not (running.more_body or running.response_complete):
                running.response_complete = True
                if not running.keep_alive:
                    self.client_side.close()
                running.on_response()
        return [
            ReadRequest(
                cycle.scope["method"], cycle.scope["raw_path"], list(cycle.scope["headers"]), bytes(cycle.body),
                not cycle.more_body,
            )
            for cycle in self._cycles
        ]  # fmt: skip


def read_requests(*segments: bytes) -> list[ReadRequest]:
    """Return the requests that a connection reads in segments of bytes."""
    return PlayedConnection().receive(segments)

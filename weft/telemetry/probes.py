"""Plain-HTTP `/healthz`, `/readyz` and `/metrics` on a port of their own, from a thread of their own.

A process that computes (the runner) still answers. Liveness proves that the process's own loop turns: the owner calls
`beat()` from its loop, and a beat older than `stall_s` is unhealthy.
"""

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

from weft.process import AddressInUse, split_address

Ready = Callable[[], str | None]  # None when ready, else the reason why not


class Probes:
    """Owns the probe server. Start with `start()`, stop with `close()`."""

    def __init__(
        self, listen: str, ready: Ready, *, stall_s: float = 30.0, registry: CollectorRegistry = REGISTRY
    ) -> None:
        """Raises AddressInUse."""
        self._ready, self._stall_s, self._registry = ready, stall_s, registry
        self._beat = time.monotonic()
        try:
            self._server = ThreadingHTTPServer(split_address(listen), _handler(self))
        except OSError as error:
            raise AddressInUse("--probes", listen, error.strerror or str(error)) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="probes", daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def start(self) -> None:
        self._thread.start()

    def beat(self) -> None:
        self._beat = time.monotonic()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, content type and body of a probe path."""
        match path:
            case "/healthz":
                age = time.monotonic() - self._beat
                return _text(200, "ok") if age < self._stall_s else _text(503, f"loop silent for {age:.0f} s")
            case "/readyz":
                reason = self._ready()
                return _text(200, "ok") if reason is None else _text(503, reason)
            case "/metrics":
                return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
            case _:
                return _text(404, "paths: /healthz /readyz /metrics")


def _text(status: int, text: str) -> tuple[int, str, bytes]:
    return status, "text/plain; charset=utf-8", text.encode() + b"\n"


def _handler(probes: Probes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content_type, body = probes.answer(self.path.partition("?")[0])
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the standard library's name)
            pass  # a probe every second is no news

    return Handler

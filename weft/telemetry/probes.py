"""Plain-HTTP `/healthz`, `/readyz` and `/metrics` on a port of their own, from a thread of their own.

A process that computes (the runner) still answers. Liveness proves that the process's own loop turns: the owner calls
`mark_alive()` from its loop, and a mark older than `stall_s` is unhealthy.

At most MAX_CONNECTIONS are open, each with a thread. One more closes the eldest: a request takes milliseconds, so who
has been there longest is idle or slow, and no number of idle connections keeps the kubelet out.
"""

import contextlib
import ipaddress
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

from weft.hosts import AllowedHosts
from weft.process import AddressInUse, split_address

Ready = Callable[[], str | None]  # None when ready, else the reason why not
Metrics = Callable[[str | None], bytes]
MAX_CONNECTIONS = 16
SHORT_S = 60.0  # so long `/readyz` names a shortage that was met
IDLE_S = 10.0  # of one wait on a connection
# Between two looks whether it is closed. On Linux the end of its socket wakes who waits for a connection.
POLL_S = None if sys.platform == "linux" else 0.5
_LOCAL_HOSTS = AllowedHosts()
log = logging.getLogger(__name__)


class Shortages:
    """Shortages of the last minute, which `/readyz` names while the process goes on serving. Any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._met = clock, dict[str, float]()

    def note(self, subject: str) -> None:
        """Note a shortage now, and drop those of more than a minute ago."""
        now = self._clock()
        recent = {text: met_s for text, met_s in self._met.items() if now - met_s < SHORT_S}
        self._met = {**recent, subject: now}  # a new dict: the thread of the probes may read the old one

    def text(self) -> str:
        """Return the body of `/readyz` of a process that is ready."""
        met = sorted(subject for subject, at in self._met.items() if self._clock() - at < SHORT_S)
        return f"ok, but {'; '.join(met)}" if met else "ok"


class Probes:
    """Owns the probe server. Start with `start()`, stop with `close()`."""

    def __init__(
        self,
        listen: str,
        ready: Ready,
        *,
        stall_s: float = 30.0,
        registry: CollectorRegistry = REGISTRY,
        metrics: Metrics | None = None,
        shortages: Shortages | None = None,
    ) -> None:
        """Listen at once. `metrics`: the text for an Authorization header; None: `registry`. Raises AddressInUse."""
        self._ready, self._stall_s, self.shortages = ready, stall_s, shortages or Shortages()
        self._metrics: Metrics = metrics or (lambda _: generate_latest(registry))
        self._alive_at = time.monotonic()
        try:
            self._server = _Server(split_address(listen), _handler(self))
        except OSError as error:
            raise AddressInUse("--probes", listen, error.strerror or str(error)) from error
        self._loopback = ipaddress.ip_address(str(self._server.server_address[0])).is_loopback
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="probes", daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def start(self) -> None:
        self._thread.start()

    def mark_alive(self) -> None:
        self._alive_at = time.monotonic()

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):  # not Linux
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        """Serve until closed, without a look now and then whether it is, as `serve_forever` has it."""
        while not self._closing:
            self._server.handle_request()

    def allows(self, host: str) -> bool:
        """Return whether a request with this `Host` is answered. On a loopback address only `localhost` leads here."""
        return not self._loopback or _LOCAL_HOSTS.allows(host.encode("latin-1", "replace"))

    def answer(self, path: str, authorization: str | None = None) -> tuple[int, str, bytes]:
        """Answer a probe path: status, content type and body."""
        match path:
            case "/healthz":
                age = time.monotonic() - self._alive_at
                return _text(200, "ok") if age < self._stall_s else _text(503, f"loop silent for {age:.0f} s")
            case "/readyz":
                reason = self._ready()
                return _text(200, self.shortages.text()) if reason is None else _text(503, reason)
            case "/metrics":
                return 200, CONTENT_TYPE_LATEST, self._metrics(authorization)
            case _:
                return _text(404, "paths: /healthz /readyz /metrics")


def _text(status: int, text: str) -> tuple[int, str, bytes]:
    return status, "text/plain; charset=utf-8", text.encode() + b"\n"


class _Server(ThreadingHTTPServer):
    """A thread for each connection, and at most MAX_CONNECTIONS of them."""

    timeout = POLL_S
    request_queue_size = 128  # of the kernel's, for the moment that the eldest takes to end

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._open: dict[socket.socket, None] = {}  # in the order they came
        self._changed = threading.Condition()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            while len(self._open) >= MAX_CONNECTIONS:
                with contextlib.suppress(OSError):  # its other end has closed it
                    next(iter(self._open)).shutdown(socket.SHUT_RDWR)
                self._changed.wait()
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 (the standard library's names)
        if isinstance(sys.exception(), OSError):
            log.debug("a connection to the probes broke", exc_info=True)
        else:
            log.exception("a probe was not answered")


def _handler(probes: Probes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_S

        def do_GET(self) -> None:
            if probes.allows(self.headers.get("Host", "")):
                path, authorization = self.path.partition("?")[0], self.headers.get("Authorization")
                status, content_type, body = probes.answer(path, authorization)
            else:
                status, content_type, body = _text(403, "expected an address or localhost as Host")
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 (the standard library's name)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the standard library's name)
            pass  # a probe every second is no news

    return Handler

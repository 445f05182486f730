"""An HTTP server of a test, on loopback, in threads of its own."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Message
    body: bytes


class Handler(BaseHTTPRequestHandler):
    """Reads bodies and replies with whole ones; a subclass says in `answer` when."""

    def do_GET(self) -> None:
        self.answer()

    do_POST = do_DELETE = do_GET  # noqa: N815 (the base's names)

    def answer(self) -> None:
        raise NotImplementedError

    def log_message(self, *args: object) -> None:
        """Write nothing into the test's output."""

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["content-length"] or 0))

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


Answer = Callable[[Request], tuple[int, bytes]]


class LoopbackServer:
    """Serves at `url` from its making to `close()`: by a handler, or with the status and body that `answer` returns."""

    def __init__(self, answer: type[Handler] | Answer) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(answer))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(answer: type[Handler] | Answer) -> type[Handler]:
    if isinstance(answer, type):
        return answer

    class Answering(Handler):
        def answer(self) -> None:
            self.reply(*answer(Request(self.command, self.path, self.headers, self.body())))

    return Answering

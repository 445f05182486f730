"""`s3:` against servers that are none; against a real one it is tested in tests/integration/depot."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.unit.depot.reading import asked, quick_policy, remote_source
from weft.artifacts.errors import Unavailable
from weft.s3 import ANSWER_BYTES
from weft_depot.sources import RetryPolicy

PIECE, MAX_BYTES = b"a" * (1 << 16), 256 << 20  # without a bound in the client the test fails, and the machine lives
BUFFERS = 8 << 20  # of two sockets, and what was sent before the client closed its own


class Endless(BaseHTTPRequestHandler):
    """Answers with a listing that is as good as endless, or that comes byte by byte."""

    sent, piece, pause_s = 0, PIECE, 0.0

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(ConnectionError):
            while type(self).sent < MAX_BYTES:
                self.wfile.write(self.piece)
                type(self).sent += len(self.piece)
                time.sleep(self.pause_s)

    def log_message(self, *_: object) -> None:
        pass


class Dripping(Endless):
    piece, pause_s = b"a", 0.01


@contextmanager
def serving(handler: type[Endless]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def refusal(url: str, policy: RetryPolicy) -> str:
    question = asked("s3://bucket/prefix", endpoint=url)
    source = remote_source("s3", f"--s3-endpoints={url}", policy=policy)
    with pytest.raises(Unavailable) as refused, source.open(*question, lambda _name: True):
        pass
    return str(refused.value)


def test_of_a_listing_without_an_end_little_is_read() -> None:
    policy = quick_policy()
    with serving(Endless) as url:
        assert "AnswerWithoutEnd" in refusal(url, policy)
    assert 0 < Endless.sent <= policy.tries * (ANSWER_BYTES + BUFFERS)


def test_a_listing_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.s3.ANSWER_S", 0.1)
    with serving(Dripping) as url:
        assert "AnswerWithoutEnd" in refusal(url, quick_policy())

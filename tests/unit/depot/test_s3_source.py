"""`s3:` against a server that is not one; against a real one it is tested in tests/integration/depot."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.unit.depot.reading import quick_policy
from weft.artifacts.errors import Unavailable
from weft.s3 import ANSWER_BYTES
from weft_depot.sources import Location
from weft_depot.sources.s3 import S3Source
from weft_depot.sources.s3_client import Endpoints

PIECE, MOST = b"a" * (1 << 16), 256 << 20  # without a bound in the client the test fails, and the machine lives
BUFFERS = 8 << 20  # of two sockets, and what was sent before the client closed its own


class Endless(BaseHTTPRequestHandler):
    """Answers with a listing that is as good as endless."""

    sent = 0

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(ConnectionError):
            while Endless.sent < MOST:
                self.wfile.write(PIECE)
                Endless.sent += len(PIECE)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endless() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_of_a_listing_without_an_end_little_is_read(endless: str) -> None:
    policy = quick_policy()
    source = S3Source(Endpoints((endless,), "us-east-1"), policy)
    with pytest.raises(Unavailable, match="AnswerTooLarge"), source.open(
        Location("s3", "//bucket/prefix", None, "team", None, endless), lambda _name: True
    ):  # fmt: skip
        pass
    assert 0 < Endless.sent <= policy.tries * (ANSWER_BYTES + BUFFERS)

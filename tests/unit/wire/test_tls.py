"""The three files: what makes them unusable, when they are read again, and what contexts made of them accept."""

import datetime
import http.client
import http.server
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.certificates import Authority, mount
from harness.waiting import PATIENCE_S
from weft.process import CannotStart
from weft.wire.tls import Tls, TlsUnusable, load_tls


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def test_without_a_folder_there_is_no_tls() -> None:
    assert load_tls(None, "gateway") is None


def test_a_usable_folder_says_what_is_in_it(authority: Authority, tmp_path: Path) -> None:
    folder = authority.folder(tmp_path / "tls", "gateway")
    present = Tls(folder, "gateway").present()
    assert (present.version, present.ca) == (1, authority.pem)
    assert present.certificate == (folder / "tls.crt").read_bytes()
    assert present.key == (folder / "tls.key").read_bytes()


FILES = ("tls.crt", "tls.key", "ca.crt")
PAST = -datetime.timedelta(seconds=1)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        *((lambda _, at, name=name: (at / name).unlink(), f"{name}: No such file") for name in FILES),
        *((lambda _, at, name=name: (at / name).write_bytes(b"no PEM\n"), said) for name, said in zip(
            FILES, ("tls.crt with tls.key: ", "tls.crt with tls.key: ", "ca.crt: no certificate in PEM"), strict=True)),
        (lambda ca, at: (at / "tls.key").write_bytes(ca.issue("gateway.weft.internal")[1]),
            "tls.crt with tls.key: the key does not belong to the certificate"),
        (lambda ca, at: ca.folder(at, "gateway", valid=PAST), "as gateway: certificate has expired"),
        (lambda ca, at: ca.folder(at, "runner"), "not valid for 'gateway.weft.internal'"),
        (lambda ca, at: ca.folder(at), "not valid for 'gateway.weft.internal'"),
        (lambda _, at: (at / "ca.crt").write_bytes(Authority().pem),
            "as gateway: unable to get local issuer certificate"),
    ],
)  # fmt: skip
def test_unusable_files_stop_the_start_with_file_and_reason(
    spoil: Callable[[Authority, Path], object], said: str, authority: Authority, tmp_path: Path
) -> None:
    folder = authority.folder(tmp_path / "tls", "gateway")
    spoil(authority, folder)
    with pytest.raises(TlsUnusable) as told:
        Tls(folder, "gateway")
    assert isinstance(told.value, CannotStart)
    assert str(told.value).startswith(f"--tls-dir {folder}: ")
    assert said in str(told.value)


def test_a_swapped_secret_is_read_again_and_only_then(authority: Authority, tmp_path: Path) -> None:
    tls = Tls(authority.folder(tmp_path / "tls", "gateway"), "gateway")
    assert tls.present() is tls.present()
    authority.folder(tls.folder, "gateway")
    second = tls.present()
    assert second.version == 2
    assert second.certificate == (tls.folder / "tls.crt").read_bytes()
    assert tls.present() is second


def test_plain_files_written_in_place_are_read_again(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("gateway.weft.internal")
    for name, content in zip(FILES, (certificate, key, authority.pem), strict=True):
        (tmp_path / name).write_bytes(content)
    tls = Tls(tmp_path, "gateway")
    certificate, key = authority.issue("gateway.weft.internal")
    (tmp_path / "tls.crt").write_bytes(certificate)
    assert tls.present().version == 1  # the key is still the other one's
    (tmp_path / "tls.key").write_bytes(key)
    assert (tls.present().version, tls.present().certificate) == (2, certificate)


def test_unusable_news_leave_what_was_and_are_told_once(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Tls(authority.folder(tmp_path / "tls", "gateway"), "gateway")
    before = tls.present()
    authority.folder(tls.folder, "gateway", valid=PAST)
    assert [tls.present() for _ in range(3)] == [before] * 3
    assert [record.getMessage() for record in caplog.records].count(
        "new certificates are unusable: the ones before stay"
    ) == 1
    (tls.folder / "tls.crt").unlink()  # half-way through being replaced
    assert tls.present() is before
    mount(tls.folder, {"tls.crt": before.certificate})
    (tls.folder / "tls.crt").unlink()
    (tls.folder / "tls.crt").symlink_to(Path("..data") / "tls.crt")
    authority.folder(tls.folder, "gateway")
    assert tls.present().version == 2


class _Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


class _Server(http.server.ThreadingHTTPServer):
    """Handshakes in the connection's own thread; a refused one is no news."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", 0), _Hello)
        self.context = context

    def finish_request(self, request: object, client_address: object) -> None:
        try:
            with self.context.wrap_socket(request, server_side=True) as secured:
                super().finish_request(secured, client_address)
        except ssl.SSLError:
            return

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@contextmanager
def served(context: ssl.SSLContext) -> Iterator[int]:
    server = _Server(context)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE_S)


def get(port: int, context: ssl.SSLContext) -> bytes:
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read()
    finally:
        connection.close()


def test_contexts_check_both_ends_by_role_and_follow_the_files(authority: Authority, tmp_path: Path) -> None:
    depot, runner = (Tls(authority.folder(tmp_path / role, role), role) for role in ("depot", "runner"))
    to_depot = runner.client_context("depot")
    with served(depot.server_context()) as port:
        assert get(port, to_depot) == b"hello"
        with pytest.raises(ssl.SSLCertVerificationError, match="scheduler"):
            get(port, runner.client_context("scheduler"))  # an address does not make a depot a scheduler
        nobody = ssl.create_default_context(cadata=authority.pem.decode())
        nobody.check_hostname = False
        with pytest.raises((ssl.SSLError, ConnectionError)):
            get(port, nobody)  # no certificate of its own
        fresh = Authority()
        fresh.folder(depot.folder, "depot")
        with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
            get(port, to_depot)  # the server shows the new one at once
        fresh.folder(runner.folder, "runner")
        assert get(port, to_depot) == b"hello"
        stranger = Tls(authority.folder(tmp_path / "old", "runner"), "runner").present().client
        stranger.load_verify_locations(cadata=fresh.pem.decode())
        stranger.check_hostname = False
        with pytest.raises((ssl.SSLError, ConnectionError)):
            get(port, stranger)  # the CA that was taken out is not believed any more


async def test_many_threads_may_ask_while_the_files_change(authority: Authority, tmp_path: Path) -> None:
    tls = Tls(authority.folder(tmp_path / "tls", "gateway"), "gateway")
    ended, wrong = threading.Event(), list[str]()

    def ask() -> None:
        while not ended.is_set():
            seen = tls.present()
            if seen.ca != authority.pem:
                wrong.append("mixed")

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        authority.folder(tls.folder, "gateway")
    ended.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert wrong == []
    assert tls.present().certificate == (tls.folder / "tls.crt").read_bytes()

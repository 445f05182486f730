"""Downloads against a real HTTP server that breaks in every way a server can."""

import contextlib
import hashlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.blobs import check_blobs
from harness.loopback import Handler, LoopbackServer
from harness.waiting import PATIENCE_S
from tests.unit.artifacts.making import refused
from weft.artifacts import fetch as fetching
from weft.artifacts.blobs import BlobStore
from weft.artifacts.digest import FileEntry, Manifest, build_manifest, digest_of, hex_of
from weft.artifacts.errors import BadDigest, Reason, Unavailable, UnknownDigest
from weft.artifacts.fetch import FetchLimits, Stopped, fetch

BIG = bytes(range(256)) * 400


class Server(LoopbackServer):
    """Serves blobs; `script` says what to do with the next requests, one word each (then all is well)."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.script: list[str] = []
        self.seen: list[tuple[str, str | None]] = []
        self.mismatches: list[bool] = []
        super().__init__(_handler(self))

    def put(self, data: bytes) -> str:
        digest = digest_of(data)
        self.blobs[digest] = data
        return digest

    def artifact(self, **contents: bytes) -> Manifest:
        manifest = build_manifest(
            "adapter", [FileEntry(name, hex_of(self.put(data)), len(data)) for name, data in contents.items()]
        )
        self.put(manifest.to_bytes())
        return manifest


def _handler(server: Server) -> type[Handler]:
    class Breaking(Handler):
        def answer(self) -> None:
            wanted = self.headers["Range"]
            server.seen.append((self.path, wanted))
            server.mismatches.append("weft-mismatch" in self.headers)
            fault = server.script.pop(0) if server.script else "fine"
            data = server.blobs.get(self.path.rpartition("/")[2])
            if fault.isdigit() or data is None:
                return self.send_error(int(fault) if fault.isdigit() else 404)
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and fault != "no-range" else 0
            body = b"?" * len(data[start:]) if fault == "lie" else data[start:] + (b"x" if fault == "more" else b"")
            body = body[: len(body) // 2] if fault == "short" else body
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)
            return None

    return Breaking


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path)


def take(server: Server, digest: str, store: BlobStore, **limits: float) -> tuple[Manifest, list[float]]:
    pauses: list[float] = []
    settings = FetchLimits(**{"chunk_bytes": 1000, **limits})  # type: ignore[arg-type]
    return fetch(server.url, digest, store, limits=settings, pause=pauses.append), pauses


def test_an_artifact_arrives_whole_and_a_second_fetch_asks_nothing(server: Server, store: BlobStore) -> None:
    wanted = server.artifact(config=b"{}", weights=BIG, empty=b"")
    manifest, pauses = take(server, wanted.digest, store)
    assert manifest == wanted
    assert store.holds(wanted.digest)
    assert store.file(manifest, "weights").read_bytes() == BIG
    assert pauses == []
    asked = len(server.seen)
    assert take(server, wanted.digest, store)[0] == wanted
    assert len(server.seen) == asked
    check_blobs(store)
    assert list((store.part(wanted.digest)).parent.iterdir()) == []


def test_files_that_are_here_already_are_not_downloaded_again(server: Server, store: BlobStore) -> None:
    store.put(BIG)
    wanted = server.artifact(config=b"{}", weights=BIG)
    take(server, wanted.digest, store)
    assert f"/v1/blobs/{digest_of(BIG)}" not in [path for path, _ in server.seen]


def test_a_cut_download_resumes_where_it_ended(server: Server, store: BlobStore) -> None:
    wanted = server.artifact(weights=BIG)
    server.script = ["fine", "cut", "cut"]
    manifest, pauses = take(server, wanted.digest, store)
    assert store.file(manifest, "weights").read_bytes() == BIG
    half = len(BIG) // 2
    assert [wanted for _, wanted in server.seen[1:]] == [None, f"bytes={half}-", f"bytes={half + half // 2}-"]
    assert pauses == [0.1, 0.2], "pauses double"


def test_a_download_resumes_after_a_restart_of_the_process(server: Server, store: BlobStore, tmp_path: Path) -> None:
    wanted = server.artifact(weights=BIG)
    server.script = ["fine", "cut"]
    with pytest.raises(Unavailable):
        take(server, wanted.digest, store, tries=1)
    assert not store.has(wanted.digest)
    again = BlobStore(tmp_path)
    again.clean()
    take(server, wanted.digest, again)
    assert server.seen[-1] == (f"/v1/blobs/{digest_of(BIG)}", f"bytes={len(BIG) // 2}-")


def test_a_server_that_ignores_ranges_sends_it_from_the_start(server: Server, store: BlobStore) -> None:
    wanted = server.artifact(weights=BIG)
    server.script = ["fine", "cut", "no-range"]
    manifest, _ = take(server, wanted.digest, store)
    assert store.file(manifest, "weights").read_bytes() == BIG


def test_busy_and_failing_servers_are_tried_again_and_tries_are_bounded(server: Server, store: BlobStore) -> None:
    wanted = server.artifact(weights=b"w")
    server.script = ["503", "500", "429"]
    assert take(server, wanted.digest, store)[0] == wanted
    other = server.artifact(weights=b"v")
    server.script = ["503"] * 4
    with pytest.raises(Unavailable) as caught:
        take(server, other.digest, store, tries=4)
    assert caught.value.reason == Reason.SOURCE_UNREACHABLE
    assert server.script == []


def test_pauses_are_bounded(server: Server, store: BlobStore) -> None:
    wanted = server.artifact(weights=b"w")
    server.script = ["503"] * 7
    assert take(server, wanted.digest, store, tries=8)[1] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_nobody_listening_is_unavailable(store: BlobStore) -> None:
    gone = Server()
    gone.close()
    with pytest.raises(Unavailable):
        take(gone, digest_of(b""), store)


def test_of_several_addresses_one_that_does_not_answer_is_passed_over(
    server: Server, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = server.artifact(weights=BIG)
    monkeypatch.setattr(fetching, "CONNECT_S", 0.2)
    with contextlib.ExitStack() as sockets:
        silent = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # whoever comes when its queue is full gets no answer, as from a machine that is lost
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        here = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in (silent.getsockname(), here)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        manifest, pauses = take(server, wanted.digest, store, timeout_s=600.0)
    assert store.file(manifest, "weights").read_bytes() == BIG
    assert pauses == []


def test_a_digest_the_depot_does_not_hold_is_unknown_at_once(server: Server, store: BlobStore) -> None:
    with pytest.raises(UnknownDigest):
        take(server, digest_of(b"never"), store)
    assert len(server.seen) == 1


def test_content_with_another_hash_does_not_stay_and_the_depot_is_asked_to_verify_its_copy(
    server: Server, store: BlobStore
) -> None:
    wanted = server.artifact(weights=BIG)
    server.script = ["fine", "lie", "lie", "503"]
    assert take(server, wanted.digest, store)[0] == wanted
    assert server.mismatches == [False, False, True, True, True]
    check_blobs(store)


def test_a_depot_whose_copy_stays_damaged_is_unavailable_and_the_artifact_is_not_to_blame(
    server: Server, store: BlobStore
) -> None:
    wanted = server.artifact(weights=BIG)
    server.script = ["fine", *["lie"] * 6]
    with pytest.raises(Unavailable):
        take(server, wanted.digest, store)
    assert store.usage() == (0, 0)
    assert take(server, wanted.digest, store)[0] == wanted


def test_a_copy_that_ends_early_is_verified_too(server: Server, store: BlobStore) -> None:
    wanted = server.artifact(weights=BIG)
    server.script = ["fine", "short", "416"]
    assert take(server, wanted.digest, store)[0] == wanted
    assert server.mismatches == [False, False, False, True]


def test_a_blob_that_is_no_manifest_is_refused(server: Server, store: BlobStore) -> None:
    with refused(Reason.DIGEST_MISMATCH):
        take(server, server.put(b'{"not": "a manifest"}'), store)


def test_more_bytes_than_the_manifest_says_are_not_taken(server: Server, store: BlobStore) -> None:
    wanted = server.artifact(weights=BIG)
    server.script = ["fine", "more"]
    with refused(Reason.TOO_LARGE):
        take(server, wanted.digest, store)


def test_an_artifact_beyond_the_limit_is_refused_before_its_files(server: Server, store: BlobStore) -> None:
    wanted = server.artifact(weights=BIG)
    with refused(Reason.TOO_LARGE):
        take(server, wanted.digest, store, max_bytes=len(BIG) - 1)
    assert len(server.seen) == 1


def test_a_part_file_that_is_too_long_is_dropped(server: Server, store: BlobStore) -> None:
    wanted = server.artifact(weights=BIG)
    store.part(digest_of(BIG)).write_bytes(BIG + b"tail")
    assert store.file(take(server, wanted.digest, store)[0], "weights").read_bytes() == BIG


def test_a_stopped_fetch_keeps_what_it_has(server: Server, store: BlobStore) -> None:
    wanted = server.artifact(weights=BIG)
    with pytest.raises(Stopped):
        fetch(
            server.url,
            wanted.digest,
            store,
            stopping=lambda: len(server.seen) == 2,
            limits=FetchLimits(chunk_bytes=1000),
        )
    assert not store.has(wanted.digest)
    take(server, wanted.digest, store)
    assert store.holds(wanted.digest)


def test_two_threads_that_want_the_same_download_it_once(server: Server, store: BlobStore) -> None:
    wanted = server.artifact(weights=BIG)
    found: list[Manifest] = []
    threads = [threading.Thread(target=lambda: found.append(fetch(server.url, wanted.digest, store))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 4
    assert [path for path, _ in server.seen].count(f"/v1/blobs/{digest_of(BIG)}") == 1
    check_blobs(store)


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "127.0.0.1:80"])
def test_a_depot_that_is_no_url_is_named(url: str, store: BlobStore) -> None:
    with refused(Reason.BAD_URI):
        fetch(url, digest_of(b""), store)


def test_a_bad_digest_is_never_asked_for(server: Server, store: BlobStore) -> None:
    with pytest.raises(BadDigest):
        take(server, "sha256:../../secret", store)
    assert server.seen == []


def test_with_threads_files_are_compared_at_the_same_time(
    server: Server, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, real, both = server.artifact(one=b"1", two=b"2"), hashlib.file_digest, threading.Barrier(2)
    fetch(server.url, wanted.digest, store, threads=2)

    def together(*args: Any) -> Any:
        both.wait(PATIENCE_S)
        return real(*args)

    monkeypatch.setattr(hashlib, "file_digest", together)
    assert fetch(server.url, wanted.digest, store, threads=2) == wanted


# ---------------------------------------------------------------- what is here and damaged


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "cut short": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "grown": lambda data: data + b"\0",
}


def asked(server: Server, since: int) -> list[str]:
    return [path.rpartition("/")[2] for path, _ in server.seen[since:]]


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("which", ["manifest", "config", "weights"])
def test_a_damaged_copy_is_thrown_away_named_counted_and_downloaded_again(
    server: Server, store: BlobStore, caplog: pytest.LogCaptureFixture, which: str, how: str
) -> None:
    wanted = server.artifact(config=b'{"r": 8}', weights=BIG)
    take(server, wanted.digest, store)
    digest = wanted.digest if which == "manifest" else wanted.file(which).digest
    path, whole = store.path(digest), store.path(digest).read_bytes()
    path.write_bytes(DAMAGES[how](whole))
    before, damaged = len(server.seen), list[int]()
    with path.open("rb") as in_use, caplog.at_level(logging.ERROR):
        manifest = fetch(server.url, wanted.digest, store, on_damaged=lambda: damaged.append(1))
        assert in_use.read() == DAMAGES[how](whole), "it is replaced, not written to: somebody may have it mapped"
    assert manifest == wanted
    assert path.read_bytes() == whole
    assert asked(server, before) == [digest]
    (record,) = caplog.records
    fields = vars(record)["kv"]
    assert (fields["file"], fields["digest"], fields["artifact"]) == (which, digest, wanted.digest)
    assert "sha256:" in fields["difference"] or "bytes instead of" in fields["difference"]
    assert damaged == [1]
    fetch(server.url, wanted.digest, store, on_damaged=lambda: damaged.append(1))
    assert (asked(server, before), damaged) == ([digest], [1]), "once"
    assert store.holds(wanted.digest)
    check_blobs(store)


def test_a_damaged_copy_is_never_used_while_the_depot_is_away(server: Server, store: BlobStore) -> None:
    wanted = server.artifact(config=b"{}", weights=BIG)
    take(server, wanted.digest, store)
    path = store.path(wanted.file("weights").digest)
    path.write_bytes(DAMAGES["flipped"](BIG))
    damaged: list[int] = []
    for _ in range(2):
        server.script = ["503"] * 3
        with pytest.raises(Unavailable):
            fetch(
                server.url, wanted.digest, store, limits=FetchLimits(tries=3), pause=lambda _: None,
                on_damaged=lambda: damaged.append(1),
            )  # fmt: skip
        assert not path.exists()
        assert not store.has(wanted.digest), "a manifest says that all of it is here"
    assert damaged == [1]
    assert take(server, wanted.digest, store)[0] == wanted
    check_blobs(store)


def test_a_beginning_that_is_damaged_costs_a_download_from_the_start(server: Server, store: BlobStore) -> None:
    wanted = server.artifact(weights=BIG)
    store.part(digest_of(BIG)).write_bytes(b"?" + BIG[1 : len(BIG) // 2])
    manifest, pauses = take(server, wanted.digest, store)
    assert store.file(manifest, "weights").read_bytes() == BIG
    assert [wanted for _, wanted in server.seen[1:]] == [f"bytes={len(BIG) // 2}-", None]
    assert len(pauses) == 1


def test_a_file_that_is_whole_but_was_never_published_is_verified_too(server: Server, store: BlobStore) -> None:
    wanted = server.artifact(weights=BIG)
    store.part(digest_of(BIG)).write_bytes(DAMAGES["flipped"](BIG))
    take(server, wanted.digest, store)
    check_blobs(store)


def test_who_is_told_to_stop_verifies_no_further(server: Server, store: BlobStore) -> None:
    wanted = server.artifact(weights=BIG)
    take(server, wanted.digest, store)
    with pytest.raises(Stopped):
        fetch(server.url, wanted.digest, store, stopping=lambda: True)
    assert store.holds(wanted.digest)

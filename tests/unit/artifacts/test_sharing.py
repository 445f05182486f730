"""A blob folder that several processes share: one downloads, nobody removes what others use, a kill damages nothing."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter, namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.blobs import check_blobs
from tests.unit.artifacts.test_fetch import BIG, Server
from weft.artifacts.blobs import BlobStore
from weft.artifacts.digest import digest_of
from weft.artifacts.errors import Unavailable
from weft.artifacts.fetch import FetchLimits, Stopped, fetch

SEEDS = (0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6)))
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk: whatever nobody needs is removed."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100, 100, 0))


class Child:
    """A process that runs `sharing_child`."""

    def __init__(self, folder: Path, url: str, *digests: str, kill_at: int = 0) -> None:
        program = [sys.executable, "-m", "tests.unit.artifacts.sharing_child"]
        self.process = subprocess.Popen(
            [*program, str(folder), url, str(kill_at), *digests], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def done(self) -> int:
        """Wait until it has fetched everything. Returns how much it asked of the file system. -1: it was killed."""
        assert self.process.stdout
        line = self.process.stdout.readline().split()
        if line:
            return int(line[1])
        assert self.process.wait() == -signal.SIGKILL
        return -1

    def end(self, *, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        self.process.communicate()


def two_artifacts(server: Server) -> list[str]:
    return [server.artifact(config=b"{}", weights=BIG, other=bytes([n]) * 5000).digest for n in range(2)]


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Count what a process that nobody kills asks of the file system for `two_artifacts`."""
    server = Server()
    child = Child(tmp_path_factory.mktemp("measured"), server.url, *two_artifacts(server))
    count = child.done()
    child.end()
    server.close()
    return count


@pytest.mark.parametrize("seed", SEEDS)
def test_a_process_that_is_killed_at_any_moment_leaves_whole_files_and_no_lock(
    server: Server, tmp_path: Path, seed: int, events: int
) -> None:
    draw = random.Random(seed)
    wanted = two_artifacts(server)
    folder = tmp_path / "shared"
    for kill_at in sorted(draw.sample(range(1, events), 5)):
        killed = Child(folder, server.url, *wanted, kill_at=kill_at)
        assert killed.done() == -1 or killed.end() is None
        if folder.joinpath("sha256").exists():
            check_blobs(BlobStore(folder))
    server.seen.clear()
    last = Child(folder, server.url, *wanted)
    assert last.done() > 0
    for digest in wanted:
        assert BlobStore(folder).holds(digest)
    last.end()
    store = BlobStore(folder, shared=True)
    store.clean()
    assert not list(folder.joinpath("partial").iterdir()), "what the dead were writing is gone"
    assert len(list(folder.joinpath("users").iterdir())) == 1, "the dead are forgotten"


def test_of_several_processes_one_downloads_each_file(server: Server, tmp_path: Path) -> None:
    """A manifest is not visible before its files are whole: until then each process reads it."""
    wanted = [server.artifact(weights=BIG, other=bytes([n]) * 5000).digest for n in range(3)]
    children = [Child(tmp_path, server.url, *wanted) for _ in range(4)]
    assert all(child.done() > 0 for child in children)
    for child in children:
        child.end()
    seen = Counter(path.rpartition("/")[2] for path, _ in server.seen)
    assert max(seen[digest] for digest in wanted) <= len(children)
    assert {count for digest, count in seen.items() if digest not in wanted} == {1}
    check_blobs(BlobStore(tmp_path))


def test_what_another_process_needs_stays_while_it_lives(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(monkeypatch)
    ours, theirs = (server.artifact(weights=BIG, other=bytes([n]) * 5000).digest for n in range(2))
    child = Child(tmp_path, server.url, theirs)
    assert child.done() > 0
    store = BlobStore(tmp_path, shared=True)
    fetch(server.url, ours, store)
    assert store.retain([ours]) == 0, "both have the weights, and the child the rest"
    assert store.holds(theirs)
    child.end(kill=True)
    assert store.retain([ours]) == 2, "its manifest and its own file"
    assert store.holds(ours)
    assert not store.has(theirs)


def test_what_nobody_needs_stays_until_the_disk_is_short_and_the_least_used_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore(tmp_path, shared=True)
    old, new = store.put(b"old"), store.put(b"new")
    os.utime(store.path(old), (1, 1))
    free = [20, 10, 20]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100, 0, free.pop(0)))
    assert store.retain([]) == 0
    assert store.has(old)
    assert store.retain([]) == 1
    assert (store.has(old), store.has(new)) == (False, True)


def test_a_lease_of_another_store_holds_from_its_naming_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(monkeypatch)
    one, other = BlobStore(tmp_path, shared=True), BlobStore(tmp_path, shared=True)
    with one.lease() as lease:
        lease.name(digest_of(b"x"))
        one.put(b"x")
        assert other.retain([]) == 0
    assert other.retain([]) == 1


def test_a_download_that_another_process_holds_is_waited_for_within_a_bound(server: Server, tmp_path: Path) -> None:
    digest = server.artifact(weights=BIG).digest
    one, other = BlobStore(tmp_path, shared=True), BlobStore(tmp_path, shared=True)
    pauses: list[float] = []
    limits = FetchLimits(pause_s=1.0, stalled_s=3.0)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            one.part(digest).write_bytes(b"more")  # bytes come: the wait begins again

    with one.download(digest), pytest.raises(Unavailable, match="another process has held it for 3 s"):
        fetch(server.url, digest, other, limits=limits, pause=pause)
    assert len(pauses) == 2 + 3
    with one.download(digest), pytest.raises(Stopped):
        fetch(server.url, digest, other, limits=limits, pause=pauses.append, stopping=lambda: True)


def test_who_waited_takes_what_the_other_brought(server: Server, tmp_path: Path) -> None:
    wanted = server.artifact(weights=BIG)
    one, other = BlobStore(tmp_path, shared=True), BlobStore(tmp_path, shared=True)
    holding, waiting, brought = threading.Event(), threading.Event(), threading.Event()

    def bring() -> None:
        with one.lease() as lease:
            lease.name(wanted.digest)
            with one.download(wanted.digest):
                holding.set()
                waiting.wait()
            fetch(server.url, wanted.digest, one)
        brought.set()

    thread = threading.Thread(target=bring)
    thread.start()
    holding.wait()

    def pause(seconds: float) -> None:
        waiting.set()
        brought.wait(seconds)

    assert fetch(server.url, wanted.digest, other, pause=pause) == wanted
    thread.join()
    seen = Counter(path.rpartition("/")[2] for path, _ in server.seen)
    assert {count for digest, count in seen.items() if digest != wanted.digest} == {1}

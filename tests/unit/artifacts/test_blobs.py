"""The blob folder: whole or not there, kept or gone, whoever crashes."""

import contextlib
import hashlib
import io
import mmap
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.blobs import check_blobs
from tests.unit.artifacts.making import refused
from weft.artifacts.blobs import BlobStore
from weft.artifacts.digest import FileEntry, Manifest, build_manifest, digest_of, hex_of
from weft.artifacts.errors import BadDigest, Damaged, Reason, UnknownDigest


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def put_artifact(store: BlobStore, *contents: bytes) -> Manifest:
    files = [FileEntry(f"f{n}", hex_of(store.put(data)), len(data)) for n, data in enumerate(contents)]
    manifest = build_manifest("adapter", files)
    store.put(manifest.to_bytes())
    return manifest


def test_what_is_put_is_found_by_its_digest(store: BlobStore) -> None:
    digest = store.put(b"warp")
    assert digest == digest_of(b"warp")
    assert store.read(digest, max_bytes=4) == b"warp"
    assert store.path(digest).name == hex_of(digest)
    assert store.put(b"warp") == digest
    assert store.usage() == (1, 4)
    check_blobs(store)


def test_blobs_that_go_while_they_are_counted_do_not_count(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (b"a", b"bb", b"ccc"):
        store.put(data)
    gone, real = store.path(digest_of(b"bb")), os.scandir

    def listed(folder: Path) -> list[os.DirEntry[str]]:
        entries = list(real(folder))
        gone.unlink()
        return entries

    monkeypatch.setattr(os, "scandir", listed)
    assert store.usage() == (2, 4)


def test_a_missing_blob_and_a_bad_digest_have_their_own_errors(store: BlobStore) -> None:
    with pytest.raises(UnknownDigest):
        store.open(digest_of(b"nothing"))
    for bad in ("sha256:../../etc/passwd", "", "x" * 71):
        with pytest.raises(BadDigest):
            store.has(bad)


def test_a_blob_beyond_the_bound_is_not_read(store: BlobStore) -> None:
    with refused(Reason.TOO_LARGE):
        store.read(store.put(b"12345"), max_bytes=4)


def test_nothing_is_visible_before_commit_and_nothing_stays_without(store: BlobStore, tmp_path: Path) -> None:
    with store.writer() as writer:
        writer.write(b"we")
        writer.write(b"ft")
        digest = writer.finish()
        assert not store.has(digest)
        assert writer.path.read_bytes() == b"weft"
    assert store.usage() == (0, 0)
    assert list((tmp_path / "blobs" / "partial").iterdir()) == []


def test_what_a_killed_process_left_is_removed_at_start_and_downloads_stay(store: BlobStore, tmp_path: Path) -> None:
    writer = store.writer()
    writer.write(b"half")
    part = store.part(digest_of(b"later"))
    part.write_bytes(b"la")
    again = BlobStore(tmp_path / "blobs")
    assert again.clean() == 1
    assert again.usage() == (0, 0)
    assert part.read_bytes() == b"la"
    with writer:
        pass


def test_an_artifact_is_held_when_every_file_is_there(store: BlobStore) -> None:
    manifest = put_artifact(store, b"a", b"b")
    assert store.holds(manifest.digest)
    assert store.file(manifest, "f1").read_bytes() == b"b"
    with refused(Reason.MISSING_FILE):
        store.file(manifest, "f2")
    store.path(digest_of(b"b")).unlink()
    assert not store.holds(manifest.digest)
    with pytest.raises(UnknownDigest):
        store.file(manifest, "f1")


@st.composite
def rotten(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Some bytes, and what a disk may make of them."""
    content = draw(st.binary(min_size=1, max_size=3000))
    at = draw(st.integers(0, len(content) - 1))
    match draw(st.sampled_from(["flipped", "cut short", "grown"])):
        case "flipped":
            return content, content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1 :]
        case "cut short":
            return content, content[:at]
        case _:
            return content, content + draw(st.binary(min_size=1, max_size=300))


@given(pair=rotten())
def test_any_byte_that_flips_and_any_other_length_is_found(
    tmp_path_factory: pytest.TempPathFactory, pair: tuple[bytes, bytes]
) -> None:
    (content, found), store = pair, BlobStore(tmp_path_factory.mktemp("rotten"))
    digest = store.put(content)
    store.verify(digest, len(content))
    before = store.path(digest).stat()
    store.path(digest).write_bytes(found)
    os.utime(store.path(digest), ns=(before.st_atime_ns, before.st_mtime_ns))
    for look in (
        lambda: store.verify(digest),
        lambda: store.verify(digest, len(content)),
        lambda: store.read(digest, max_bytes=len(content)),
        lambda: store.manifest(digest),
    ):
        with pytest.raises(Damaged, match=r"its content is sha256:|bytes instead of") as caught:
            look()
        assert (caught.value.digest, caught.value.reason) == (digest, Reason.DIGEST_MISMATCH)
    with pytest.raises(AssertionError):
        check_blobs(store)
    store.put(content)
    store.verify(digest, len(content))
    assert store.read(digest, max_bytes=len(content)) == content


def test_of_two_threads_that_verify_one_works_at_a_time(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    digests, real, both = [store.put(data) for data in (b"a", b"b")], hashlib.file_digest, threading.Barrier(2)

    def met(file: io.BufferedReader, name: str) -> object:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.1)  # broken where the other one is kept out
            raise AssertionError("both are at work")
        return real(file, name)

    monkeypatch.setattr(hashlib, "file_digest", met)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(store.verify, digests)) == [None, None]


def test_a_blob_that_is_thrown_away_stays_whole_for_who_has_mapped_it(store: BlobStore) -> None:
    digest = store.put(CONTENT)
    with store.open(digest) as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        store.discard(digest)
        store.discard(digest)
        assert mapped[:] == CONTENT
    with pytest.raises(UnknownDigest):
        store.verify(digest)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="what stands for a bad sector is Linux's")
def test_a_blob_that_the_disk_cannot_read_back_is_damaged(store: BlobStore) -> None:
    digest = digest_of(CONTENT)
    store.path(digest).symlink_to("/proc/self/mem")  # its first byte is an input/output error
    for look in (lambda: store.verify(digest), lambda: store.read(digest, max_bytes=10)):
        with pytest.raises(Damaged, match="cannot be read: Input/output error"):
            look()
    assert store.put(CONTENT) == digest
    store.verify(digest, len(CONTENT))


def test_retain_keeps_the_listed_with_their_files_and_removes_the_rest(store: BlobStore) -> None:
    kept, gone = put_artifact(store, b"shared", b"kept"), put_artifact(store, b"shared", b"gone")
    part = store.part(digest_of(b"unfinished"))
    part.write_bytes(b"un")
    assert store.retain([kept.digest, digest_of(b"not here yet")]) == 3  # gone's manifest, its file, the download
    assert store.holds(kept.digest)
    assert not store.has(gone.digest)
    assert not part.exists()
    assert store.retain([kept.digest]) == 0


def test_a_leased_blob_outlives_retain_until_the_lease_closes(store: BlobStore) -> None:
    manifest = put_artifact(store, b"leased")
    lease = store.lease()
    lease.name(manifest.digest)
    lease.name(digest_of(b"leased"), digest_of(b"leased"))
    with store.lease() as other:
        other.name(manifest.digest)
    assert store.retain([]) == 0
    lease.close()
    assert store.retain([]) == 2


def test_the_end_of_a_lease_costs_what_it_named(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watching(Counter[str]):
        def items(self) -> Any:
            raise AssertionError("every lease was looked at")

    monkeypatch.setattr(store, "_leased", Watching())
    first, second = store.lease(), store.lease()
    digest = store.put(b"x")
    first.name(digest)
    second.name(digest)
    first.close()
    assert store.retain([]) == 0
    second.close()
    assert store.retain([]) == 1


def test_many_threads_put_the_same_and_different_blobs_and_retain_never_breaks_a_leased_one(store: BlobStore) -> None:
    errors: list[Exception] = []
    done = threading.Event()

    def put(number: int) -> None:
        try:
            for turn in range(30):
                data = f"{turn % 3}-{number % 2}".encode()
                with store.lease() as lease:
                    lease.name(digest_of(data))
                    assert store.read(store.put(data), max_bytes=10) == data
        except Exception as error:  # noqa: BLE001 (told to the test)
            errors.append(error)

    def sweep() -> None:
        while not done.is_set():
            store.retain([])

    sweeper = threading.Thread(target=sweep)
    threads = [threading.Thread(target=put, args=(number,)) for number in range(4)]
    for thread in (sweeper, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    sweeper.join()
    assert not errors
    check_blobs(store)


@given(
    artifacts=st.lists(st.lists(st.binary(max_size=4), min_size=1, max_size=3), max_size=5),
    kept=st.sets(st.integers(0, 4)),
    leased=st.sets(st.integers(0, 4)),
)
def test_after_retain_exactly_the_union_of_kept_and_leased_is_there(
    tmp_path_factory: pytest.TempPathFactory, artifacts: list[list[bytes]], kept: set[int], leased: set[int]
) -> None:
    store = BlobStore(tmp_path_factory.mktemp("blobs"))
    manifests = [put_artifact(store, *contents) for contents in artifacts]
    keep = [m for n, m in enumerate(manifests) if n in kept]
    hold = [m for n, m in enumerate(manifests) if n in leased]
    with store.lease() as lease:
        for manifest in hold:
            lease.name(manifest.digest, *(entry.digest for entry in manifest.files))
        store.retain([m.digest for m in keep])
    wanted = {hex_of(m.digest) for m in keep + hold} | {e.sha256 for m in keep + hold for e in m.files}
    assert {path.name for path in store.path(digest_of(b"")).parent.iterdir()} == wanted
    check_blobs(store)


def test_blobs_are_on_disk_before_they_are_visible(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())), real(fd)))
    digest = store.put(b"durable")
    assert "partial/tmp-" in synced[0], "the content first"
    assert synced[1] == str(store.path(digest).parent), "then the folder that names it"


def test_several_blobs_are_visible_with_one_sync_of_their_folder(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())))
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(store.writer()) for _ in range(3)]
        for number, writer in enumerate(writers):
            writer.write(bytes([number]))
        store.publish(*((writer.path, writer.finish()) for writer in writers))
    assert all(store.has(digest_of(bytes([number]))) for number in range(3))
    assert ["partial/tmp-" in path for path in synced] == [True, True, True, False]


def test_blobs_are_counted_when_some_have_come_or_gone(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    scans: list[Any] = []
    real = os.scandir

    def counting(path: Any) -> Any:
        scans.append(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", counting)
    first, second = store.put(b"one"), store.put(b"three")
    assert [store.usage() for _ in range(3)] == [(2, 8)] * 3
    assert len(scans) == 1
    store.discard(first)
    assert [store.usage() for _ in range(3)] == [(1, 5)] * 3
    store.retain([])
    assert not store.has(second)
    assert [store.usage() for _ in range(3)] == [(0, 0)] * 3
    store.put(b"x")
    assert store.usage() == (1, 1)
    assert len([path for path in scans if str(path).endswith("sha256")]) <= 5  # `retain` lists them, too


CONTENT = bytes(range(256)) * 40
DIGEST = digest_of(CONTENT)


def test_a_promised_blob_that_is_broken_off_is_gone_on_with(tmp_path: Path) -> None:
    with contextlib.suppress(RuntimeError), BlobStore(tmp_path).writer(DIGEST) as writer:
        writer.write(CONTENT[:1000])
        raise RuntimeError
    again = BlobStore(tmp_path)
    assert again.clean() == 0
    with again.writer(DIGEST) as writer:
        assert (writer.size_bytes, writer.resumed_bytes) == (1000, 1000)
        assert not again.has(DIGEST)
        writer.write(CONTENT[1000:])
        assert writer.commit() == DIGEST
    assert again.read(DIGEST, max_bytes=1 << 20) == CONTENT
    assert list((tmp_path / "partial").iterdir()) == []
    check_blobs(again)


def test_what_is_left_can_be_forgotten_and_what_is_whole_but_wrong_is(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    store.part(DIGEST).write_bytes(b"another")
    with store.writer(DIGEST) as writer:
        writer.restart()
        writer.write(CONTENT)
        assert writer.finish() == DIGEST
    assert list((tmp_path / "partial").iterdir()) == [], "whole, and not wanted"
    assert not store.has(DIGEST)


def test_a_full_disk_keeps_no_beginnings(tmp_path: Path) -> None:
    with contextlib.suppress(OSError), BlobStore(tmp_path).writer(DIGEST) as writer:
        writer.write(CONTENT[:1000])
        raise OSError(28, "No space left on device")
    assert list((tmp_path / "partial").iterdir()) == []


def test_a_second_writer_of_a_promised_blob_has_a_file_of_its_own(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    with store.writer(DIGEST) as first, store.writer(DIGEST) as second:
        first.write(CONTENT[:10])
        assert second.path != first.path
        second.write(CONTENT)
        second.commit()
        first.write(CONTENT[10:])
        first.commit()
    with store.writer(DIGEST) as third:
        assert third.path == store.part(DIGEST), "nobody is at it any more"
    check_blobs(store)

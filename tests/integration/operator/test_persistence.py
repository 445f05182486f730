"""objects.json: whole after any crash, never silently thrown away."""

import asyncio
import json
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from harness.processes import started
from harness.waiting import PATIENCE_S, eventually
from tests.unit.operator.planning import adapter_object, adapter_ref, check_store, pool_object
from weft.api.conversion import GONE, with_defaults
from weft_operator.core import parse
from weft_operator.errors import StoreDamaged
from weft_operator.local import Durable, ObjectStore, open_store, persistence, ref_of

WRITER = """
import asyncio, os, sys
from pathlib import Path
from weft_operator.local import Durable, open_store

async def main(path):
    store = open_store(path, lambda: 1e9)
    keeper = Durable(store, path)
    writing = asyncio.create_task(keeper.run())
    for number in range(100_000):
        name = f"a{number % 50}"
        spec = {"number": number, "life": os.getpid(), "padding": "x" * 500}
        meta = {"name": name, "namespace": "n"}
        store.apply({"apiVersion": "v", "kind": "LoRAAdapter", "metadata": meta, "spec": spec})
        await keeper.committed()
        print(number, store.version, flush=True)

asyncio.run(main(Path(sys.argv[1])))
"""


def clock() -> float:
    return 1_700_000_000.0


@asynccontextmanager
async def kept(path: Path) -> AsyncIterator[tuple[ObjectStore, Durable]]:
    store = open_store(path, clock)
    keeper = Durable(store, path)
    writing = asyncio.create_task(keeper.run())
    try:
        yield store, keeper
    finally:
        writing.cancel()


async def test_what_was_committed_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "objects.json"
    async with kept(path) as (store, keeper):
        store.apply(adapter_object("upper"))
        await keeper.committed()
    again = open_store(path, clock)
    assert again.objects() == store.objects()
    assert again.version > store.version
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each write of the file."""
    sizes: list[int] = []
    real = persistence.write_atomically

    def counting(path: Path, content: bytes) -> None:
        sizes.append(len(content))
        real(path, content)

    monkeypatch.setattr(persistence, "write_atomically", counting)
    return sizes


async def test_many_changes_of_one_moment_are_one_write(tmp_path: Path, writes: list[int]) -> None:
    async with kept(tmp_path / "objects.json") as (store, keeper):
        waits = []
        for number in range(200):
            store.apply(adapter_object(f"a{number}"))
            waits.append(keeper.committed())
        await asyncio.gather(*waits)
    assert len(writes) <= 2


async def test_statuses_wait_for_each_other(tmp_path: Path, writes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistence, "GATHER_S", 3600.0)
    path = tmp_path / "objects.json"
    async with kept(path) as (store, keeper):
        for number in range(100):
            _, obj = store.apply(adapter_object(f"a{number}"))
            meta = obj["metadata"]
            store.set_status(ref_of(obj), meta["uid"], meta["resourceVersion"], {"unavailableRunners": number})
            await asyncio.sleep(0)
        assert writes == []
        await keeper.committed()
    assert len(writes) == 1
    assert open_store(path, clock).objects() == store.objects()


async def test_a_status_is_written_soon(tmp_path: Path, writes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistence, "GATHER_S", 0.0)
    async with kept(tmp_path / "objects.json") as (store, _):
        store.apply(adapter_object("upper"))

        async def written() -> bool:
            return bool(writes)

        await eventually(written)


async def test_a_write_encodes_only_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    real = persistence.encode

    def counting(obj: Any) -> bytes:
        encoded.append(obj["metadata"]["name"])
        return real(obj)

    path = tmp_path / "objects.json"
    async with kept(path) as (store, keeper):
        for number in range(100):
            store.apply(adapter_object(f"a{number}"))
        await keeper.committed()
        monkeypatch.setattr(persistence, "encode", counting)
        store.apply(adapter_object("a7", pinned=True))
        store.delete(adapter_ref("a8"))
        await keeper.committed()
    assert encoded == ["a7"]
    assert open_store(path, clock).objects() == store.objects()


async def test_a_disk_that_refuses_is_told_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = True
    real = persistence.write_atomically

    def refusing(path: Path, content: bytes) -> None:
        if refuse:
            raise OSError(28, "No space left on device")
        real(path, content)

    monkeypatch.setattr(persistence, "write_atomically", refusing)
    monkeypatch.setattr(persistence, "RETRY_S", 0.0)
    path = tmp_path / "objects.json"
    async with kept(path) as (store, keeper):
        store.apply(adapter_object("upper"))
        with pytest.raises(OSError, match="No space"):
            await keeper.committed()
        refuse = False
        await keeper.committed()
    assert [o["metadata"]["name"] for o in open_store(path, clock).objects()] == ["upper"]


def test_flush_writes_what_is_not_written_yet(tmp_path: Path) -> None:
    path = tmp_path / "objects.json"

    async def short_life() -> None:
        store = open_store(path, clock)
        keeper = Durable(store, path)
        store.apply(adapter_object("upper"))
        keeper.flush()

    asyncio.run(short_life())
    assert open_store(path, clock).find(adapter_ref("upper"))


class WatchedLock:
    """Says that somebody has to wait for it."""

    def __init__(self) -> None:
        self._lock, self.awaited = threading.Lock(), threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.awaited.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


async def test_a_flush_waits_for_a_write_and_the_newest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, lock, real = threading.Event(), WatchedLock(), persistence.write_atomically
    writing: list[int] = []

    def slow(path: Path, content: bytes) -> None:
        writing.append(1)
        assert len(writing) == 1, "a file has one writer at a time"
        begun.set()
        assert lock.awaited.wait(PATIENCE_S), "the other one comes now"
        real(path, content)
        writing.pop()

    monkeypatch.setattr(persistence, "write_atomically", slow)
    monkeypatch.setattr(persistence, "GATHER_S", 0.0)
    path = tmp_path / "objects.json"
    async with kept(path) as (store, keeper):
        monkeypatch.setattr(keeper, "_writing", lock)
        store.apply(adapter_object("first"))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        store.apply(adapter_object("second"))
        keeper.flush()
    assert {o["metadata"]["name"] for o in open_store(path, clock).objects()} == {"first", "second"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is damaged"),
        (b"[]", "is damaged"),
        (b'{"format": 1, "version": 3}', "is damaged"),
        (b'{"format": 2, "version": 3, "objects": []}', "update weft"),
    ],
)
def test_a_file_that_cannot_be_read_stops_the_start_and_stays(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "objects.json"
    path.write_bytes(content)
    with pytest.raises(StoreDamaged, match=says):
        open_store(path, clock)
    assert path.read_bytes() == content


async def test_what_an_older_version_wrote_has_the_fields_of_this_one(tmp_path: Path) -> None:
    path = tmp_path / "objects.json"
    async with kept(path) as (store, keeper):
        pool = pool_object()
        del pool["spec"]["parallelism"]
        older = deepcopy(pool)
        others = ("autoscaling.", "canary.", "chatTemplate.", "source.")  # this pool has no such part
        for *within, name in [path.split(".") for path in GONE if not path.startswith(others)]:
            reduce(lambda fields, part: fields.setdefault(part, {}), within, older["spec"])[name] = 1
        _, written = store.apply(older)
        await keeper.committed()
    (read,) = open_store(path, clock, with_defaults).objects()
    assert read["metadata"] == written["metadata"]
    assert read["spec"]["parallelism"] == {"tensor": 1, "pipeline": 1, "podsPerRunner": 1}
    assert (read["spec"]["advanced"], read["spec"]["memory"]) == (pool["spec"]["advanced"], {})
    assert parse(read)


async def test_what_this_version_takes_no_more_is_named_by_its_field(tmp_path: Path) -> None:
    path = tmp_path / "objects.json"
    async with kept(path) as (store, keeper):
        store.apply(pool_object(drainSeconds=0))
        await keeper.committed()
    with pytest.raises(StoreDamaged, match=r"spec\.drainSeconds.*repair it"):
        open_store(path, clock, with_defaults)


def test_kill_9_while_writing_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "objects.json"
    for writes in (7, 1, 40):  # a life begins where the one before was killed
        with started(sys.executable, "-c", WRITER, path, stdout=subprocess.PIPE, text=True) as child:
            lines = [child.stdout.readline().split() for _ in range(writes)]
            child.kill()
            rest = [line.split() for line in child.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        number, version = map(int, [*lines, *rest][-1])
        store = open_store(path, clock)
        check_store(store)
        assert store.version > version
        assert json.loads(path.read_text())["format"] == 1
        last = store.get(adapter_ref(f"a{number % 50}", "n"))["spec"]
        assert last["life"] == child.pid
        assert last["number"] >= number

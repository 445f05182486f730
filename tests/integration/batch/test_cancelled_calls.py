"""Calls whose client goes away in the middle: what they did is done whole, and no file is left that no row names."""

import asyncio
import random
import threading
import time

import pytest
from sqlalchemy import event

from harness.waiting import eventually, soon
from tests.integration.batch.conftest import ENDPOINT, input_file, serving
from weft.domain.batch import BatchStatus, NewBatch, NewFile, Purpose
from weft_batch.storage import FolderStorage, FolderWriter

NEW = NewFile("a", "in.jsonl", Purpose.BATCH)
CHUNKS = (b"x" * 1000, b"y" * 1000, b"")


def cancel_at_commit(world, call) -> asyncio.Task:
    """The call, cancelled while its transaction is committed."""
    task = asyncio.create_task(call)
    event.listen(world.engine.sync_engine, "commit", lambda _: task.cancel(), once=True)
    return task


async def parts():
    for chunk in CHUNKS:
        yield chunk


async def test_a_batch_that_is_created_runs_though_its_client_is_gone(world) -> None:
    client = world.client()
    file = await client.upload(input_file(3))
    creating = cancel_at_commit(world, world.server.create(NewBatch("a", file.file_id, ENDPOINT)))
    with pytest.raises(asyncio.CancelledError):
        await soon(creating)
    [batch_id] = world.server._open
    async with world.gateway():
        assert (await client.ended(batch_id)).completed == 3


async def test_a_batch_that_is_cancelled_ends_though_its_client_is_gone(world) -> None:
    client = world.client()
    async with world.gateway(max_lines=1, answers=lambda _: None) as gateway:
        job = await client.submit(input_file(3))
        await gateway.until(lambda it: it.kept)
        cancelling = cancel_at_commit(world, world.server.cancel("a", job.batch_id))
        with pytest.raises(asyncio.CancelledError):
            await soon(cancelling)
        assert (await client.ended(job.batch_id)).status is BatchStatus.CANCELLED


class HeldStorage(FolderStorage):
    """A thread that writes waits before it does anything."""

    def __init__(self, folder) -> None:
        super().__init__(folder)
        self.loop = asyncio.get_running_loop()
        self.begun, self.go_on, self.done = asyncio.Event(), threading.Event(), threading.Event()

    def writer(self, name: str) -> "HeldWriter":
        return HeldWriter(self, name)


class HeldWriter(FolderWriter):
    def __init__(self, storage: HeldStorage, name: str) -> None:
        super().__init__(storage._folder / name)
        self.storage = storage

    def write(self, chunk: bytes) -> None:
        self.storage.loop.call_soon_threadsafe(self.storage.begun.set)
        self.storage.go_on.wait()
        super().write(chunk)
        self.storage.done.set()


async def test_an_upload_is_removed_when_its_thread_has_ended(store, tmp_path) -> None:
    storage = HeldStorage(tmp_path / "files")
    async with serving(store, storage) as world:
        uploading = asyncio.create_task(world.server.files.upload(NEW, parts()))
        await soon(storage.begun.wait())
        uploading.cancel()
        await asyncio.wait((uploading,), timeout=0.05)
        await eventually(lambda: asyncio.sleep(0, not world.server._tasks))  # a removal that comes too early is over
        storage.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await soon(uploading)
        await asyncio.to_thread(storage.done.wait)
        await world.nothing_left()


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.long)])
async def test_uploads_cancelled_at_any_instant_leave_nothing(world, count) -> None:
    begun = time.monotonic()
    file = await world.server.files.upload(NEW, parts())
    usual_s, draw = time.monotonic() - begun, random.Random(count)
    await world.server.files.delete("a", file.file_id)
    for number in range(1, count + 1):
        uploading = asyncio.create_task(world.server.files.upload(NEW, parts()))
        await asyncio.wait((uploading,), timeout=draw.uniform(0, usual_s))
        uploading.cancel()
        await asyncio.wait((uploading,))
        if number == count or number % 500 == 0:
            for whole in await world.client().files():  # their last transaction had begun
                await world.client().delete(whole.file_id)
    await world.nothing_left()


async def test_many_uploads_that_break_off_cost_few_transactions(world) -> None:
    async def endless():
        yield b"x"
        writing.append(asyncio.current_task())
        await asyncio.Event().wait()

    count, writing, changes = 40, [], []

    def note_change(_connection, _cursor, statement: str, *_) -> None:
        if statement.startswith(("UPDATE", "DELETE")):  # others are the service's own, every second
            changes.append(statement)

    uploads = [asyncio.create_task(world.server.files.upload(NEW, endless())) for _ in range(count)]
    await eventually(lambda: asyncio.sleep(0, len(writing) == count))
    event.listen(world.engine.sync_engine, "before_cursor_execute", note_change)
    for upload in uploads:
        upload.cancel()
    await asyncio.wait(uploads)
    await eventually(lambda: asyncio.sleep(0, not world.server._tasks))
    assert 2 <= len(changes) < count / 2, "two for each that broke off would keep others waiting"
    await world.nothing_left()

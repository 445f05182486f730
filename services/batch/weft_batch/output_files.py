"""A batch's output and error file, written by streaming from the store: memory holds a page of results.

They become visible together with the batch's end, in one transaction. A failed or killed try leaves rows of files in
state "writing", for the later deletion of their bytes.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy.ext.asyncio import AsyncEngine

from weft.domain.batch import MAX_BODY_BYTES, BatchJob, BatchStatus, NewFile, Purpose
from weft.store import batches, files
from weft.tasks import run_to_end
from weft.turnstile import Turnstile
from weft_batch.core.batches import LineFailed
from weft_batch.core.input_lines import LineSplitter, read_line
from weft_batch.errors import BytesMissing
from weft_batch.inputs import blocks, parse_piece
from weft_batch.results import EXPIRED, failure_record
from weft_batch.storage import FileStorage, FileWriter
from weft_batch.tenant_files import draw_file_id, now_unix_ms

WRITE_BYTES = 1 << 20


@dataclass(slots=True)
class _File:
    file_id: str
    writer: FileWriter
    size: int = 0
    lines: int = 0
    buffer: list[bytes] = field(default_factory=list[bytes])
    buffered: int = 0


class OutputFiles:
    """The two files of a batch. Each is created with its first line."""

    def __init__(
        self, engine: AsyncEngine, term: int, storage: FileStorage, pieces: Turnstile, namespace: str, batch: BatchJob,
        ending: BatchStatus,
    ) -> None:  # fmt: skip
        self._engine, self._term, self._storage, self._pieces = engine, term, storage, pieces
        self._namespace, self._batch, self._ending = namespace, batch, ending
        self._files: dict[bool, _File] = {}  # by success of the lines

    async def write(self) -> None:
        """Write both files, end the batch, delete its results. Raises StoreError, StorageError: try again from the
        start."""
        try:
            async for succeeded, record in self._records():
                await self._add(succeeded, record)
            for file in self._files.values():
                await self._flush(file)
                await run_to_end(asyncio.to_thread(file.writer.close))
            output, errors = self._files.get(True), self._files.get(False)
            await batches.finish(
                self._engine, self._term, self._batch.batch_id, self._ending, now_unix_ms=now_unix_ms(),
                output=(output.file_id, output.size) if output else None,
                errors=(errors.file_id, errors.size) if errors else None, failed=errors.lines if errors else 0,
            )  # fmt: skip
        except BaseException:
            for file in self._files.values():
                await asyncio.to_thread(file.writer.abandon)
            with contextlib.suppress(Exception):  # the sweep also removes them
                await files.mark_abandoned(self._engine, [file.file_id for file in self._files.values()])
            raise
        await batches.drop_results(self._engine, self._batch.batch_id)

    async def _records(self) -> AsyncIterator[tuple[bool, bytes]]:
        """Yield in the lines' order: results, and for an expired batch also lines without a result."""
        stored = batches.results(self._engine, self._batch.batch_id)
        if self._ending is not BatchStatus.EXPIRED:
            async for _, succeeded, record in stored:
                yield succeeded, record
            return
        result = await anext(stored, None)
        async with contextlib.aclosing(self._input_lines()) as lines:
            async for line, custom_id in lines:
                if result is not None and result[0] == line:
                    yield result[1], result[2]
                    result = await anext(stored, None)
                else:
                    failed = LineFailed(self._batch.batch_id, line, *EXPIRED)
                    yield False, failure_record(failed, custom_id).record
        while result is not None:  # the bytes of the input are missing
            yield result[1], result[2]
            result = await anext(stored, None)

    async def _input_lines(self) -> AsyncGenerator[tuple[int, str | None]]:
        """Yield the number and custom_id of every line."""

        def read(lines: Iterable[tuple[int, bytes]]) -> list[tuple[int, str | None]]:
            return [(line, read_line(raw, self._batch.endpoint, MAX_BODY_BYTES).custom_id) for line, raw in lines]

        splitter = LineSplitter(MAX_BODY_BYTES)
        with contextlib.suppress(BytesMissing):
            async for block in blocks(self._storage, self._batch.input_file_id):
                for line in await parse_piece(self._pieces, self._namespace, partial(read, splitter.feed(block))):
                    yield line
            for line in read(splitter.finish()):
                yield line

    async def _add(self, succeeded: bool, record: bytes) -> None:
        if (file := self._files.get(succeeded)) is None:
            file_id = draw_file_id()
            file = self._files[succeeded] = _File(file_id, self._storage.writer(file_id))
            await self._begin(file_id, "output" if succeeded else "error")
        file.buffer += (record, b"\n")
        file.buffered += len(record) + 1
        file.lines += 1
        if file.buffered >= WRITE_BYTES:
            await self._flush(file)

    async def _begin(self, file_id: str, suffix: str) -> None:
        new = NewFile(self._namespace, f"{self._batch.batch_id}_{suffix}.jsonl", Purpose.BATCH_OUTPUT)
        await files.begin(self._engine, self._term, new, file_id, now_unix_ms=now_unix_ms(), max_files=0)

    async def _flush(self, file: _File) -> None:
        if file.buffered:
            await run_to_end(asyncio.to_thread(file.writer.write, b"".join(file.buffer)))
        file.size += file.buffered
        file.buffer, file.buffered = [], 0

"""Input files as lines: read from storage in blocks, in threads, with a cache of a few blocks."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeVar

from weft.domain.batch import MAX_BODY_BYTES
from weft.turnstile import Turnstile
from weft_batch.core.input_lines import LineIndex, LineSplitter
from weft_batch.storage import FileStorage

READ_BYTES = 1 << 20
MAX_REST_S = 0.5
KEPT_BLOCKS = 64  # of 256 KiB, or a longer line
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InputFile:
    """A validated input file."""

    file_id: str
    index: LineIndex


class InputLines:
    """The lines of input files by number. Neighbours come from a single read."""

    def __init__(self, storage: FileStorage) -> None:
        self._storage = storage
        self._blocks: OrderedDict[tuple[str, int], asyncio.Task[dict[int, bytes]]] = OrderedDict()

    async def block(self, file: InputFile, line: int) -> dict[int, bytes]:
        """Return a line and its neighbours by their numbers, without line ends. Raises StorageError."""
        first, start, end = file.index.block(line)
        key = (file.file_id, start)
        if (read := self._blocks.get(key)) is None:
            work = asyncio.to_thread(self._read, file.file_id, first, start, end)
            read = self._blocks[key] = asyncio.create_task(work)
            if len(self._blocks) > KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(key)
        try:
            return await asyncio.shield(read)
        except BaseException:
            self._blocks.pop(key, None)
            raise

    def _read(self, file_id: str, first: int, start: int, end: int) -> dict[int, bytes]:
        splitter = LineSplitter(MAX_BODY_BYTES, first=first, offset=start)
        return dict([*splitter.feed(self._storage.read(file_id, start, end - start)), *splitter.finish()])


async def blocks(storage: FileStorage, file_id: str) -> AsyncIterator[bytes]:
    """Yield a file's bytes, 1 MiB at a time. Raises StorageError."""
    offset = 0
    while block := await asyncio.to_thread(storage.read, file_id, offset, READ_BYTES):
        yield block
        offset += len(block)


async def parse_piece(pieces: Turnstile, tenant: str, parse: Callable[[], T]) -> T:
    """Parse a piece of an input in a thread, in its tenant's turn. Return the result of `parse`.

    A pause of equal length follows. A line of 1 MiB keeps the interpreter busy for 0.1 s. Without pauses each step of a
    live call would wait for a complete line. Raises errors of `parse`.
    """
    async with pieces.turn(tenant):
        began = time.monotonic()
        result = await asyncio.to_thread(parse)
        await asyncio.sleep(min(time.monotonic() - began, MAX_REST_S))
    return result

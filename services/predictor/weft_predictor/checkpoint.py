"""The model's file: an .npz of plain arrays (nothing is ever unpickled), replaced atomically."""

import asyncio
import io
import logging
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from weft.files import write_atomically
from weft.telemetry.logs import kv
from weft_predictor import metrics
from weft_predictor.core.length_model import Arrays
from weft_predictor.errors import CorruptModel
from weft_predictor.server import PredictorServer

M = TypeVar("M")
# The exceptions of numpy, zipfile and the readers of models for damaged bytes.
UNREADABLE = (
    ValueError, LookupError, TypeError, EOFError, ArithmeticError, RuntimeError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
MAX_FILE_BYTES = 512 << 20
log = logging.getLogger(__name__)


def save(path: Path, arrays: Arrays) -> None:
    """Write `arrays` to `path`. A crash leaves the old or the new file, complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    write_atomically(path, buffer.getvalue())


def load(path: Path, read: Callable[[Arrays], M]) -> M:
    """Read the arrays back through `read`. Raises FileNotFoundError, CorruptModel."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise CorruptModel(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    raw = io.BytesIO(path.read_bytes())
    try:
        with zipfile.ZipFile(raw) as packed:
            if (size := sum(member.file_size for member in packed.infolist())) > MAX_FILE_BYTES:
                raise CorruptModel(f"{path}: {size} bytes of arrays, the limit is {MAX_FILE_BYTES}")
        with np.load(raw, allow_pickle=False) as file:
            return read({name: file[name] for name in file.files})
    except UNREADABLE as error:
        raise CorruptModel(f"{path}: {error}") from error


class Checkpointer:
    """A saver of the model: every `outcomes` learned, or `seconds` after something was learned, and when closed."""

    def __init__(self, server: PredictorServer, path: Path, *, outcomes: int, seconds: float) -> None:
        self._server, self._path, self._outcomes, self._seconds = server, path, outcomes, seconds
        self._saved = server.model.learned
        self._closed = False

    async def run(self) -> None:
        """Save until closed; the last save follows the closing."""
        while not self._closed:
            await self._server.learned_some.wait()
            try:
                async with asyncio.timeout(self._seconds):
                    while not self._closed and self._server.model.learned - self._saved < self._outcomes:
                        self._server.learned_some.clear()
                        await self._server.learned_some.wait()
            except TimeoutError:
                self._server.learned_some.clear()
            await self.save()
        await self.save()  # saves outcomes learned during the previous save

    def close(self) -> None:
        """Let `run` save and return."""
        self._closed = True
        self._server.learned_some.set()

    async def save(self) -> None:
        """Save if something was learned since the last time. A failure is logged; the next save tries again."""
        if (copied := await self._server.in_turn(self._copy)) is None:
            return
        learned, arrays = copied
        try:
            await asyncio.to_thread(save, self._path, arrays)
        except OSError as error:
            metrics.SAVES.labels("failed").inc()
            log.error("model not saved", extra=kv(path=self._path, error=error))
            return
        self._saved = learned
        metrics.SAVES.labels("saved").inc()
        log.debug("model saved", extra=kv(path=self._path, learned=learned))

    def _copy(self) -> tuple[int, Arrays] | None:
        """Copy, in the inference thread, the model's arrays, and how much was learned by then."""
        model = self._server.model
        return None if model.learned == self._saved else (model.learned, model.save())

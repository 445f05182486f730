"""Keeping the model's file up to date while it learns."""

import asyncio
import logging
from pathlib import Path

from weft.telemetry.logs import kv
from weft_predictor import metrics
from weft_predictor.server import PredictorServer
from weft_predictor.state import Arrays, save, to_arrays

log = logging.getLogger(__name__)


class Saver:
    """Saves every `outcomes` learned, or `seconds` after something was learned, and when closed."""

    def __init__(self, server: PredictorServer, path: Path, *, outcomes: int, seconds: float) -> None:
        self._server, self._path, self._outcomes, self._seconds = server, path, outcomes, seconds
        self._saved = server.model.learned
        self._closed = False

    async def run(self) -> None:
        """Until closed; what is unsaved then is saved last."""
        while not self._closed:
            await self._server.learned_some.wait()
            await self._gather()
            await self.save()
        await self.save()  # what was learned while the last save ran

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
        """In the inference thread: what is to be saved, and how much was learned by then."""
        model = self._server.model
        return None if model.learned == self._saved else (model.learned, to_arrays(model))

    async def _gather(self) -> None:
        """Wait until enough was learned, the time is over, or closed."""
        try:
            async with asyncio.timeout(self._seconds):
                while not self._closed and self._server.model.learned - self._saved < self._outcomes:
                    self._server.learned_some.clear()
                    await self._server.learned_some.wait()
        except TimeoutError:
            self._server.learned_some.clear()

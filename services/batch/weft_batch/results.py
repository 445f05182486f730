"""Results: their records in output and error files, in OpenAI's format, a JSON object per line; and their writer into
the store, with many results per transaction. Only stored results count: after a crash the rest run again.

If the store is unreachable, results are held (the machine bounds their number). They are written again with bounded
pauses, for as long as the process lives. Readiness reports it.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from sqlalchemy.ext.asyncio import AsyncEngine

from weft.domain.batch import LineResult
from weft.store import batches
from weft.store.batches import MAX_RESULTS, StoredResult
from weft.store.errors import StoreFull, StoreUnavailable
from weft.store.transactions import WRITER, in_turn_of
from weft.telemetry.logs import kv
from weft_batch import metrics
from weft_batch.core.batches import LineFailed
from weft_batch.core.input_lines import BadLine

MAX_TRANSACTION_BYTES = 16 << 20
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
log = logging.getLogger(__name__)
_ONE_LINE = bytes.maketrans(b"\n\r", b"  ")  # JSON has both only outside of strings
EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")


def answer_record(result: LineResult, custom_id: str | None) -> StoredResult:
    """Return the record of a gateway's answer. An answer other than JSON is an error of the line, never a damaged
    file."""
    try:
        orjson.loads(result.body)  # strict: no NaN, no half of a surrogate pair
    except ValueError:
        failed = LineFailed(result.batch_id, result.line, "invalid_answer", "the gateway's answer is not JSON")
        return failure_record(failed, custom_id)
    body = result.body.translate(_ONE_LINE).decode()
    response = f'{{"status_code": {result.status}, "request_id": {_text(result.request_id)}, "body": {body}}}'
    return StoredResult(
        result.batch_id, result.line, 200 <= result.status < 300,
        _record(result.batch_id, result.line, custom_id, response, "null"), result.prompt_tokens,
        result.completion_tokens, result.cached_tokens, result.reasoning_tokens,
    )  # fmt: skip


def failure_record(failed: LineFailed, custom_id: str | None) -> StoredResult:
    """Return the record of a line without an answer."""
    error = {"code": failed.code, "message": failed.message}
    record = _record(failed.batch_id, failed.line, custom_id, "null", _text(error))
    return StoredResult(failed.batch_id, failed.line, False, record)


def bad_line_record(batch_id: str, line: int, bad: BadLine) -> StoredResult:
    """Return the record of an unrunnable input line. The message names the line, even without a custom_id."""
    error: dict[str, Any] = {"code": bad.code, "message": f"line {line}: {bad.message}", "line": line}
    if bad.param:
        error["param"] = bad.param
    return StoredResult(batch_id, line, False, _record(batch_id, line, bad.custom_id, "null", _text(error)))


def _record(batch_id: str, line: int, custom_id: str | None, response: str, error: str) -> bytes:
    name = _text(f"batch_req_{batch_id.removeprefix('batch_')}_{line}")
    return f'{{"id": {name}, "custom_id": {_text(custom_id)}, "response": {response}, "error": {error}}}'.encode()


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


class ResultWriter:
    """The only writer of results."""

    def __init__(
        self, engine: AsyncEngine, term: int, on_stored: Callable[[Sequence[StoredResult]], None],
        on_full: Callable[[StoreFull], None],
    ) -> None:  # fmt: skip
        self._engine, self._term, self._on_stored, self._on_full = engine, term, on_stored, on_full
        self._waiting: list[StoredResult] = []
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self.trouble: str | None = None

    def put(self, result: StoredResult) -> None:
        self._waiting.append(result)
        self._idle.clear()
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled. Raises Superseded."""
        while True:
            await self._wake.wait()
            part = self._next()
            await self._store(part)
            del self._waiting[: len(part)]
            if not self._waiting:
                self._wake.clear()
                self._idle.set()
            self._on_stored(part)

    async def drained(self) -> None:
        """Wait until all results put so far are stored."""
        await self._idle.wait()

    def _next(self) -> list[StoredResult]:
        """Return as many waiting results as fit into a transaction."""
        part, size = list[StoredResult](), 0
        for result in self._waiting[:MAX_RESULTS]:
            size += len(result.record)
            if part and size > MAX_TRANSACTION_BYTES:
                break
            part.append(result)
        return part

    async def _store(self, part: Sequence[StoredResult]) -> None:
        pause_s = MIN_PAUSE_S
        while True:
            try:
                with in_turn_of(WRITER):
                    await batches.add_results(self._engine, self._term, part)
            except StoreFull as error:
                self.trouble = None  # it still serves stored files
                self._on_full(error)
            except StoreUnavailable as error:
                self.trouble = f"store: {error}"
                metrics.STORE_FAILURES.inc()
                log.error("results not stored: trying again", extra=kv(pause_s=pause_s, error=error))
            else:
                self.trouble = None
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

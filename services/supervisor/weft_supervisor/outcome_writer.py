"""The way of outcomes: into the store first, then the acknowledgement, then the predictor.

The store may be out of reach for a while (a full disk, a restarting server). Outcomes are then held, up to a bound, and
written again with bounded pauses as long as the process lives. Readiness reports the trouble. An outcome beyond the
bound is not acknowledged: the scheduler keeps it and sends it again on a new stream. The writer asks for the new stream
once half of the queue is empty.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from weft.domain.request import Outcome, OutcomeReport
from weft.store import fencing_terms, outcomes
from weft.store.errors import StoreError, Unstorable
from weft.store.transactions import WRITER, in_turn_of
from weft.telemetry.logs import kv
from weft.wire.codec.scheduling import outcome_from_bytes
from weft.wire.errors import PeerError
from weft.wire.v1 import common_pb2, predictor_pb2
from weft_supervisor import metrics

BATCH = 200
# The pause after a transaction, unless a full batch waits: each transaction costs milliseconds of CPU, here and for the
# messages after it. The scheduler has the outcomes not stored yet.
COMMIT_DELAY_S = 1.0
MAX_WAITING = 10_000
FORGET_EVERY_S = 3_600.0
KEEP_MS = 30 * 86_400_000  # older outcomes are deleted; bills use the usage table, which stays
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
MAX_UNACKED = 2_000  # for the predictor
CHUNK = 32  # outcomes per message: the predictor learns an outcome in about 0.2 ms, and predictions wait meanwhile
log = logging.getLogger(__name__)


class OutcomeWriter:
    """The only writer of the store: outcomes in batched transactions, and the highest term."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        on_stored: Callable[[Sequence[OutcomeReport]], None],
        on_dropped: Callable[[str], object],
        on_space: Callable[[], None],
    ) -> None:
        """Create a writer that does not write yet. `on_dropped`: an unreadable outcome. `on_space`: half of a full
        queue is empty again."""
        self._engine, self._on_stored = engine, on_stored
        self._on_dropped, self._on_space = on_dropped, on_space
        self._refused = False
        self._waiting: dict[str, tuple[OutcomeReport, Outcome]] = {}  # with the decoded record; oldest first
        self._term = self._stored_term = 0
        self._wake = asyncio.Event()
        self._closed = asyncio.Event()
        self._full = asyncio.Event()  # a full batch waits, or the writer ends
        self._ends = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._forget_at = 0.0
        self.trouble: str | None = None

    def put(self, outcome: OutcomeReport) -> bool:
        """Take an outcome. Return False if the queue is full; the outcome is then not taken."""
        try:
            record = outcome_from_bytes(outcome.record)
        except PeerError as error:
            log.error("outcome cannot be read: dropped", extra=kv(request_id=outcome.request_id, error=error))
            metrics.OUTCOMES.labels("dropped").inc()
            self._on_dropped(outcome.request_id)
            return True
        if outcome.request_id not in self._waiting and len(self._waiting) >= MAX_WAITING:
            metrics.OUTCOMES.labels("refused").inc()
            self._refused = True
            return False
        self._waiting.setdefault(outcome.request_id, (outcome, record))
        if len(self._waiting) >= BATCH:
            self._full.set()
        self._work()
        return True

    def raise_term(self, term: int) -> None:
        """Store the highest term."""
        self._term = max(self._term, term)
        self._work()

    async def run(self) -> None:
        """Write until closed. A begun transaction is finished."""
        pause_s = MIN_PAUSE_S
        while not self._closed.is_set():
            try:
                with in_turn_of(WRITER):
                    await self._write()
                pause_s, self.trouble = MIN_PAUSE_S, None
                if not self._waiting and self._term <= self._stored_term:  # nothing has arrived meanwhile
                    self._wake.clear()
                    self._idle.set()
                await _wait_at_most(self._full, COMMIT_DELAY_S)
            except (StoreError, SQLAlchemyError, OSError) as error:
                self.trouble = f"store: {error}"
                metrics.STORE_FAILURES.inc()
                log.error("store not written: trying again", extra=kv(pause_s=pause_s, error=error))
                await _wait_at_most(self._closed, pause_s)
                pause_s = min(pause_s * 2, MAX_PAUSE_S)
            if self._idle.is_set() and not self._closed.is_set():
                await _wait_at_most(self._wake, max(self._forget_at - time.monotonic(), 0.0))

    async def drained(self) -> None:
        """Wait until everything taken so far is in the store, without delay, and the store is not in trouble."""
        self._hurry()
        await self._idle.wait()

    def close(self) -> None:
        """Let `run` return. Outcomes not stored by then were not acknowledged either."""
        self._closed.set()
        self._hurry()
        self._wake.set()

    def _hurry(self) -> None:
        self._ends = True
        self._full.set()

    def _work(self) -> None:
        self._idle.clear()
        self._wake.set()

    async def _write(self) -> None:
        """Write the highest term and a batch of outcomes; once an hour delete old outcomes."""
        if self._term > self._stored_term:
            term = self._term
            await fencing_terms.raise_to(self._engine, term)
            self._stored_term = term
        if batch := list(islice(self._waiting.values(), BATCH)):
            await self._store(batch)
        if time.monotonic() >= self._forget_at:
            forgotten = await outcomes.forget(self._engine, before_unix_ms=_now_unix_ms() - KEEP_MS)
            self._forget_at = time.monotonic() + FORGET_EVERY_S
            log.debug("old outcomes deleted", extra=kv(outcomes=forgotten))

    async def _store(self, batch: Sequence[tuple[OutcomeReport, Outcome]]) -> None:
        new = await self._record([record for _, record in batch])
        for outcome, _ in batch:
            del self._waiting[outcome.request_id]
        if len(self._waiting) < BATCH and not self._ends:
            self._full.clear()
        metrics.OUTCOMES.labels("stored").inc(len(new))
        metrics.OUTCOMES.labels("duplicate").inc(len(batch) - len(new))
        self._on_stored([outcome for outcome, _ in batch])
        if self._refused and 2 * len(self._waiting) <= MAX_WAITING:
            self._refused = False
            self._on_space()

    async def _record(self, batch: Sequence[Outcome]) -> set[str]:
        try:
            return await outcomes.record(self._engine, batch, now_unix_ms=_now_unix_ms())
        except Unstorable as error:
            if len(batch) > 1:  # an outcome no database accepts must not delay the rest
                return set[str]().union(*[await self._record([outcome]) for outcome in batch])
            log.error("outcome cannot be stored: dropped", extra=kv(request_id=batch[0].request_id, error=error))
            metrics.OUTCOMES.labels("dropped").inc()
            return set()


async def _wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, at most `seconds`."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


def _now_unix_ms() -> int:
    return time.time_ns() // 1_000_000


class UnackedFeedback:
    """The outcomes not acknowledged by the predictor. Beyond the limit the oldest are dropped and counted."""

    def __init__(self, limit: int = MAX_UNACKED) -> None:
        self._records: dict[str, bytes] = {}  # oldest first
        self._limit = limit

    def __len__(self) -> int:
        return len(self._records)

    def add(self, stored: Iterable[OutcomeReport]) -> None:
        """Keep outcomes until they are acknowledged."""
        for outcome in stored:
            self._records[outcome.request_id] = outcome.record
            if len(self._records) > self._limit:
                del self._records[next(iter(self._records))]
                metrics.FEEDBACK_DROPPED.inc()

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        """Drop the outcomes acknowledged by the predictor."""
        for request_id in request_ids:
            self._records.pop(request_id, None)

    def messages(self) -> Iterator[predictor_pb2.ObserveRequest]:
        """Yield all unacknowledged outcomes, for a new connection."""
        return chunks(list(self._records.values()))


def chunks(records: Sequence[bytes]) -> Iterator[predictor_pb2.ObserveRequest]:
    """Cut records into messages of at most `CHUNK` outcomes."""
    for start in range(0, len(records), CHUNK):
        yield predictor_pb2.ObserveRequest(outcomes=map(common_pb2.Outcome.FromString, records[start : start + CHUNK]))

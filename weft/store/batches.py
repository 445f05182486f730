"""Batches of tenants, and the results of their lines until the batch's files are written.

Changes of a batch hold the batch service's term, so that a replaced service changes nothing. A result is keyed by
(batch, line): a second result changes neither its row nor the batch's counts.
"""

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from typing import Any

from sqlalchemy import case, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from weft.domain.batch import COMPLETION_WINDOW_S, ENDED, BatchError, BatchJob, BatchStatus, NewBatch, Page, Purpose
from weft.store import fencing_terms, files
from weft.store.errors import Absent, Conflict, OverQuota
from weft.store.files import ROLE
from weft.store.models import BatchResultRow, BatchRow
from weft.store.transactions import OnCommit, ignore, insert_into, transact

MAX_RESULTS = 500  # of a transaction
DELETED_ROWS = 2_000  # at a time
_ENDED = [status.value for status in ENDED]
_RUNNING = [BatchStatus.VALIDATING.value, BatchStatus.IN_PROGRESS.value]


@dataclass(frozen=True, slots=True)
class UnfinishedBatch:
    """An unfinished batch, for a starting service. `ending`: the final status of a batch in `finalizing`, otherwise its
    status."""

    namespace: str
    job: BatchJob
    ending: BatchStatus
    line_index: bytes


@dataclass(frozen=True, slots=True)
class StoredResult:
    """The end of a line. `record`: its line of the output file (`succeeded`) or of the error file, without line end."""

    batch_id: str
    line: int
    succeeded: bool
    record: bytes
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


_COLUMNS = tuple(field.name for field in fields(StoredResult) if field.name in BatchResultRow.__table__.columns)
_column_values = attrgetter(*_COLUMNS)


async def create(
    engine: AsyncEngine,
    term: int,
    new: NewBatch,
    batch_id: str,
    *,
    now_unix_ms: int,
    max_unfinished: int,
    on_commit: OnCommit[BatchJob] = ignore,
) -> BatchJob:
    """Store a new batch. Raises Absent (the input file), OverQuota, Conflict (not a file for batches), Superseded,
    StoreUnavailable."""

    async def write(connection: AsyncConnection) -> BatchJob:
        await fencing_terms.hold(connection, ROLE, term)
        file = await files.find_within(connection, new.namespace, new.input_file_id)
        if file.purpose is not Purpose.BATCH:
            raise Conflict(f"file {file.file_id} has purpose {file.purpose.value!r}, a batch reads files of 'batch'")
        unfinished = select(func.count()).where(BatchRow.namespace == new.namespace, BatchRow.status.not_in(_ENDED))
        if (count := (await connection.execute(unfinished)).scalar_one()) >= max_unfinished:
            raise OverQuota(
                f"{count} batches have not ended, the quota is {max_unfinished}; wait for a batch, or cancel it"
            )
        await connection.execute(insert(BatchRow).values(_row(new, batch_id, now_unix_ms)))
        return await _batch_of(connection, new.namespace, batch_id)

    return await transact(engine, write, on_commit)


async def find(engine: AsyncEngine, namespace: str, batch_id: str) -> BatchJob:
    """Read a batch of a namespace. Raises Absent, StoreUnavailable."""
    return await transact(engine, lambda connection: _batch_of(connection, namespace, batch_id))


async def list_page(engine: AsyncEngine, page: Page) -> tuple[list[BatchJob], bool]:
    """List a page of a tenant's batches, and return whether there are more. Raises Absent (`after`),
    StoreUnavailable."""

    async def read(connection: AsyncConnection) -> tuple[list[BatchJob], bool]:
        query = select(*_SHOWN).where(BatchRow.namespace == page.namespace)
        if page.after:
            anchor = select(BatchRow.created_unix_ms).where(*_is(page.namespace, page.after))
            anchor_unix_ms = (await connection.execute(anchor)).scalar_one_or_none()
            if anchor_unix_ms is None:
                raise _no_batch(page.after)
            query = query.where(files.behind(page, BatchRow.created_unix_ms, BatchRow.batch_id, anchor_unix_ms))
        rows = (
            await connection.execute(files.order_page(page, query, BatchRow.created_unix_ms, BatchRow.batch_id))
        ).all()
        return [_job(row) for row in rows[: page.limit]], len(rows) > page.limit

    return await transact(engine, read)


async def unfinished(engine: AsyncEngine) -> list[UnfinishedBatch]:
    """List every unfinished batch, oldest first. Raises StoreUnavailable."""
    query = select(*_SHOWN, BatchRow.namespace, BatchRow.ending, BatchRow.line_index)

    async def read(connection: AsyncConnection) -> list[UnfinishedBatch]:
        rows = await connection.execute(
            query.where(BatchRow.status.not_in(_ENDED)).order_by(BatchRow.created_unix_ms, BatchRow.batch_id)
        )
        return [
            UnfinishedBatch(row.namespace, _job(row), BatchStatus(row.ending or row.status), row.line_index)
            for row in rows
        ]

    return await transact(engine, read)


async def cancel(
    engine: AsyncEngine,
    term: int,
    namespace: str,
    batch_id: str,
    *,
    now_unix_ms: int,
    on_commit: OnCommit[BatchJob] = ignore,
) -> BatchJob:
    """Cancel a batch. Raises Absent, Conflict (it has ended or is finalizing), Superseded, StoreUnavailable."""

    async def write(connection: AsyncConnection) -> BatchJob:
        await fencing_terms.hold(connection, ROLE, term)
        job = await _batch_of(connection, namespace, batch_id)
        if job.status.value in _RUNNING:
            await _change(connection, batch_id, status=BatchStatus.CANCELLING, cancelling_unix_ms=now_unix_ms)
        elif job.status is not BatchStatus.CANCELLING:
            raise Conflict(f"batch {batch_id} is {job.status.value} and cannot be cancelled")
        return await _batch_of(connection, namespace, batch_id)

    return await transact(engine, write, on_commit)


async def mark_validated(
    engine: AsyncEngine, term: int, batch_id: str, total: int, line_index: bytes, *, now_unix_ms: int
) -> None:
    """Record that a batch's lines may run. A cancelled batch stays so. Raises Superseded, StoreUnavailable."""

    async def write(connection: AsyncConnection) -> None:
        await fencing_terms.hold(connection, ROLE, term)
        status = case(
            (BatchRow.status == BatchStatus.VALIDATING.value, BatchStatus.IN_PROGRESS.value), else_=BatchRow.status
        )
        await _change(
            connection, batch_id, status=status, in_progress_unix_ms=now_unix_ms, total=total, line_index=line_index
        )

    await transact(engine, write)


async def mark_failed(
    engine: AsyncEngine, term: int, batch_id: str, errors: Sequence[BatchError], *, now_unix_ms: int
) -> None:
    """End a batch without a runnable line. Raises Superseded, StoreUnavailable."""

    async def write(connection: AsyncConnection) -> None:
        await fencing_terms.hold(connection, ROLE, term)
        errors_json = json.dumps([asdict(error) for error in errors])
        await _change(
            connection, batch_id, status=BatchStatus.FAILED, failed_unix_ms=now_unix_ms, errors=errors_json, failed=0
        )

    await transact(engine, write)


async def add_results(engine: AsyncEngine, term: int, results: Sequence[StoredResult]) -> int:
    """Store results (at most `MAX_RESULTS`) in one transaction. Return the number of new results.

    Raises Superseded, StoreUnavailable (the results may be stored: store them again).
    """
    assert len(results) <= MAX_RESULTS, f"{len(results)} results in a transaction of at most {MAX_RESULTS}"
    by_line = {(result.batch_id, result.line): result for result in reversed(results)}  # the first of a line wins
    if not by_line:
        return 0

    async def write(connection: AsyncConnection) -> int:
        await fencing_terms.hold(connection, ROLE, term)
        statement = insert_into(connection, BatchResultRow).on_conflict_do_nothing()
        statement = statement.returning(BatchResultRow.batch_id, BatchResultRow.line)
        inserted = await connection.execute(statement, [_values(by_line[key]) for key in sorted(by_line)])
        new = [by_line[row.batch_id, row.line] for row in inserted]
        await _add_counts(connection, new)
        return len(new)

    return await transact(engine, write)


async def finished_lines(engine: AsyncEngine, batch_id: str) -> list[int]:
    """List the lines with a result. Raises StoreUnavailable."""

    async def read(connection: AsyncConnection) -> list[int]:
        query = select(BatchResultRow.line).where(BatchResultRow.batch_id == batch_id)
        return list((await connection.execute(query)).scalars())

    return await transact(engine, read)


async def results(engine: AsyncEngine, batch_id: str, *, pages_of: int = 200) -> AsyncIterator[tuple[int, bool, bytes]]:
    """Yield (line, succeeded, record) of every result, in the lines' order. Raises StoreUnavailable."""
    row = BatchResultRow
    last_line = 0
    while True:
        query = select(row.line, row.succeeded, row.record).where(row.batch_id == batch_id, row.line > last_line)

        async def read(connection: AsyncConnection, query: Any = query) -> list[Any]:
            return list((await connection.execute(query.order_by(row.line).limit(pages_of))).all())

        page = await transact(engine, read)
        for line, succeeded, record in page:
            yield line, succeeded, record
        if len(page) < pages_of:
            return
        last_line = page[-1].line


async def begin_finalizing(
    engine: AsyncEngine, term: int, batch_id: str, ending: BatchStatus, *, now_unix_ms: int
) -> None:
    """Close a batch to results before its files are written. A cancelled batch shows `cancelling` until then.

    Raises Superseded, StoreUnavailable.
    """
    cancelled = ending is BatchStatus.CANCELLED
    status = BatchStatus.CANCELLING if cancelled else BatchStatus.FINALIZING

    async def write(connection: AsyncConnection) -> None:
        await fencing_terms.hold(connection, ROLE, term)
        await _change(connection, batch_id, status=status, ending=ending.value, finalizing_unix_ms=now_unix_ms)

    await transact(engine, write)


async def finish(
    engine: AsyncEngine,
    term: int,
    batch_id: str,
    ending: BatchStatus,
    *,
    now_unix_ms: int,
    output: tuple[str, int] | None,
    errors: tuple[str, int] | None,
    failed: int,
) -> None:
    """End a batch: its files (ids and bytes; None: none) and its end become visible at once.

    `failed`: the number of lines of the error file. Raises Conflict (a file's row was swept), Superseded,
    StoreUnavailable.
    """

    async def write(connection: AsyncConnection) -> None:
        await fencing_terms.hold(connection, ROLE, term)
        for file in (output, errors):
            if file is not None:
                await files.make_ready(connection, *file)
        times: Any = {f"{ending.value}_unix_ms": now_unix_ms}
        names = {"output_file_id": output[0] if output else "", "error_file_id": errors[0] if errors else ""}
        await _change(connection, batch_id, status=ending, failed=failed, **names, **times)

    await transact(engine, write)


async def drop_results(engine: AsyncEngine, batch_id: str) -> None:
    """Delete the results of a batch in parts. Raises StoreUnavailable."""
    row = BatchResultRow
    part = select(row.line).where(row.batch_id == batch_id).order_by(row.line).limit(DELETED_ROWS)
    statement = delete(row).where(row.batch_id == batch_id, row.line.in_(part))

    async def write(connection: AsyncConnection) -> int:
        return (await connection.execute(statement)).rowcount

    while await transact(engine, write) == DELETED_ROWS:
        pass


async def ended_with_results(engine: AsyncEngine) -> list[str]:
    """List ended batches with results still stored. Raises StoreUnavailable."""
    with_results = select(BatchResultRow.batch_id).distinct()
    query = select(BatchRow.batch_id).where(BatchRow.status.in_(_ENDED), BatchRow.batch_id.in_(with_results))

    async def read(connection: AsyncConnection) -> list[str]:
        return list((await connection.execute(query)).scalars())

    return await transact(engine, read)


async def forget(engine: AsyncEngine, *, before_unix_ms: int) -> int:
    """Delete ended batches created before a time. Their files stay. Return the number deleted."""
    statement = delete(BatchRow).where(BatchRow.status.in_(_ENDED), BatchRow.created_unix_ms < before_unix_ms)

    async def write(connection: AsyncConnection) -> int:
        return (await connection.execute(statement)).rowcount

    return await transact(engine, write)


async def _batch_of(connection: AsyncConnection, namespace: str, batch_id: str) -> BatchJob:
    row = (await connection.execute(select(*_SHOWN).where(*_is(namespace, batch_id)))).first()
    if row is None:
        raise _no_batch(batch_id)
    return _job(row)


async def _change(connection: AsyncConnection, batch_id: str, **values: Any) -> None:
    plain = {name: value.value if isinstance(value, BatchStatus) else value for name, value in values.items()}
    await connection.execute(update(BatchRow).where(BatchRow.batch_id == batch_id).values(plain))


def _values(result: StoredResult) -> dict[str, Any]:
    return dict(zip(_COLUMNS, _column_values(result), strict=True))


async def _add_counts(connection: AsyncConnection, new: Iterable[StoredResult]) -> None:
    sums: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(_COUNTS))
    for result in new:
        ok = result.succeeded
        added = (int(ok), int(not ok), *(ok * getattr(result, name) for name in _TOKENS))
        sums[result.batch_id] = [a + b for a, b in zip(sums[result.batch_id], added, strict=True)]
    for batch_id, added in sums.items():
        await _change(
            connection, batch_id, **{name: getattr(BatchRow, name) + n for name, n in zip(_COUNTS, added, strict=True)}
        )


def _is(namespace: str, batch_id: str) -> tuple[Any, ...]:
    return BatchRow.batch_id == batch_id, BatchRow.namespace == namespace


def _no_batch(batch_id: str) -> Absent:
    return Absent(f"no batch with the id {batch_id[:100]!r}")


def _row(new: NewBatch, batch_id: str, now_unix_ms: int) -> dict[str, Any]:
    zero = dict.fromkeys((f"{name}_unix_ms" for name in _TIMES), 0) | dict.fromkeys(("total", *_COUNTS), 0)
    return zero | {
        "batch_id": batch_id,
        "namespace": new.namespace,
        "input_file_id": new.input_file_id,
        "endpoint": new.endpoint,
        "completion_window": new.completion_window,
        "status": BatchStatus.VALIDATING.value,
        "ending": "",
        "output_file_id": "",
        "error_file_id": "",
        "errors": "[]",
        "tags": json.dumps(dict(new.metadata)),
        "created_unix_ms": now_unix_ms,
        "expires_unix_ms": now_unix_ms + 1000 * COMPLETION_WINDOW_S,
        "line_index": b"",
    }


_TOKENS = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
_COUNTS = ("completed", "failed", *_TOKENS)
_TIMES = (
    "created", "in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled",
)  # fmt: skip
_SAME = (
    "batch_id", "input_file_id", "endpoint", "completion_window", "output_file_id", "error_file_id", "total", *_COUNTS,
)  # fmt: skip
_SHOWN: tuple[Any, ...] = tuple(
    getattr(BatchRow, name) for name in (*_SAME, *[f"{time}_unix_ms" for time in _TIMES], "status", "errors", "tags")
)


def _job(row: Any) -> BatchJob:
    columns: Any = {name: getattr(row, name) for name in _SAME}
    times: Any = {f"{name}_unix_s": getattr(row, f"{name}_unix_ms") // 1000 for name in _TIMES}
    errors = tuple(BatchError(**error) for error in json.loads(row.errors))
    return BatchJob(status=BatchStatus(row.status), errors=errors, metadata=json.loads(row.tags), **columns, **times)

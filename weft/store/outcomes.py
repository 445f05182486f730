"""Outcomes and their usage: stored in one transaction, every outcome counted once."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields
from datetime import UTC, date, datetime
from typing import Any

from sqlalchemy import String, delete
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from weft.domain.request import FinishReason, Outcome
from weft.store.models import KeyUsageRow, OutcomeRow, UsageRow
from weft.store.transactions import insert_into, transact

MAX_BATCH = 500  # 19 columns x 500 rows stay below the 32,766 parameters of a statement


async def record(engine: AsyncEngine, outcomes: Sequence[Outcome], *, now_unix_ms: int) -> set[str]:
    """Store a batch of outcomes (at most `MAX_BATCH`) in one transaction. Return the new ids, as stored.

    Idempotent by request id until `forget`, also if several supervisors store the same outcomes at the same time. A
    known outcome changes neither its row nor the usage. Raises StoreUnavailable (the batch may be stored: store it
    again), Unstorable (the database refuses an outcome: none is stored).
    """
    assert len(outcomes) <= MAX_BATCH, f"{len(outcomes)} outcomes in a batch of at most {MAX_BATCH}"
    # the first of equal ids in a batch wins
    first = {outcome.request_id: outcome for outcome in map(_fitted, reversed(outcomes))}
    if not first:
        return set()
    ordered = [first[request_id] for request_id in sorted(first)]  # in the same order everywhere: fewer deadlocks

    async def write(connection: AsyncConnection) -> set[str]:
        new = await _insert_outcomes(connection, ordered, now_unix_ms)
        fresh = [outcome for outcome in ordered if outcome.request_id in new]
        await _add_usage(connection, fresh)
        return new

    return await transact(engine, write)


async def forget(engine: AsyncEngine, *, before_unix_ms: int) -> int:
    """Delete outcomes stored before a time. Usage stays. Return the number deleted.

    The time of storing counts, not of finishing: outcomes of a gateway with a wrong clock must not count twice.
    """

    async def write(connection: AsyncConnection) -> int:
        deletion = await connection.execute(delete(OutcomeRow).where(OutcomeRow.stored_unix_ms < before_unix_ms))
        return deletion.rowcount

    return await transact(engine, write)


async def _insert_outcomes(connection: AsyncConnection, outcomes: list[Outcome], now_unix_ms: int) -> set[str]:
    rows = [_row(outcome) | {"stored_unix_ms": now_unix_ms} for outcome in outcomes]
    statement = insert_into(connection, OutcomeRow).on_conflict_do_nothing(index_elements=[OutcomeRow.request_id])
    inserted = await connection.execute(statement.returning(OutcomeRow.request_id), rows)
    return set(inserted.scalars())


def _row(outcome: Outcome) -> dict[str, Any]:
    """Return the columns of an outcome's row. `choice` (the first stands for the prompt) and `key_id` are only for
    usage."""
    values = {column: getattr(outcome, name) for name, column in _FIELDS if name not in _OF_USAGE}
    return values | {"finish_reason": outcome.finish.value}


async def _add_usage(connection: AsyncConnection, outcomes: Sequence[Outcome]) -> None:
    await _add(connection, UsageRow, ("namespace", "model_name", "day"), outcomes)
    keyed = [outcome for outcome in outcomes if outcome.key_id]
    await _add(connection, KeyUsageRow, ("key_id", "model_name", "day"), keyed, ("namespace",))


async def _add(
    connection: AsyncConnection,
    table: type[UsageRow | KeyUsageRow],
    keys: tuple[str, ...],
    outcomes: Iterable[Outcome],
    further_columns: tuple[str, ...] = (),
) -> None:
    """Add outcomes to the rows of a table with their `keys`. A new row also has `further_columns`."""
    columns = (*keys, *further_columns)
    sums: defaultdict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0, 0])
    for outcome in outcomes:
        day = _day(outcome.finished_unix_ms)
        total = sums[tuple([day if name == "day" else getattr(outcome, name) for name in columns])]
        first = outcome.choice == 0
        for i, value in enumerate((int(first), first * outcome.prompt_tokens, outcome.completion_tokens)):
            total[i] += value
    rows: list[dict[str, Any]] = [
        dict(zip((*columns, *_USAGE_SUMS), (*key, *total), strict=True)) for key, total in sorted(sums.items())
    ]
    if rows:
        insert = insert_into(connection, table)
        await connection.execute(
            insert.on_conflict_do_update(
                index_elements=[getattr(table, name) for name in keys],
                set_={name: getattr(table, name) + insert.excluded[name] for name in _USAGE_SUMS},
            ),
            rows,
        )


_USAGE_SUMS = ("requests", "prompt_tokens", "completion_tokens")


def _fitted(outcome: Outcome) -> Outcome:
    """Fit an outcome into its columns: an odd outcome must not keep its batch from being stored."""
    return Outcome(**{name: _fit(column, getattr(outcome, name)) for name, column in _FIELDS})


def _fit(name: str, value: Any) -> Any:
    if name in _KEYS:
        return _fit_key(value, _WIDTHS[name])
    if isinstance(value, str):
        return value.replace("\0", "")[: _WIDTHS[name]]
    return value if isinstance(value, bool | FinishReason) else min(value, _MAX_INT)


def _fit_key(text: str, width: int) -> str:
    """Replace a key too long for its column by its SHA-256: cut keys could make two requests or tenants equal."""
    if len(text) <= width and "\0" not in text:
        return text
    return hashlib.sha256(text.encode()).hexdigest()


_COLUMNS = {"adapter": "adapter_digest", "finish": "finish_reason", "migrations": "moves"}  # where names differ
# Read separately: `asdict` copies deeply, and took a fifth of the supervisor's CPU.
_FIELDS = tuple((field.name, _COLUMNS.get(field.name, field.name)) for field in fields(Outcome))
_MAX_INT = 2**63 - 1
_OF_USAGE = frozenset(("choice", "key_id"))
_KEYS = frozenset(("request_id", "namespace", "model_name", "key_id"))  # columns that identify rows
_LAST_DAY_MS = 253_402_300_799_000  # 9999-12-31T23:59:59Z, the last possible date
_WIDTHS = {
    column.name: column.type.length or 0
    for row in (KeyUsageRow, OutcomeRow)
    for column in row.__table__.columns
    if isinstance(column.type, String)
}


def _day(unix_ms: int) -> date:
    return datetime.fromtimestamp(min(unix_ms, _LAST_DAY_MS) / 1000, UTC).date()

"""Limits of keys and namespaces, as operators set them."""

from dataclasses import asdict

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from weft.domain.limits import LimitRule
from weft.store.models import LimitRow
from weft.store.transactions import insert_into, transact

_NAMES = ("requests_per_minute", "tokens_per_minute", "concurrent", "tokens_per_day")


async def put(engine: AsyncEngine, rule: LimitRule, *, now_unix_ms: int) -> None:
    """Store a rule in place of the rule for its subject and model. A rule without any limit deletes it.

    Raises StoreUnavailable.
    """
    await transact(engine, lambda connection: put_within(connection, rule, now_unix_ms=now_unix_ms))


async def put_within(connection: AsyncConnection, rule: LimitRule, *, now_unix_ms: int) -> None:
    """Store a rule as `put` does, within a transaction."""
    values = {name: asdict(rule)[name] for name in ("subject", "model", *_NAMES)} | {"set_unix_ms": now_unix_ms}
    if not any(values[name] for name in _NAMES):
        await connection.execute(delete(LimitRow).where(LimitRow.subject == rule.subject, LimitRow.model == rule.model))
        return
    insert = insert_into(connection, LimitRow)
    new = {name: insert.excluded[name] for name in (*_NAMES, "set_unix_ms")}
    upsert = insert.on_conflict_do_update(index_elements=[LimitRow.subject, LimitRow.model], set_=new)
    await connection.execute(upsert, values)


async def all_rules(engine: AsyncEngine) -> list[LimitRule]:
    """List every rule, by subject and model. Raises StoreUnavailable."""
    columns = [getattr(LimitRow, name) for name in ("subject", "model", *_NAMES)]
    query = select(*columns).order_by(LimitRow.subject, LimitRow.model)

    async def read(connection: AsyncConnection) -> list[LimitRule]:
        return [LimitRule(**row) for row in (await connection.execute(query)).mappings()]

    return await transact(engine, read)

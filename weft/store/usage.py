"""Usage of models by namespace and day (UTC), for readers. `weft.store.outcomes` writes it."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from datetime import date

from sqlalchemy import func, literal, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from weft.store.models import KeyUsageRow, UsageRow
from weft.store.transactions import transact

MAX_NAMES = 500  # in one query


@dataclass(frozen=True, slots=True)
class DailyUsage:
    """Sums over a day's outcomes."""

    day: date
    namespace: str
    model_name: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    key_id: str = ""


async def since(
    engine: AsyncEngine, day: date, *, namespace: str = "", by_key: bool = False, max_rows: int | None = None
) -> list[DailyUsage]:
    """Read usage from `day` on, by day, namespace and model. `namespace`: "" for all.

    `by_key`: by key as well, and only of requests with a key. Raises StoreUnavailable.
    """
    row = KeyUsageRow if by_key else UsageRow
    query = select(row.__table__).where(row.day >= day)
    if namespace:
        query = query.where(row.namespace == namespace)
    order = (row.day, row.namespace, row.model_name, *((KeyUsageRow.key_id,) if by_key else ()))
    query = query.order_by(*order).limit(max_rows)

    async def read(connection: AsyncConnection) -> list[DailyUsage]:
        return [DailyUsage(**row) for row in (await connection.execute(query)).mappings()]

    return await transact(engine, read)


async def tokens(engine: AsyncEngine, day: date, by_model: Collection[str] = ()) -> dict[str, dict[str, int]]:
    """Sum the tokens of a day by namespace: "" for all its models together, and by model for namespaces in `by_model`.

    The database does the sums of the totals. Raises StoreUnavailable.
    """
    used, row = func.sum(UsageRow.prompt_tokens + UsageRow.completion_tokens), UsageRow
    totals = select(row.namespace, literal(""), used).where(row.day == day).group_by(row.namespace)
    of_models = select(row.namespace, row.model_name, used).where(row.day == day)
    of_models = of_models.group_by(row.namespace, row.model_name)
    names = sorted(by_model)

    async def read(connection: AsyncConnection) -> dict[str, dict[str, int]]:
        sums = defaultdict[str, dict[str, int]](dict)
        queries = [totals]
        queries += [
            of_models.where(row.namespace.in_(names[i : i + MAX_NAMES])) for i in range(0, len(names), MAX_NAMES)
        ]
        for query in queries:
            for namespace, model, count in await connection.execute(query):
                sums[namespace][model] = int(count)
        return sums

    return await transact(engine, read)


async def tokens_of_keys(engine: AsyncEngine, day: date, key_ids: Collection[str]) -> dict[str, dict[str, int]]:
    """Sum the tokens of a day for the keys in `key_ids`, by model; "" for all models of a key together.

    Raises StoreUnavailable.
    """
    row, names = KeyUsageRow, sorted(key_ids)
    used = row.prompt_tokens + row.completion_tokens

    async def read(connection: AsyncConnection) -> dict[str, dict[str, int]]:
        sums = defaultdict[str, dict[str, int]](lambda: {"": 0})
        for i in range(0, len(names), MAX_NAMES):
            query = select(row.key_id, row.model_name, used).where(row.day == day)
            for key_id, model, count in await connection.execute(query.where(row.key_id.in_(names[i : i + MAX_NAMES]))):
                sums[key_id][model] = count
                sums[key_id][""] += count
        return sums

    return await transact(engine, read)

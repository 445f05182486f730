"""What namespaces used of models, by day (UTC): read; `weft.store.outcomes` writes it."""

from dataclasses import dataclass
from datetime import date

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from weft.store.models import UsageRow
from weft.store.transactions import transact


@dataclass(frozen=True, slots=True)
class DailyUsage:
    """Sums over a day's outcomes."""

    day: date
    namespace: str
    model_name: str
    requests: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


async def since(engine: AsyncEngine, day: date, *, namespace: str = "", most: int | None = None) -> list[DailyUsage]:
    """DailyUsage from that day on, by day, namespace and model. `namespace`: "" for all. Raises StoreUnavailable."""
    query = select(UsageRow.__table__).where(UsageRow.day >= day)
    if namespace:
        query = query.where(UsageRow.namespace == namespace)
    query = query.order_by(UsageRow.day, UsageRow.namespace, UsageRow.model_name).limit(most)

    async def read(connection: AsyncConnection) -> list[DailyUsage]:
        return [DailyUsage(**row) for row in (await connection.execute(query)).mappings()]

    return await transact(engine, read)

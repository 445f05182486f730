"""What the store holds of outcomes, read as people do: with SQL."""

from datetime import date
from typing import Any

from sqlalchemy import Row, func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from weft.store.models import OutcomeRow, UsageRow


async def usage(engine: AsyncEngine, since: date = date.min) -> list[Row[Any]]:
    """The usage rows of `since` and later, oldest first."""
    query = select(UsageRow.__table__).where(UsageRow.day >= since)
    async with engine.connect() as connection:
        return [*await connection.execute(query.order_by(UsageRow.day, UsageRow.namespace, UsageRow.model_name))]


async def count(engine: AsyncEngine) -> int:
    """How many outcomes are stored."""
    async with engine.connect() as connection:
        return (await connection.execute(select(func.count()).select_from(OutcomeRow))).scalar_one()

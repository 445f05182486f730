"""The highest term seen, so that a restart of everything still fences what ran before."""

from sqlalchemy import case, select
from sqlalchemy.ext.asyncio import AsyncEngine

from weft.store.models import TermRow
from weft.store.statements import insert_into


async def highest(engine: AsyncEngine, role: str = "scheduler") -> int:
    """The highest term raised so far; 0 before the first."""
    async with engine.connect() as connection:
        found = await connection.execute(select(TermRow.term).where(TermRow.role == role))
        return found.scalar_one_or_none() or 0


async def raise_to(engine: AsyncEngine, term: int, role: str = "scheduler") -> None:
    """Remember `term` unless a higher one is known."""
    async with engine.begin() as connection:
        insert = insert_into(connection, TermRow, [{"role": role, "term": term}])
        higher = case((TermRow.term > insert.excluded["term"], TermRow.term), else_=insert.excluded["term"])
        await connection.execute(insert.on_conflict_do_update(index_elements=[TermRow.role], set_={"term": higher}))

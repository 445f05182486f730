"""The highest term seen, so that a restart of everything still fences what ran before."""

from sqlalchemy import case, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from weft.domain.ids import MAX_TERM
from weft.store.models import TermRow
from weft.store.transactions import insert_into, transact

ROLE = "scheduler"  # whose terms these are


async def highest(engine: AsyncEngine) -> int:
    """The highest term raised so far; 0 before the first, and where none can be above. Raises StoreUnavailable."""

    async def read(connection: AsyncConnection) -> int:
        found = await connection.execute(select(TermRow.term).where(TermRow.role == ROLE, TermRow.term < MAX_TERM))
        return found.scalar_one_or_none() or 0

    return await transact(engine, read)


async def raise_to(engine: AsyncEngine, term: int) -> None:
    """Remember `term` unless a higher one is known, also while other processes raise it. Raises StoreUnavailable."""

    async def write(connection: AsyncConnection) -> None:
        insert = insert_into(connection, TermRow)
        known = TermRow.term.between(insert.excluded["term"], MAX_TERM - 1)
        higher = case((known, TermRow.term), else_=insert.excluded["term"])
        upsert = insert.on_conflict_do_update(index_elements=[TermRow.role], set_={"term": higher})
        await connection.execute(upsert, {"role": ROLE, "term": term})

    await transact(engine, write)

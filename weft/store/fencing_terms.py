"""The highest term seen of a role, so that a restart of everything still fences what ran before.

A scheduler brings its term, and the supervisor remembers it. A batch service takes the next one at its start, and
holds it in the transactions that change something: whoever has an older one changes nothing any more.
"""

from sqlalchemy import case, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from weft.domain.ids import MAX_TERM
from weft.store.errors import Superseded
from weft.store.models import TermRow
from weft.store.transactions import insert_into, transact

ROLE = "scheduler"  # whose terms a supervisor keeps


async def highest(engine: AsyncEngine, role: str = ROLE) -> int:
    """Read the highest term of a role; 0 before the first, and where none can be above. Raises StoreUnavailable."""

    async def read(connection: AsyncConnection) -> int:
        row = await connection.execute(select(TermRow.term).where(TermRow.role == role, TermRow.term < MAX_TERM))
        return row.scalar_one_or_none() or 0

    return await transact(engine, read)


async def raise_to(engine: AsyncEngine, term: int) -> None:
    """Remember `term` unless a higher one is known, also while other processes raise it. Raises StoreUnavailable."""

    async def write(connection: AsyncConnection) -> None:
        insert = insert_into(connection, TermRow)
        is_higher = TermRow.term.between(insert.excluded["term"], MAX_TERM - 1)
        higher = case((is_higher, TermRow.term), else_=insert.excluded["term"])
        upsert = insert.on_conflict_do_update(index_elements=[TermRow.role], set_={"term": higher})
        await connection.execute(upsert, {"role": ROLE, "term": term})

    await transact(engine, write)


async def take(engine: AsyncEngine, role: str) -> int:
    """Take a term of `role` above all before it, once transactions that hold one are over. Raises StoreUnavailable."""

    async def write(connection: AsyncConnection) -> int:
        insert = insert_into(connection, TermRow)
        upsert = insert.on_conflict_do_update(index_elements=[TermRow.role], set_={"term": TermRow.term + 1})
        return int((await connection.execute(upsert.returning(TermRow.term), {"role": role, "term": 1})).scalar_one())

    return await transact(engine, write)


async def hold(connection: AsyncConnection, role: str, term: int) -> None:
    """Keep any process from taking a higher term until this transaction ends. Raises Superseded where one was taken."""
    query = select(TermRow.term).where(TermRow.role == role).with_for_update(read=True)
    highest_term = (await connection.execute(query)).scalar_one()  # SQLite leaves the lock out: it has one writer
    if highest_term != term:
        raise Superseded(f"term {highest_term} of role {role} was taken, this process has {term}")

"""The highest term seen of a role, so that a full restart still fences older processes.

A scheduler brings its term, and the supervisor remembers it. A batch service takes the next term at its start, and
holds it in transactions that change something: a service with an older term can change nothing.
"""

from sqlalchemy import case, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from weft.domain.ids import MAX_TERM
from weft.store.errors import Superseded
from weft.store.models import TermRow
from weft.store.transactions import insert_into, transact

ROLE = "scheduler"  # the role of terms kept by a supervisor


async def highest(engine: AsyncEngine, role: str = ROLE) -> int:
    """Return the highest term of a role; 0 before the first term, and if no higher term is possible. Raises
    StoreUnavailable."""

    async def read(connection: AsyncConnection) -> int:
        row = await connection.execute(select(TermRow.term).where(TermRow.role == role, TermRow.term < MAX_TERM))
        return row.scalar_one_or_none() or 0

    return await transact(engine, read)


async def raise_to(engine: AsyncEngine, term: int) -> None:
    """Store `term` unless a higher term is known, also under concurrent raises. Raises StoreUnavailable."""

    async def write(connection: AsyncConnection) -> None:
        insert = insert_into(connection, TermRow)
        is_higher = TermRow.term.between(insert.excluded["term"], MAX_TERM - 1)
        higher = case((is_higher, TermRow.term), else_=insert.excluded["term"])
        upsert = insert.on_conflict_do_update(index_elements=[TermRow.role], set_={"term": higher})
        await connection.execute(upsert, {"role": ROLE, "term": term})

    await transact(engine, write)


async def take(engine: AsyncEngine, role: str) -> int:
    """Take a term of `role` above all earlier terms, once transactions that hold a term are over. Raises
    StoreUnavailable."""

    async def write(connection: AsyncConnection) -> int:
        insert = insert_into(connection, TermRow)
        upsert = insert.on_conflict_do_update(index_elements=[TermRow.role], set_={"term": TermRow.term + 1})
        return int((await connection.execute(upsert.returning(TermRow.term), {"role": role, "term": 1})).scalar_one())

    return await transact(engine, write)


async def hold(connection: AsyncConnection, role: str, term: int) -> None:
    """Prevent a higher term until this transaction ends. Raises Superseded if a higher term is taken already."""
    query = select(TermRow.term).where(TermRow.role == role).with_for_update(read=True)
    highest_term = (await connection.execute(query)).scalar_one()  # SQLite has a single writer and needs no lock
    if highest_term != term:
        raise Superseded(f"term {highest_term} of role {role} was taken, this process has {term}")

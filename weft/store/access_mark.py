"""A mark of all keys and limits: equal marks stand for equal rows. It is a single query, since it is polled often."""

from typing import NamedTuple

from sqlalchemy import func, select, true
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from weft.store.models import ApiKeyRow, LimitRow
from weft.store.transactions import transact

_KEYS = (
    select(
        func.count().label("made"),
        func.count(ApiKeyRow.revoked_unix_ms).label("revoked"),
        func.coalesce(func.sum(ApiKeyRow.changes), 0).label("changed"),
    )
    .select_from(ApiKeyRow)
    .subquery()
)
_LIMITS = (
    select(func.count().label("rules"), func.coalesce(func.sum(LimitRow.set_unix_ms), 0).label("times"))
    .select_from(LimitRow)
    .subquery()
)
_BOTH = select(_KEYS, _LIMITS).select_from(_KEYS.join(_LIMITS, true()))


class AccessMark(NamedTuple):
    """A mark of the rows. `keys` grows with every change of the keys in force.

    The numbers of created keys and of changes by owners only grow. Only a change by its owner puts a revoked key back
    in force, so such a change counts twice. `limits`: the number of rules, and the sum of the times of their last
    change.
    """

    keys: int
    limits: tuple[int, int]


async def access_mark(engine: AsyncEngine) -> AccessMark:
    """Read the mark. Raises StoreUnavailable."""

    async def read(connection: AsyncConnection) -> AccessMark:
        made, revoked, changed, rules, times = (await connection.execute(_BOTH)).one()
        return AccessMark(int(made) + int(revoked) + 2 * int(changed), (int(rules), int(times)))

    return await transact(engine, read)

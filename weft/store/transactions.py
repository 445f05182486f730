"""One transaction, whichever database: tried again where the database asks for it, its errors told as the store's.

PostgreSQL ends a transaction that lost a race (serialization failure, deadlock) and expects it to be run again; with
SQLite there is one writer and nothing to lose. Whatever else stands in the way is not tried again here: the caller
knows how long its work may wait.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from weft.store.errors import StoreUnavailable, Unstorable

T = TypeVar("T")
Work = Callable[[AsyncConnection], Awaitable[T]]
TRIES = 10
PAUSE_S = 0.01  # before the second try; grows by as much with each, jittered
RACES = frozenset(("40001", "40P01"))  # serialization_failure, deadlock_detected
DATA, INTEGRITY, STATEMENT = "22", "23", "42"  # classes of SQLSTATE: the row itself twice, our own mistake


async def transact(engine: AsyncEngine, work: Work[T]) -> T:
    """Run `work` in a transaction of its own, again (at most `TRIES` times in all) while it loses races.

    So `work` may run more than once; only what the last run did counts. Raises StoreUnavailable, Unstorable.
    """
    for tried in range(1, TRIES + 1):
        try:
            async with engine.begin() as connection:
                return await work(connection)
        except (SQLAlchemyError, OSError, TimeoutError) as error:
            if sqlstate(error) not in RACES or tried == TRIES:
                _tell(error)
        await asyncio.sleep(tried * PAUSE_S * random.uniform(0.5, 1.5))  # noqa: S311 (jitter, not a secret)
    raise AssertionError("TRIES is at least 1")


def sqlstate(error: BaseException) -> str:
    """PostgreSQL's five characters for what happened; "" where it said nothing."""
    return str(getattr(error.orig, "sqlstate", None) or "") if isinstance(error, DBAPIError) else ""


def _tell(error: Exception) -> None:
    """Raise it as one of the store's; what is neither the row's fault nor the database's is a bug, and passes."""
    state = sqlstate(error)
    if isinstance(error, DataError | IntegrityError) or state[:2] in (DATA, INTEGRITY):
        raise Unstorable(_words(error)) from error
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    if lost or isinstance(error, OSError | TimeoutError | OperationalError | PoolTimeout):
        raise StoreUnavailable(_words(error)) from error
    if state and state[:2] != STATEMENT:
        raise StoreUnavailable(_words(error)) from error
    raise error


def _words(error: Exception) -> str:
    """The database's own words, without statement and parameters."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return str(cause).rpartition(">: ")[2] or type(cause).__name__

"""Stored responses of `/v1/responses`, for later responses that continue them. The gateway makes the body: bytes to the
store.

A response names its predecessor, so that each response is stored once, however long a conversation becomes.
"""

from typing import Any

from sqlalchemy import delete, insert, literal, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from weft.domain.batch import MAX_CONVERSATION_BYTES, KeptResponse, no_response
from weft.store import files
from weft.store.errors import Absent, Conflict
from weft.store.models import ResponseRow
from weft.store.transactions import transact

MAX_DEPTH = 1_000  # responses of a conversation


async def keep(
    engine: AsyncEngine,
    new: KeptResponse,
    *,
    now_unix_ms: int,
    expires_unix_ms: int,
    max_responses: int,
    max_bytes: int,
) -> None:
    """Store a response until it expires. Keep the newest `max_responses` of a namespace.

    Raises OverQuota (the tenant would exceed `max_bytes` together with its files), StoreUnavailable.
    """
    row = {
        "response_id": new.response_id,
        "namespace": new.namespace,
        "previous_id": new.previous_id,
        "body": new.body,
        "body_bytes": len(new.body),
        "created_unix_ms": now_unix_ms,
        "expires_unix_ms": expires_unix_ms,
    }
    of_tenant = ResponseRow.namespace == new.namespace
    newest = select(ResponseRow.created_unix_ms).where(of_tenant).order_by(ResponseRow.created_unix_ms.desc())

    async def write(connection: AsyncConnection) -> None:
        _, stored = await files.used(connection, new.namespace)
        if stored + len(new.body) > max_bytes:
            raise files.over_bytes(stored + len(new.body), max_bytes)
        await connection.execute(insert(ResponseRow).values(row))
        oldest = (await connection.execute(newest.offset(max_responses).limit(1))).scalar_one_or_none()
        if oldest is not None:
            await connection.execute(delete(ResponseRow).where(of_tenant, ResponseRow.created_unix_ms <= oldest))

    await transact(engine, write)


async def find(engine: AsyncEngine, namespace: str, response_id: str, *, now_unix_ms: int) -> bytes:
    """Read a response of a namespace. Raises Absent, StoreUnavailable."""
    query = select(ResponseRow.body).where(*_named(namespace, response_id), _unexpired(now_unix_ms))

    async def read(connection: AsyncConnection) -> bytes:
        body = (await connection.execute(query)).scalar_one_or_none()
        if body is None:
            raise absent(response_id)
        return body

    return await transact(engine, read)


async def conversation(engine: AsyncEngine, namespace: str, response_id: str, *, now_unix_ms: int) -> list[bytes]:
    """Read a response and all its predecessors, oldest first.

    Raises Absent (also for a predecessor), Conflict (too long to continue), StoreUnavailable.
    """
    unexpired = _unexpired(now_unix_ms)
    columns = ResponseRow.response_id, ResponseRow.previous_id, ResponseRow.body_bytes
    last = select(*columns, literal(1).label("depth")).where(*_named(namespace, response_id), unexpired)
    chain = last.cte("chain", recursive=True)
    previous = select(*columns, chain.c.depth + 1).where(
        ResponseRow.response_id == chain.c.previous_id,
        ResponseRow.namespace == namespace,
        unexpired,
        chain.c.depth <= MAX_DEPTH,
    )
    chain = chain.union_all(previous)
    about = select(chain.c.response_id, chain.c.previous_id, chain.c.body_bytes).order_by(chain.c.depth)

    async def read(connection: AsyncConnection) -> list[bytes]:
        chain_rows = (await connection.execute(about)).all()
        if not chain_rows:
            raise absent(response_id)
        if len(chain_rows) > MAX_DEPTH or sum(row.body_bytes for row in chain_rows) > MAX_CONVERSATION_BYTES:
            raise Conflict(f"the conversation of response {response_id} is too long to be continued; send its items")
        if missing := chain_rows[-1].previous_id:
            raise absent(missing)
        bodies = select(ResponseRow.response_id, ResponseRow.body).join(
            chain, chain.c.response_id == ResponseRow.response_id
        )
        by_id: dict[str, bytes] = {row.response_id: row.body for row in await connection.execute(bodies)}
        return [by_id[row.response_id] for row in reversed(chain_rows)]

    return await transact(engine, read)


async def remove(engine: AsyncEngine, namespace: str, response_id: str) -> None:
    """Delete a response. Responses after it cannot be continued any more. Raises Absent, StoreUnavailable."""

    async def write(connection: AsyncConnection) -> None:
        done = await connection.execute(delete(ResponseRow).where(*_named(namespace, response_id)))
        if not done.rowcount:
            raise absent(response_id)

    await transact(engine, write)


async def forget(engine: AsyncEngine, *, now_unix_ms: int) -> int:
    """Delete expired responses. Return their number. Raises StoreUnavailable."""
    expired = delete(ResponseRow).where(ResponseRow.expires_unix_ms <= now_unix_ms)

    async def write(connection: AsyncConnection) -> int:
        return (await connection.execute(expired)).rowcount

    return await transact(engine, write)


def absent(response_id: str) -> Absent:
    return Absent(no_response(response_id))


def _named(namespace: str, response_id: str) -> tuple[Any, Any]:
    return ResponseRow.response_id == response_id, ResponseRow.namespace == namespace


def _unexpired(now_unix_ms: int) -> Any:
    return ResponseRow.expires_unix_ms > now_unix_ms

"""API keys: `weft-<id>-<secret>`. The key is shown once. The store keeps its SHA-256.

A plain SHA-256 is enough: the secret has 256 random bits, so guessing is hopeless, and a slow hash is not needed.
"""

import hashlib
import json
import secrets
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from weft.domain.routes import KeyScope
from weft.store.models import ApiKeyRow
from weft.store.transactions import insert_into, transact

MAX_NOTE = 256


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights of a key. `models`: names, or patterns with * and ?; none: every model of the namespace."""

    namespace: str  # "" with scope PLATFORM
    scope: KeyScope = KeyScope.INFERENCE
    models: tuple[str, ...] = ()
    expires_unix_ms: int = 0  # 0: never


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key in the store. `key_id` is public. `key_hash` is the hex SHA-256 of the whole key."""

    key_id: str
    key_hash: str
    grant: Grant
    note: str
    created_unix_ms: int
    revoked_unix_ms: int | None

    def in_force(self, now_unix_ms: int) -> bool:
        """Return whether the key is neither revoked nor expired."""
        expires = self.grant.expires_unix_ms
        return self.revoked_unix_ms is None and (not expires or now_unix_ms < expires)


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new key, shown to its owner once."""

    key: str
    key_id: str


def draw_key() -> NewKey:
    """Return a new random key: an id of 8 hex digits (public), a secret of 256 bits."""
    key_id = secrets.token_hex(4)
    return NewKey(f"weft-{key_id}-{secrets.token_urlsafe(32)}", key_id)


def key_hash(key: str) -> str:
    """Return the hex SHA-256 of a key, for comparison by the gateway."""
    return hashlib.sha256(key.encode()).hexdigest()


async def create(engine: AsyncEngine, grant: Grant, note: str, *, now_unix_ms: int) -> NewKey:
    """Draw and store a key. A taken id (1 in 4 billion) is drawn again.

    Raises StoreUnavailable; then the key may be stored, but it was never shown.
    """
    while True:
        new = draw_key()
        row = {
            "key_id": new.key_id,
            "key_hash": key_hash(new.key),
            "namespace": grant.namespace,
            "scope": grant.scope.value,
            "models": json.dumps(grant.models),
            "expires_unix_ms": grant.expires_unix_ms,
            "note": note[:MAX_NOTE],
            "created_unix_ms": now_unix_ms,
            "revoked_unix_ms": None,
        }
        if await transact(engine, lambda connection, row=row: _insert(connection, row)):
            return new


async def revoke(engine: AsyncEngine, key_id: str, *, now_unix_ms: int) -> bool:
    """Revoke a key. Return False if the key does not exist. Revoking twice is harmless. Raises StoreUnavailable."""
    mine = update(ApiKeyRow).where(ApiKeyRow.key_id == key_id)

    async def write(connection: AsyncConnection) -> bool:
        await connection.execute(mine.where(ApiKeyRow.revoked_unix_ms.is_(None)).values(revoked_unix_ms=now_unix_ms))
        await connection.execute(mine.where(ApiKeyRow.withdrawn).values(withdrawn=False))  # now a person's decision
        key_row = await connection.execute(select(ApiKeyRow.key_id).where(ApiKeyRow.key_id == key_id))
        return key_row.first() is not None

    return await transact(engine, write)


async def all_keys(engine: AsyncEngine) -> list[ApiKey]:
    """List every key, including revoked keys, oldest first. Raises StoreUnavailable."""
    query = select(ApiKeyRow.__table__).order_by(ApiKeyRow.created_unix_ms, ApiKeyRow.key_id)

    async def read(connection: AsyncConnection) -> list[ApiKey]:
        return [key_of(row) for row in (await connection.execute(query)).mappings()]

    return await transact(engine, read)


def key_of(row: Any) -> ApiKey:
    """Return the key in a row."""
    scope, models = KeyScope(row["scope"]), tuple(json.loads(row["models"]))
    grant = Grant(row["namespace"], scope, models, row["expires_unix_ms"])
    return ApiKey(row["key_id"], row["key_hash"], grant, row["note"], row["created_unix_ms"], row["revoked_unix_ms"])


async def _insert(connection: AsyncConnection, row: dict[str, Any]) -> bool:
    """Insert a row. Return False if its id is taken."""
    insert = insert_into(connection, ApiKeyRow).on_conflict_do_nothing()
    return (await connection.execute(insert.returning(ApiKeyRow.key_id), row)).first() is not None

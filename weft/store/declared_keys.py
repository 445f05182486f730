"""Keys declared by objects of a cluster: by owner (the object's uid), identified by their hashes.

An owner has at most one key in force. A new declaration replaces the previous key, in one transaction. A repeated
declaration changes nothing. An owner may declare a withdrawn key again. A key revoked by a person stays revoked. An
owner cannot change keys of other owners, or keys without an owner.

Their limits apply in addition to people's limits for the key. Rules of a subject are distinguished by model, and rules
of objects have the pattern for every model.
"""

import json
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from weft.domain.limits import LimitRule
from weft.store import limits
from weft.store.keys import MAX_NOTE, Grant, draw_key, key_of
from weft.store.models import ApiKeyRow, LimitRow
from weft.store.transactions import insert_into, transact

EVERY_MODEL = "*"
_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent", "tokens_per_day")


@dataclass(frozen=True, slots=True)
class Declaration:
    """A key declared by its owner. `limits`: only its numbers count. The store sets subject and model."""

    owner: str
    key_hash: str
    grant: Grant
    note: str = ""
    limits: LimitRule = LimitRule("", EVERY_MODEL)  # noqa: RUF009 (frozen)


@dataclass(frozen=True, slots=True)
class DeclaredKey:
    """A declared key in the store: in force, or revoked by a person."""

    key_id: str
    declaration: Declaration
    revoked: bool


class Refusal(Enum):
    """The reason for a refused key. The owner then has no key in force."""

    TAKEN = auto()  # another owner, or nobody, has this key already
    REVOKED = auto()  # a person has revoked it


async def declare(engine: AsyncEngine, new: Declaration, *, now_unix_ms: int) -> DeclaredKey | Refusal:
    """Make the declared key the owner's only key in force. Raises StoreUnavailable, Unstorable."""

    async def write(connection: AsyncConnection) -> DeclaredKey | Refusal:
        await _withdraw(connection, new.owner, now_unix_ms, but=new.key_hash)
        query = select(ApiKeyRow.__table__).where(ApiKeyRow.key_hash == new.key_hash).with_for_update()
        stored = (await connection.execute(query)).mappings().first()
        if stored is None:
            key_id = await _insert(connection, new, now_unix_ms)
        elif stored["owner"] != new.owner:
            return Refusal.TAKEN
        elif stored["revoked_unix_ms"] is not None and not stored["withdrawn"]:
            return Refusal.REVOKED
        else:
            key_id = stored["key_id"]
            await _update(connection, stored, new)
        rule = replace(new.limits, subject=f"key/{key_id}", model=EVERY_MODEL, spent_until_unix_ms=0)
        await _set_limits(connection, rule, now_unix_ms)
        return DeclaredKey(key_id, replace(new, note=new.note[:MAX_NOTE], limits=rule), revoked=False)

    return await transact(engine, write)


async def withdraw(engine: AsyncEngine, owner: str, *, now_unix_ms: int) -> None:
    """Revoke the owner's key in force, if it has one. Raises StoreUnavailable."""
    await transact(engine, lambda connection: _withdraw(connection, owner, now_unix_ms))


async def all_declared(engine: AsyncEngine) -> list[DeclaredKey]:
    """List every declared key in force (or expired), and every declared key revoked by a person. Raises
    StoreUnavailable."""
    declared = select(ApiKeyRow.__table__).where(
        ApiKeyRow.owner != "", or_(ApiKeyRow.revoked_unix_ms.is_(None), ~ApiKeyRow.withdrawn)
    )
    rules = select(LimitRow.subject, *(getattr(LimitRow, name) for name in _LIMITS)).where(
        LimitRow.model == EVERY_MODEL, LimitRow.subject.startswith("key/")
    )

    async def read(connection: AsyncConnection) -> list[DeclaredKey]:
        by_subject = {
            row["subject"]: LimitRule(**row, model=EVERY_MODEL) for row in (await connection.execute(rules)).mappings()
        }
        rows = (await connection.execute(declared.order_by(ApiKeyRow.created_unix_ms, ApiKeyRow.key_id))).mappings()
        return [_declared(row, by_subject) for row in rows]

    return await transact(engine, read)


def _declared(row: Any, rules: dict[str, LimitRule]) -> DeclaredKey:
    key, subject = key_of(row), f"key/{row['key_id']}"
    rule = rules.get(subject, LimitRule(subject, EVERY_MODEL))
    return DeclaredKey(
        key.key_id, Declaration(row["owner"], key.key_hash, key.grant, key.note, rule), key.revoked_unix_ms is not None
    )


async def _withdraw(connection: AsyncConnection, owner: str, now_unix_ms: int, *, but: str = "") -> None:
    mine = (ApiKeyRow.owner == owner, ApiKeyRow.key_hash != but, ApiKeyRow.revoked_unix_ms.is_(None))
    revocation = (
        update(ApiKeyRow)
        .where(*mine)
        .values(revoked_unix_ms=now_unix_ms, withdrawn=True, changes=ApiKeyRow.changes + 1)
    )
    for (key_id,) in (await connection.execute(revocation.returning(ApiKeyRow.key_id))).all():
        await limits.put_within(connection, LimitRule(f"key/{key_id}", EVERY_MODEL), now_unix_ms=now_unix_ms)


async def _insert(connection: AsyncConnection, new: Declaration, now_unix_ms: int) -> str:
    """Store a new key under a random id. Return the id. A taken id is drawn again."""
    insert = insert_into(connection, ApiKeyRow).on_conflict_do_nothing(index_elements=[ApiKeyRow.key_id])
    while True:
        key_id = draw_key().key_id
        row = {"key_id": key_id, "key_hash": new.key_hash, "owner": new.owner, "created_unix_ms": now_unix_ms}
        if (await connection.execute(insert.returning(ApiKeyRow.key_id), row | _granted(new))).first() is not None:
            return key_id


async def _update(connection: AsyncConnection, stored: Any, new: Declaration) -> None:
    columns = {**_granted(new), "revoked_unix_ms": None, "withdrawn": False}
    if any(stored[name] != value for name, value in columns.items()):
        mine = update(ApiKeyRow).where(ApiKeyRow.key_id == stored["key_id"])
        await connection.execute(mine.values(**columns, changes=ApiKeyRow.changes + 1))


async def _set_limits(connection: AsyncConnection, rule: LimitRule, now_unix_ms: int) -> None:
    """Write the limits if they differ. Each write is a change for every gateway."""
    columns = [getattr(LimitRow, name) for name in _LIMITS]
    query = select(*columns).where(LimitRow.subject == rule.subject, LimitRow.model == rule.model)
    stored = (await connection.execute(query)).first()
    if tuple(stored or (0,) * len(_LIMITS)) != tuple(getattr(rule, name) for name in _LIMITS):
        await limits.put_within(connection, rule, now_unix_ms=now_unix_ms)


def _granted(new: Declaration) -> dict[str, Any]:
    grant = new.grant
    return {
        "namespace": grant.namespace,
        "scope": grant.scope.value,
        "models": json.dumps(grant.models),
        "expires_unix_ms": grant.expires_unix_ms,
        "note": new.note[:MAX_NOTE],
    }

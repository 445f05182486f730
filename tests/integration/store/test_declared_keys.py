"""Keys that objects declare: by owner, each at most one in force, and nobody else's is touched."""

from dataclasses import replace

import pytest

from weft.domain.limits import LimitRule
from weft.domain.routes import KeyScope
from weft.store import keys, limits
from weft.store.access_mark import access_mark
from weft.store.declared_keys import Declaration, DeclaredKey, Refusal, all_declared, declare, withdraw

A, B = "a" * 64, "b" * 64
MINE = Declaration("uid", A, keys.Grant("acme"), "APIKey acme/ci")


async def made(engine, new: Declaration, now: int = 1) -> DeclaredKey:
    found = await declare(engine, new, now_unix_ms=now)
    assert isinstance(found, DeclaredKey)
    return found


async def in_force(engine, now: int = 100) -> list[str]:
    return sorted(key.key_hash for key in await keys.all_keys(engine) if key.in_force(now))


async def test_declaring_twice_is_declaring_once(engine):
    first, mark = await made(engine, MINE), (await access_mark(engine)).keys
    assert await made(engine, MINE, now=2) == first
    assert (await access_mark(engine)).keys == mark
    assert await all_declared(engine) == [first]


async def test_another_key_of_the_owner_takes_the_place_of_the_one_before(engine):
    first = await made(engine, MINE)
    second = await made(engine, replace(MINE, key_hash=B))
    assert await in_force(engine) == [B]
    assert first.key_id != second.key_id
    assert await all_declared(engine) == [second]


async def test_grant_and_limits_are_changed_in_place_and_each_change_is_seen(engine):
    first = await made(engine, replace(MINE, limits=LimitRule("", "*", requests_per_minute=5)))
    assert await limits.all_rules(engine) == [LimitRule(f"key/{first.key_id}", "*", requests_per_minute=5)]
    marks = [await access_mark(engine)]
    for grant in (keys.Grant("acme", KeyScope.METRICS), keys.Grant("acme", models=("x",), expires_unix_ms=9)):
        changed = await made(engine, replace(MINE, grant=grant))
        assert changed.key_id == first.key_id
        assert await all_declared(engine) == [changed]
        marks.append(await access_mark(engine))
    assert len(set(marks)) == 3
    assert not await limits.all_rules(engine)


async def test_limits_of_people_stay_beside_those_of_the_object(engine):
    first = await made(engine, replace(MINE, limits=LimitRule("", "*", concurrent=5)))
    by_hand = LimitRule(f"key/{first.key_id}", concurrent=1)
    await limits.put(engine, by_hand, now_unix_ms=1)
    await made(engine, MINE)
    await withdraw(engine, "uid", now_unix_ms=2)
    assert await limits.all_rules(engine) == [by_hand]


async def test_what_is_withdrawn_can_be_declared_again_under_its_id(engine):
    first = await made(engine, MINE)
    await withdraw(engine, "uid", now_unix_ms=2)
    await withdraw(engine, "uid", now_unix_ms=3)
    assert await in_force(engine) == await all_declared(engine) == []
    assert await made(engine, MINE, now=4) == first
    assert await in_force(engine) == [A]


@pytest.mark.parametrize("withdrawn", [False, True])
async def test_what_a_person_has_revoked_stays_revoked(engine, withdrawn):
    first = await made(engine, MINE)
    if withdrawn:
        await withdraw(engine, "uid", now_unix_ms=2)
    assert await keys.revoke(engine, first.key_id, now_unix_ms=3)
    assert [key.revoked for key in await all_declared(engine)] == [True]
    assert await declare(engine, MINE, now_unix_ms=4) is Refusal.REVOKED
    assert await in_force(engine) == []


async def test_a_key_of_another_owner_or_of_none_is_not_taken_and_the_own_one_ends(engine):
    await made(engine, MINE)
    await made(engine, replace(MINE, owner="other", key_hash=B, grant=keys.Grant("globex")))
    assert await declare(engine, replace(MINE, key_hash=B), now_unix_ms=2) is Refusal.TAKEN
    assert await in_force(engine) == [B]
    by_hand = await keys.create(engine, keys.Grant("globex"), "", now_unix_ms=1)
    theirs = keys.key_hash(by_hand.key)
    assert await declare(engine, replace(MINE, key_hash=theirs), now_unix_ms=2) is Refusal.TAKEN
    await withdraw(engine, "uid", now_unix_ms=3)
    assert await in_force(engine) == sorted([B, theirs])

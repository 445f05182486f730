import re

import pytest

from weft.store import keys
from weft.store.access_mark import access_mark
from weft.store.errors import StoreUnavailable


async def test_the_key_is_shown_once_and_only_its_hash_is_stored(engine, tmp_path):
    new = await keys.create(engine, keys.Grant("acme"), "for the demo", now_unix_ms=7)
    [stored] = await keys.all_keys(engine)
    assert stored == keys.ApiKey(new.key_id, keys.key_hash(new.key), keys.Grant("acme"), "for the demo", 7, None)
    secret = new.key.removeprefix(f"weft-{new.key_id}-")
    async with engine.connect() as connection:
        content = str((await connection.exec_driver_sql("SELECT * FROM api_keys")).fetchall())
    await engine.dispose()
    content += "".join(file.read_bytes().decode("latin-1") for file in tmp_path.iterdir())  # SQLite's files
    assert secret not in content
    assert stored.key_hash in content


async def test_a_revoked_key_stays_known_and_revoking_twice_keeps_the_first_time(engine):
    new = await keys.create(engine, keys.Grant("acme"), "", now_unix_ms=1)
    assert await keys.revoke(engine, new.key_id, now_unix_ms=5)
    assert await keys.revoke(engine, new.key_id, now_unix_ms=9)
    assert [key.revoked_unix_ms for key in await keys.all_keys(engine)] == [5]
    assert not await keys.revoke(engine, "unknown", now_unix_ms=9)


async def test_an_id_that_is_taken_is_drawn_again(engine, monkeypatch):
    first = await keys.create(engine, keys.Grant("acme"), "", now_unix_ms=1)
    drawn = iter([keys.NewKey(f"weft-{first.key_id}-other", first.key_id), keys.NewKey("weft-ffff0000-x", "ffff0000")])
    monkeypatch.setattr(keys, "draw_key", lambda: next(drawn))
    assert (await keys.create(engine, keys.Grant("acme"), "", now_unix_ms=2)).key_id == "ffff0000"


async def test_the_version_grows_with_every_change_of_the_keys_in_force_and_with_nothing_else(engine):
    versions = [(await access_mark(engine)).keys]
    new = await keys.create(engine, keys.Grant("acme"), "", now_unix_ms=1)
    versions.append((await access_mark(engine)).keys)
    await keys.revoke(engine, new.key_id, now_unix_ms=2)
    versions.append((await access_mark(engine)).keys)
    await keys.revoke(engine, new.key_id, now_unix_ms=3)
    await keys.revoke(engine, "unknown", now_unix_ms=3)
    assert (await access_mark(engine)).keys == versions[-1]
    assert versions == sorted(set(versions))


def test_keys_have_the_form_that_people_can_grep_for():
    drawn = [keys.draw_key() for _ in range(100)]
    for new in drawn:
        assert re.fullmatch(r"weft-[0-9a-f]{8}-[A-Za-z0-9_-]{43}", new.key)
        assert new.key.split("-")[1] == new.key_id
        assert re.fullmatch(r"[0-9a-f]{64}", keys.key_hash(new.key))
    assert len({new.key for new in drawn}) == 100


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
@pytest.mark.parametrize("setting", ["max_page_count = 1", "query_only = 1"], ids=["full disk", "unwritable file"])
async def test_a_file_that_takes_no_more_refuses_new_keys_and_keeps_the_known_keys(engine, setting):
    known = await keys.create(engine, keys.Grant("acme"), "", now_unix_ms=1)

    async def fill() -> None:
        for _ in range(100):
            await keys.create(engine, keys.Grant("acme"), "x" * 500, now_unix_ms=2)

    async with engine.connect() as connection:
        await connection.exec_driver_sql(f"PRAGMA {setting}")
    with pytest.raises(StoreUnavailable):
        await fill()
    await engine.dispose()  # the setting is the connection's
    present = {key.key_id for key in await keys.all_keys(engine)}
    assert known.key_id in present
    new = await keys.create(engine, keys.Grant("acme"), "", now_unix_ms=3)
    assert {key.key_id for key in await keys.all_keys(engine)} == present | {new.key_id}

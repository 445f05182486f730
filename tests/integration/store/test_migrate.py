import asyncio
import threading

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from harness.waiting import PATIENCE_S
from weft.store import migrate
from weft.store.database import open_database, sqlite_url
from weft.store.errors import BadMigration, DatabaseDamaged, NewerRevision, StoreUnavailable
from weft.store.models import Base
from weft.store.transactions import transact


async def tables(engine):
    async with engine.connect() as connection:
        return set(await connection.run_sync(lambda c: inspect(c).get_table_names()))


async def test_upgrade_downgrade_upgrade_ends_where_it_began(empty):
    assert await migrate.upgrade(empty) == migrate.head()
    full = await tables(empty)
    assert full == {*Base.metadata.tables, "alembic_version"}
    assert await migrate.upgrade(empty, "base", command.downgrade) == ""
    assert await tables(empty) == {"alembic_version"}
    assert await migrate.upgrade(empty) == migrate.head()
    assert await tables(empty) == full


async def test_upgrading_twice_changes_nothing(engine):
    before = await tables(engine)
    assert await migrate.upgrade(engine) == migrate.head()
    assert await tables(engine) == before


async def test_the_migrations_make_exactly_the_models(engine):
    def difference(connection):
        return compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), Base.metadata)

    async with engine.connect() as connection:
        assert await connection.run_sync(difference) == []


async def test_a_newer_revision_is_refused_and_left_alone(engine):
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    before = await tables(engine)
    with pytest.raises(NewerRevision) as refusal:
        await migrate.upgrade(engine)
    assert refusal.value.revision == "9999"
    assert "9999" in str(refusal.value)
    assert await tables(engine) == before


async def test_a_failed_migration_leaves_the_database_as_it_was(empty, monkeypatch):
    def half_way(config: Config, target: str) -> None:
        command.upgrade(config, target)
        config.attributes["connection"].execute(text("INSERT INTO no_such_table VALUES (1)"))

    with pytest.raises((BadMigration, StoreUnavailable)):
        await migrate.upgrade(empty, "head", half_way)
    assert await tables(empty) == set()


async def test_a_database_that_cannot_be_opened_is_named(tmp_path):
    engine = open_database(sqlite_url(tmp_path / "missing" / "weft.sqlite"))
    with pytest.raises(StoreUnavailable, match=r"weft\.sqlite"):
        await migrate.upgrade(engine)
    await engine.dispose()
    for thread in threading.enumerate():  # the driver ends the thread of a refused connection in its own time
        if "_connection_worker_thread" in thread.name:
            await asyncio.to_thread(thread.join, PATIENCE_S)
            assert not thread.is_alive()


async def test_a_damaged_file_is_named_at_the_start_and_in_use_and_works_again_once_restored(tmp_path):
    path = tmp_path / "weft.sqlite"
    engine = open_database(sqlite_url(path))
    await migrate.upgrade(engine)
    await engine.dispose()
    whole = path.read_bytes()
    path.write_bytes(b"\xff" * len(whole))
    with pytest.raises(DatabaseDamaged, match=r"put a backup in the file's place"):
        await transact(engine, lambda connection: connection.execute(text("SELECT count(*) FROM outcomes")))
    await engine.dispose()
    with pytest.raises(StoreUnavailable, match=r"weft\.sqlite.*put a backup in the file's place"):
        await migrate.upgrade(engine)
    await engine.dispose()
    path.write_bytes(whole)
    assert await migrate.upgrade(engine) == migrate.head()
    await engine.dispose()


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_sqlite_runs_with_wal_foreign_keys_and_a_busy_timeout(engine):
    async with engine.connect() as connection:
        for pragma, expected in (("journal_mode", "wal"), ("foreign_keys", 1), ("busy_timeout", 5_000)):
            assert (await connection.exec_driver_sql(f"PRAGMA {pragma}")).scalar_one() == expected

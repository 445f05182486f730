"""What only several writers, and a server that can go away, can show: races, repetitions, outages, kill -9."""

import asyncio
import itertools
import random
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
from sqlalchemy import URL, event, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from harness import stored
from harness.postgres import Postgres, needs_postgres
from harness.waiting import eventually, soon
from tests.integration.store.test_outcomes import NOW, outcome
from weft.domain.request import Outcome
from weft.store import database, fencing_terms, keys, migrate, outcomes
from weft.store.access_mark import access_mark
from weft.store.database import open_database, postgresql_url
from weft.store.errors import BadDatabaseUrl, StoreUnavailable, Unstorable
from weft.store.transactions import TRIES, transact

pytestmark = needs_postgres


@pytest.fixture
def dialect() -> str:
    return "postgresql"


@pytest.fixture
async def two(engine: AsyncEngine, url: URL) -> AsyncIterator[tuple[AsyncEngine, AsyncEngine]]:
    """Two engines, as two supervisors have the store open."""
    other = open_database(url)
    yield engine, other
    await other.dispose()


@pytest.fixture
def own(postgres: Postgres) -> Iterator[Postgres]:
    """The server, for tests that stop it: it runs again afterwards."""
    yield postgres
    if not postgres.running:
        postgres.start()


SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2)))


# ------------------------------------------------------------------------------------------------ several writers


@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
async def test_supervisors_that_start_together_upgrade_once(postgres: Postgres, url: URL, isolation: str) -> None:
    await postgres.execute(f"ALTER DATABASE {url.database} SET default_transaction_isolation = '{isolation}'")
    engines = [open_database(url) for _ in range(6)]
    reached = await asyncio.gather(*(migrate.upgrade(engine) for engine in engines))
    assert set(reached) == {migrate.head()}
    async with engines[0].connect() as connection:
        assert (await connection.execute(text("SELECT count(*) FROM alembic_version"))).scalar_one() == 1
    for engine in engines:
        await engine.dispose()


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "SERIALIZABLE"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_outcomes_that_several_supervisors_store_at_once_count_once(
    two: tuple[AsyncEngine, AsyncEngine], isolation: str, seed: int
) -> None:
    engines = [engine.execution_options(isolation_level=isolation) for engine in two]
    draw = random.Random(seed)
    rows = [outcome(f"r{i}", completion_tokens=i, namespace=f"n{i % 3}") for i in range(60)]
    batches = [draw.sample(rows, draw.randint(1, 40)) for _ in range(24)]

    async def store(engine: AsyncEngine, batches: list[list[Outcome]]) -> list[str]:
        """Store as a journal does: one batch after the other."""
        return [new for batch in batches for new in await outcomes.record(engine, batch, now_unix_ms=NOW)]

    told = await asyncio.gather(*(store(engine, batches[i::2]) for i, engine in enumerate(engines)))
    seen = {row.request_id: row.completion_tokens for batch in batches for row in batch}
    assert Counter(itertools.chain(*told)) == Counter(seen.keys()), "each is new exactly once"
    usage = await stored.usage(two[0])
    assert sum(row.requests for row in usage) == len(seen) == await stored.count(two[0])
    assert sum(row.completion_tokens for row in usage) == sum(seen.values())


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_term_never_falls_whoever_raises_it(two: tuple[AsyncEngine, AsyncEngine], seed: int) -> None:
    draw, raised, seen = random.Random(seed), [0], [0]

    async def raise_some(engine: AsyncEngine) -> None:
        for term in draw.sample(range(1, 200), 25):
            await fencing_terms.raise_to(engine, term)
            raised.append(term)
            highest = await fencing_terms.highest(engine)
            assert highest >= term
            seen.append(highest)
            assert highest >= seen[-2]

    await asyncio.gather(*(raise_some(engine) for engine in two))
    assert await fencing_terms.highest(two[0]) == max(raised)


async def test_a_key_made_at_one_is_known_at_the_other(two: tuple[AsyncEngine, AsyncEngine]) -> None:
    made = await asyncio.gather(*(keys.create(two[i % 2], keys.Grant("acme"), "", now_unix_ms=i) for i in range(10)))
    assert {key.key_id for key in await keys.all_keys(two[0])} == {key.key_id for key in made}
    assert (await access_mark(two[0])).keys == (await access_mark(two[1])).keys == 10


# ------------------------------------------------------------------------------------------------ repetitions


async def _rows(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE race (id int PRIMARY KEY, n int)"))
        await connection.execute(text("INSERT INTO race VALUES (1, 0), (2, 0)"))


async def _sum(engine: AsyncEngine) -> int:
    async with engine.begin() as connection:
        return int((await connection.execute(text("SELECT sum(n) FROM race"))).scalar_one())


async def test_a_serialization_failure_is_run_again(two: tuple[AsyncEngine, AsyncEngine]) -> None:
    await _rows(two[0])
    both, runs = asyncio.Barrier(2), list[int]()

    async def add(connection: AsyncConnection) -> None:
        n = (await connection.execute(text("SELECT n FROM race WHERE id = 1"))).scalar_one()
        runs.append(n)
        if len(runs) <= 2:
            await both.wait()  # both have read before either writes
        await connection.execute(text("UPDATE race SET n = :n WHERE id = 1"), {"n": n + 1})

    strict = [engine.execution_options(isolation_level="SERIALIZABLE") for engine in two]
    await asyncio.gather(*(transact(engine, add) for engine in strict))
    assert await _sum(two[0]) == 2, "no addition is lost"
    assert sorted(runs) == [0, 0, 1]


async def test_a_deadlock_is_run_again(two: tuple[AsyncEngine, AsyncEngine]) -> None:
    await _rows(two[0])
    both, runs = asyncio.Barrier(2), list[int]()

    async def add_in_order(connection: AsyncConnection, order: tuple[int, int]) -> None:
        runs.append(order[0])
        for step, row in enumerate(order):
            await connection.execute(text("UPDATE race SET n = n + 1 WHERE id = :id"), {"id": row})
            if step == 0 and len(runs) <= 2:
                await both.wait()

    await asyncio.gather(
        transact(two[0], lambda connection: add_in_order(connection, (1, 2))),
        transact(two[1], lambda connection: add_in_order(connection, (2, 1))),
    )
    assert await _sum(two[0]) == 4
    assert len(runs) == 3, "one of them was the victim, once"


async def test_repetitions_are_bounded(engine: AsyncEngine) -> None:
    runs = list[None]()

    async def always_loses(connection: AsyncConnection) -> None:
        runs.append(None)
        await connection.execute(text("DO $$ BEGIN RAISE EXCEPTION 'lost' USING ERRCODE = '40001'; END $$"))

    with pytest.raises(StoreUnavailable, match="lost"):
        await transact(engine, always_loses)
    assert len(runs) == TRIES


async def test_a_row_that_the_database_refuses_is_told_apart_from_a_database_that_is_away(engine: AsyncEngine) -> None:
    async def too_long(connection: AsyncConnection) -> None:
        await connection.execute(text("INSERT INTO terms VALUES (repeat('x', 99), 1)"))

    async def twice(connection: AsyncConnection) -> None:
        await connection.execute(text("INSERT INTO terms VALUES ('a', 1), ('a', 1)"))

    for work in (too_long, twice):
        with pytest.raises(Unstorable):
            await transact(engine, work)


# ------------------------------------------------------------------------------------------------ outages


@pytest.mark.slow
async def test_a_server_that_went_away_is_unavailable_and_found_again(own: Postgres, engine: AsyncEngine) -> None:
    await outcomes.record(engine, [outcome("before")], now_unix_ms=NOW)
    own.stop()
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await outcomes.record(engine, [outcome("during")], now_unix_ms=NOW)
    own.start()
    assert await outcomes.record(engine, [outcome("before"), outcome("after")], now_unix_ms=NOW) == {"after"}


async def test_a_server_that_does_not_answer_is_unavailable_in_bounded_time(
    own: Postgres, engine: AsyncEngine, url: URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "CONNECT_S", 0.5)
    monkeypatch.setattr(database, "STATEMENT_S", 0.5)
    hasty = open_database(url)
    await eventually(lambda: _raised(hasty, 1))  # it has a connection
    own.freeze()
    try:
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await soon(fencing_terms.raise_to(hasty, 2))
    finally:
        own.thaw()
    await eventually(lambda: _raised(hasty, 3))
    assert await fencing_terms.highest(engine) == 3
    await hasty.dispose()


async def _raised(hasty: AsyncEngine, term: int) -> bool:
    """With so little patience a slow machine needs more than one try."""
    try:
        await fencing_terms.raise_to(hasty, term)
    except StoreUnavailable:
        return False
    return True


async def test_kill_nine_of_the_server_loses_nothing_acknowledged_and_tears_no_batch(
    own: Postgres, engine: AsyncEngine
) -> None:
    """After each statement of a batch, and once while it is committed."""
    batches, left = 9, {(2, 1), (4, 2)}
    kept, statements, killer = 0, 0, threading.Thread(target=own.stop, args=(signal.SIGKILL,))

    def after_statement(*_: object) -> None:
        nonlocal statements
        statements += 1
        if (kept, statements) in left:
            left.remove((kept, statements))
            own.stop(signal.SIGKILL)

    def on_commit(_: object) -> None:
        if kept == 6 and killer.ident is None:
            killer.start()

    event.listen(engine.sync_engine, "after_cursor_execute", after_statement)
    event.listen(engine.sync_engine, "commit", on_commit)
    while kept < batches:
        statements = 0
        try:
            await outcomes.record(engine, [outcome(f"{kept}-{i}") for i in range(20)], now_unix_ms=NOW)
            kept += 1
        except StoreUnavailable:  # told again, as the journal does: kept once, whatever became of the first try
            if killer.ident:
                killer.join()
            own.start()
    assert not left
    killer.join()
    if not own.running:
        own.start()
    assert await stored.count(engine) == 20 * batches
    assert sum(row.requests for row in await stored.usage(engine)) == 20 * batches


# ------------------------------------------------------------------------------------------------ URLs


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+asyncpg"])
def test_the_usual_urls_are_taken(scheme: str) -> None:
    url = postgresql_url(f"{scheme}://weft:se%40cret@db.acme:5433/weft")
    assert (url.drivername, url.password, url.host, url.port) == ("postgresql+asyncpg", "se@cret", "db.acme", 5433)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not postgresql://USER:PASSWORD@HOST:PORT/DATABASE"),
        ("se-cret", "is not postgresql://USER:PASSWORD@HOST:PORT/DATABASE"),
        ("db.acme/weft", "is not postgresql://USER:PASSWORD@HOST:PORT/DATABASE"),
        ("postgresql:se-cret", "is not postgresql://USER:PASSWORD@HOST:PORT/DATABASE"),
        ("sqlite+aiosqlite:////tmp/shared.sqlite", "SQLite needs no URL"),
        ("mysql://u:se-cret@h/d", "it has to be postgresql://"),
    ],
)
def test_other_urls_are_refused_and_not_repeated(text: str, says: str) -> None:
    with pytest.raises(BadDatabaseUrl) as told:
        postgresql_url(text)
    assert says in str(told.value)
    assert "se-cret" not in str(told.value)


async def test_no_message_has_the_password(postgres: Postgres) -> None:
    engine = open_database(postgres.url("weft").set(username="nobody", password="se-cret"))
    with pytest.raises(StoreUnavailable, match="nobody") as told:
        await migrate.upgrade(engine)
    assert "se-cret" not in str(told.value)
    await engine.dispose()

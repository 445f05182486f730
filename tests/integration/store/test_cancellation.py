"""Callers that are cancelled: whoever comes next finds nothing locked, and a transaction whole or not at all."""

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Coroutine, Iterator

import pytest
from sqlalchemy import URL, event, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from harness.waiting import soon
from weft.store import database, transactions
from weft.store.database import close_database, open_database, turns_of
from weft.store.errors import StoreBusy
from weft.store.transactions import in_turn_of, transact

ONE = text("UPDATE one SET n = n + 1")
INSERT = text("INSERT INTO parts VALUES (:id, :part)")


@pytest.fixture(autouse=True)
def _uncollected() -> Iterator[None]:
    """What is held until the garbage collector comes shows."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
async def engine(empty: AsyncEngine) -> AsyncEngine:
    async def make_tables(connection: AsyncConnection) -> None:
        await connection.execute(text("CREATE TABLE one (n int)"))
        await connection.execute(text("INSERT INTO one VALUES (0)"))
        await connection.execute(text("CREATE TABLE parts (id int, part int)"))

    await transact(empty, make_tables)
    return empty


@pytest.fixture
async def other(engine: AsyncEngine, url: URL, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncEngine]:
    """Another process's, which does not wait for SQLite's file."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 0)
    opened = open_database(url)
    yield opened
    await close_database(opened)


async def write(engine: AsyncEngine, number: int) -> None:
    """Two rows, or none; and the one row that every transaction writes."""

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(ONE)
        await connection.execute(INSERT, {"id": number, "part": 1})
        await connection.execute(text("SELECT id FROM parts"))
        await connection.execute(INSERT, {"id": number, "part": 2})

    await transact(engine, work)


async def assert_free(other: AsyncEngine) -> None:
    """Nobody's transaction is open that writes."""

    async def lock(connection: AsyncConnection) -> None:
        if connection.dialect.name == "postgresql":
            await connection.execute(text("SELECT n FROM one FOR UPDATE NOWAIT"))

    await transact(other, lock)


async def parts(other: AsyncEngine) -> dict[int, int]:
    """How many parts each number has."""

    async def read(connection: AsyncConnection) -> dict[int, int]:
        found = await connection.execute(text("SELECT id, count(*) AS parts FROM parts GROUP BY id"))
        return {row.id: row.parts for row in found}

    return await transact(other, read)


@pytest.mark.parametrize("at", ["UPDATE", "INSERT", "SELECT", "COMMIT"])
async def test_a_caller_that_is_cancelled_at_a_statement_leaves_nothing_locked(
    engine: AsyncEngine, other: AsyncEngine, at: str
) -> None:
    writing = asyncio.create_task(write(engine, 1))

    def before_statement(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith(at):
            writing.cancel()

    def before_commit(_connection: object) -> None:
        if at == "COMMIT":
            writing.cancel()

    event.listen(engine.sync_engine, "before_cursor_execute", before_statement)
    event.listen(engine.sync_engine, "commit", before_commit)
    with pytest.raises(asyncio.CancelledError):
        await soon(writing)
    await assert_free(other)
    assert (await parts(other)).get(1) in (None, 2)


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.long)])
async def test_callers_cancelled_at_any_instant_leave_nothing_locked(
    engine: AsyncEngine, other: AsyncEngine, count: int
) -> None:
    draw = random.Random(count)
    begun = time.monotonic()
    await write(engine, 0)
    usual_s, whole = time.monotonic() - begun, {0}
    for number in range(1, count):
        writing = asyncio.create_task(write(engine, number))
        await asyncio.wait((writing,), timeout=draw.uniform(0, usual_s))
        if not writing.cancel():
            whole.add(number)
        await asyncio.wait((writing,))
        await assert_free(other)
        if number % 100 == 0:
            gc.collect()
    found = await parts(other)
    assert set(found.values()) == {2}
    assert whole <= found.keys()


@pytest.fixture
async def slow(engine: AsyncEngine) -> AsyncIterator["Slow"]:
    yield (made := Slow())
    made.go_on.set()


class Slow:
    """Work that stands in its transaction until it is told to go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, connection: AsyncConnection) -> None:
        await connection.execute(INSERT, {"id": 1, "part": 1})
        self.begun.set()
        await self.go_on.wait()
        await connection.execute(INSERT, {"id": 1, "part": 2})


async def test_a_deadline_ends_its_caller_at_the_end_of_the_transaction(
    engine: AsyncEngine, other: AsyncEngine, slow: Slow
) -> None:
    deadline = asyncio.timeout(None)

    async def write_in_time() -> None:
        async with deadline:
            await transact(engine, slow)

    told = asyncio.create_task(write_in_time())
    await soon(slow.begun.wait())
    deadline.reschedule(0)
    await asyncio.wait((told,), timeout=0.05)
    assert not told.done()
    slow.go_on.set()
    with pytest.raises(TimeoutError):
        await soon(told)
    assert await parts(other) == {1: 2}


async def test_a_transaction_that_hangs_is_rolled_back_after_a_while(
    engine: AsyncEngine, other: AsyncEngine, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "LEAVE_S", 0.01)
    writing = asyncio.create_task(transact(engine, slow))
    await soon(slow.begun.wait())
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(writing)
    await assert_free(other)
    assert await parts(other) == {}


async def of_tenant(tenant: str, work: Coroutine[None, None, None]) -> None:
    with in_turn_of(tenant):
        await work


async def test_a_burst_of_a_tenant_delays_another_by_one_transaction_and_never_has_every_connection(
    engine: AsyncEngine, slow: Slow
) -> None:
    order, places = list[str](), turns_of(engine).places

    async def note(tenant: str, work: Coroutine[None, None, None]) -> None:
        await of_tenant(tenant, work)
        order.append(tenant)

    burst = [asyncio.create_task(note("acme", transact(engine, slow))) for _ in range(3 * places)]
    await soon(slow.begun.wait())
    other = asyncio.create_task(note("globex", write(engine, 2)))
    if places > 1:
        await soon(other)
        assert order == ["globex"]
    slow.go_on.set()
    await soon(asyncio.gather(*burst, other))
    assert order.index("globex") <= 1


async def test_who_waits_for_a_turn_gives_it_up_or_hears_that_the_store_is_busy(
    engine: AsyncEngine, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = turns_of(engine).places
    monkeypatch.setattr(transactions, "TURN_S", 0.01)
    holding = [asyncio.create_task(of_tenant(f"tenant-{place}", transact(engine, slow))) for place in range(turns)]
    await soon(slow.begun.wait())
    with pytest.raises(StoreBusy, match="earlier transactions took more than"):
        await write(engine, 2)
    monkeypatch.setattr(transactions, "TURN_S", 600.0)
    waiting = asyncio.create_task(write(engine, 3))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(waiting)
    slow.go_on.set()
    await soon(asyncio.gather(*holding))
    assert await parts(engine) == {1: 2 * turns}


async def test_a_store_is_closed_when_its_transactions_are_over(engine: AsyncEngine, url: URL, slow: Slow) -> None:
    writing = asyncio.create_task(transact(engine, slow))
    await soon(slow.begun.wait())
    closing = asyncio.create_task(close_database(engine))
    await asyncio.sleep(0)
    slow.go_on.set()
    await soon(closing)
    assert writing.done()
    again = open_database(url)
    assert await parts(again) == {1: 2}
    await close_database(again)

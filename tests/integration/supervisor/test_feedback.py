import asyncio
import contextlib
import signal
from collections.abc import Sequence
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from harness.postgres import DIALECTS, needs_postgres
from harness.waiting import eventually, soon
from weft.store import fencing_terms, migrate, outcomes
from weft.store.database import open_database, sqlite_url
from weft.wire.v1 import common_pb2, predictor_pb2
from weft_supervisor import feedback
from weft_supervisor.feedback import CHUNK, MAX_WAITING, Journal, Pending


def outcome(request_id: str, **fields) -> common_pb2.Outcome:
    plain = {
        "pool": "acme/pool",
        "namespace": "acme",
        "model_name": "acme/upper",
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "finish_reason": common_pb2.FINISH_REASON_EOS,
        "prompt_text": "the secret prompt",
        "finished_unix_ms": 1_700_000_000_000,
    }
    return common_pb2.Outcome(request_id=request_id, **(plain | fields))


@pytest.fixture(params=DIALECTS)
async def store(request, tmp_path):
    """Both databases: what is fed back depends on what was stored."""
    with contextlib.ExitStack() as stack:
        url = sqlite_url(tmp_path / "weft.sqlite")
        if request.param != "sqlite":
            url = stack.enter_context(request.getfixturevalue("postgres").database())
        engine = open_database(url)
        await migrate.upgrade(engine)
        yield engine
        await engine.dispose()


async def until(holds) -> None:
    """For what has no event."""

    async def asked() -> bool:
        return holds()

    await eventually(asked)


async def test_an_outcome_is_stored_then_acknowledged_then_taught(world, store):
    await world.scheduler.next("hello")
    world.scheduler.send(outcome=outcome("r1"))
    assert list((await world.scheduler.next("outcome_ack")).request_ids) == ["r1"]
    assert await outcomes.count(store) == 1
    learned = await world.predictor.next()
    assert (learned.request_id, learned.prompt_text) == ("r1", "the secret prompt")


async def test_an_outcome_told_again_is_acknowledged_again_and_counted_once(world, store):
    await world.scheduler.next("hello")
    for _ in range(2):
        world.scheduler.send(outcome=outcome("r1"))
        assert list((await world.scheduler.next("outcome_ack")).request_ids) == ["r1"]
    [usage] = await outcomes.usage(store, since=date(2000, 1, 1))
    assert (usage.requests, usage.completion_tokens) == (1, 5)


async def test_the_prompt_is_never_stored(world, store, tmp_path):
    await world.scheduler.next("hello")
    world.scheduler.send(outcome=outcome("r1"))
    await world.scheduler.next("outcome_ack")
    async with store.connect() as connection:
        rows = str((await connection.execute(text("SELECT * FROM outcomes"))).fetchall())
    files = [file.read_bytes() for file in tmp_path.iterdir()]  # SQLite's
    assert "acme/upper" in rows
    assert "secret prompt" not in rows
    assert not any(b"secret prompt" in content for content in files)


@needs_postgres
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_outcomes_wait_for_a_server_that_dies_and_each_counts_once(postgres, kept, number, monkeypatch):
    """Whether a commit that the outage cut off happened is not known: it is stored again, and counts once."""
    monkeypatch.setattr(feedback, "PAUSE_MAX_S", 0.1)
    with postgres.database() as url:
        engine = open_database(url)
        await migrate.upgrade(engine)
        journal = Journal(engine, on_stored=kept.on_stored, on_room=lambda: None)
        running = asyncio.create_task(journal.run(keep_days=30))
        for i in range(2_000):
            assert journal.put(outcome(f"r{i}"))
        await soon(kept.some.wait())
        await asyncio.to_thread(postgres.stop, number)
        journal.raise_term(7)
        await until(lambda: journal.trouble is not None)
        assert journal.trouble.startswith("store: ")
        await asyncio.to_thread(postgres.start)
        await soon(journal.drained())
        assert sorted(kept.stored) == sorted(f"r{i}" for i in range(2_000))
        [usage] = await outcomes.usage(engine, since=date(2000, 1, 1))
        assert (usage.requests, await outcomes.count(engine), await fencing_terms.highest(engine)) == (2_000, 2_000, 7)
        assert journal.trouble is None
        journal.close()
        await soon(running)
        await engine.dispose()


async def test_what_the_predictor_has_not_acknowledged_is_told_on_its_next_stream(world):
    world.predictor.acknowledges = False
    await world.scheduler.next("hello")
    world.scheduler.send(outcome=outcome("r1"))
    assert (await world.predictor.next()).request_id == "r1"
    world.predictor.acknowledges = True
    world.predictor.outbox.close()
    assert (await world.predictor.next()).request_id == "r1"


class Kept:
    def __init__(self) -> None:
        self.stored: list[str] = []
        self.some = asyncio.Event()  # a part of them is stored
        self.rooms: list[int] = []  # how many were stored when there was room again

    def on_stored(self, batch: Sequence[common_pb2.Outcome]) -> None:
        self.stored += [outcome.request_id for outcome in batch]
        if len(self.stored) >= 400:
            self.some.set()


@pytest.fixture
async def kept():
    return Kept()


@pytest.fixture
async def journal(store, kept):
    journal = Journal(store, on_stored=kept.on_stored, on_room=lambda: kept.rooms.append(len(kept.stored)))
    running = asyncio.create_task(journal.run(keep_days=30))
    yield journal
    journal.close()
    await soon(running)


async def test_many_outcomes_go_in_few_transactions_and_all_arrive(journal, kept, store):
    for i in range(1_000):
        assert journal.put(outcome(f"r{i}"))
    await soon(journal.drained())
    assert kept.stored == [f"r{i}" for i in range(1_000)]
    assert await outcomes.count(store) == 1_000


async def test_the_highest_term_is_written(journal, store):
    journal.raise_term(5)
    journal.raise_term(4)
    await soon(journal.drained())
    assert await fencing_terms.highest(store) == 5


async def test_a_store_out_of_reach_acknowledges_nothing_says_so_and_goes_on_when_it_is_back(journal, kept, store):
    async with store.begin() as connection:
        await connection.execute(text("ALTER TABLE outcomes RENAME TO away"))
    journal.put(outcome("r1"))
    await until(lambda: journal.trouble is not None)
    assert "outcomes" in journal.trouble
    assert kept.stored == []
    async with store.begin() as connection:
        await connection.execute(text("ALTER TABLE away RENAME TO outcomes"))
    await soon(journal.drained())
    assert kept.stored == ["r1"]
    assert journal.trouble is None


async def test_a_full_journal_takes_nothing_more(store, kept):
    idle = Journal(store, on_stored=kept.on_stored, on_room=lambda: None)
    assert all(idle.put(outcome(str(i))) for i in range(MAX_WAITING))
    assert not idle.put(outcome("one too many"))
    assert idle.put(outcome("0")), "one that waits already is no news"


async def test_a_journal_that_refused_says_once_when_half_of_it_is_empty(journal, kept, monkeypatch):
    monkeypatch.setattr("weft_supervisor.feedback.MAX_WAITING", 600)
    assert all(journal.put(outcome(str(i))) for i in range(600))
    assert not journal.put(outcome("refused"))
    await soon(journal.drained())
    assert kept.rooms == [400]


async def test_what_a_full_journal_refused_is_told_again_on_a_new_stream(world, monkeypatch):
    monkeypatch.setattr("weft_supervisor.feedback.MAX_WAITING", 1)
    await world.scheduler.next("hello")
    world.server.journal.put(outcome("r1"))
    assert not world.server.journal.put(outcome("r2"))
    await world.scheduler.next("hello")
    world.scheduler.send(outcome=outcome("r2"))
    while "r2" not in (await world.scheduler.next("outcome_ack")).request_ids:
        pass


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=80), st.integers(1, 12))
def test_pending_holds_the_latest_unacknowledged_outcomes_within_its_bound(steps, limit):
    pending, model = Pending(limit), dict[str, None]()
    for add, number in steps:
        name = f"r{number}"
        if add:
            pending.add([outcome(name)])
            model.setdefault(name)
            if len(model) > limit:
                del model[next(iter(model))]
        else:
            pending.acknowledge(predictor_pb2.ObserveAck(request_ids=[name]))
            model.pop(name, None)
    told = [message.outcomes for message in pending.messages()]
    assert [o.request_id for outcomes in told for o in outcomes] == list(model)
    assert all(0 < len(outcomes) <= CHUNK for outcomes in told)


async def test_what_is_closed_in_the_middle_of_a_write_ends_after_it(store, kept, monkeypatch):
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def held(*_, **__) -> int:
        begun.set()
        await go_on.wait()
        return 0

    monkeypatch.setattr(outcomes, "forget", held)
    journal = Journal(store, on_stored=kept.on_stored, on_room=lambda: None)
    running = asyncio.create_task(journal.run(keep_days=30))
    await soon(begun.wait())
    journal.close()
    go_on.set()
    await soon(running)

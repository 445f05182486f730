import asyncio
import contextlib
import signal
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from harness import stored
from harness.postgres import DIALECTS, needs_postgres
from harness.stored import new_store
from harness.waiting import soon, until
from weft.domain.request import FinishReason, Outcome, OutcomeAck, OutcomeReport
from weft.domain.runner import SupervisorHello
from weft.store import fencing_terms, outcomes
from weft.store.database import sqlite_url
from weft.wire.codec.scheduling import outcome_bytes
from weft_supervisor import outcome_writer
from weft_supervisor.outcome_writer import CHUNK, MAX_WAITING, OutcomeWriter, UnackedFeedback


def outcome(request_id: str, record: bytes | None = None) -> OutcomeReport:
    written = Outcome(
        request_id, "acme/pool", "acme", "acme/upper", "sha256:1", 3, 5, FinishReason.EOS, 1_700_000_000_000
    )
    record = outcome_bytes(written) if record is None else record
    return OutcomeReport(request_id, "acme/pool", "sha256:1", 5, False, record)


@pytest.fixture(params=DIALECTS)
async def store(request, tmp_path):
    """Both databases: what is fed back depends on what was stored."""
    with contextlib.ExitStack() as stack:
        url = sqlite_url(tmp_path / "weft.sqlite")
        if request.param != "sqlite":
            url = stack.enter_context(request.getfixturevalue("postgres").database())
        engine = await new_store(url)
        yield engine
        await engine.dispose()


async def test_an_outcome_is_stored_then_acknowledged_each_time_then_taught_and_counts_once(world, store):
    await world.scheduler.next(SupervisorHello)
    for _ in range(2):
        world.scheduler.send(outcome("r1"))
        assert list((await world.scheduler.next(OutcomeAck)).request_ids) == ["r1"]
        assert await stored.count(store) == 1
    assert (await world.predictor.next()).request_id == "r1"
    [usage] = await stored.usage(store)
    assert (usage.requests, usage.completion_tokens) == (1, 5)


async def test_an_outcome_that_is_none_is_dropped_and_acknowledged_and_holds_no_other_up(world, store):
    await world.scheduler.next(SupervisorHello)
    for bad in (b"\xff\xff", b"\x0a\x02r1"):
        world.scheduler.send(outcome("bad", bad))
        assert (await world.scheduler.next(OutcomeAck)).request_ids == ("bad",)
    world.scheduler.send(outcome("r1"))
    assert (await world.scheduler.next(OutcomeAck)).request_ids == ("r1",)
    assert (await world.predictor.next()).request_id == "r1"
    assert await stored.count(store) == 1


@pytest.mark.slow
@needs_postgres
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_outcomes_wait_for_a_server_that_dies_and_each_counts_once(postgres, kept, number, monkeypatch):
    """Whether a commit that the outage cut off happened is not known: it is stored again, and counts once."""
    monkeypatch.setattr(outcome_writer, "MAX_PAUSE_S", 0.1)
    with postgres.database() as url:
        engine = await new_store(url)
        writer = writer_of(engine, kept)
        running = asyncio.create_task(writer.run())
        for i in range(2_000):
            assert writer.put(outcome(f"r{i}"))
        await soon(kept.some.wait())
        await asyncio.to_thread(postgres.stop, number)
        writer.raise_term(7)
        await until(lambda: writer.trouble is not None)
        assert writer.trouble.startswith("store: ")
        await asyncio.to_thread(postgres.start)
        await soon(writer.drained())
        assert sorted(kept.stored) == sorted(f"r{i}" for i in range(2_000))
        [usage] = await stored.usage(engine)
        assert (usage.requests, await stored.count(engine), await fencing_terms.highest(engine)) == (2_000, 2_000, 7)
        assert writer.trouble is None
        writer.close()
        await soon(running)
        await engine.dispose()


async def test_what_the_predictor_has_not_acknowledged_is_sent_on_its_next_stream(world):
    world.predictor.acknowledges = False
    await world.scheduler.next(SupervisorHello)
    world.scheduler.send(outcome("r1"))
    assert (await world.predictor.next()).request_id == "r1"
    world.predictor.acknowledges = True
    world.predictor.outbox.close()
    assert (await world.predictor.next()).request_id == "r1"


class Kept:
    def __init__(self) -> None:
        self.stored: list[str] = []
        self.some = asyncio.Event()  # a part of them is stored
        self.spaces: list[int] = []  # how many were stored when there was space again

    def on_stored(self, batch: Sequence[OutcomeReport]) -> None:
        self.stored += [outcome.request_id for outcome in batch]
        if len(self.stored) >= 400:
            self.some.set()


def writer_of(engine, kept: Kept) -> OutcomeWriter:
    return OutcomeWriter(
        engine,
        on_stored=kept.on_stored,
        on_dropped=lambda _: None,
        on_space=lambda: kept.spaces.append(len(kept.stored)),
    )


@pytest.fixture
async def kept():
    return Kept()


@pytest.fixture
async def writer(store, kept):
    writer = writer_of(store, kept)
    running = asyncio.create_task(writer.run())
    yield writer
    writer.close()
    await soon(running)


async def test_many_outcomes_go_in_few_transactions_and_all_arrive_with_the_highest_term(writer, kept, store):
    for term in (5, 4):
        writer.raise_term(term)
    for i in range(1_000):
        assert writer.put(outcome(f"r{i}"))
    await soon(writer.drained())
    assert kept.stored == [f"r{i}" for i in range(1_000)]
    assert (await stored.count(store), await fencing_terms.highest(store)) == (1_000, 5)


async def test_outcomes_that_come_one_by_one_share_a_transaction_and_a_full_batch_does_not_wait(
    store, kept, monkeypatch
):
    monkeypatch.setattr(outcome_writer, "COMMIT_DELAY_S", 3_600.0)
    writer = writer_of(store, kept)
    running = asyncio.create_task(writer.run())
    writer.put(outcome("first"))
    await until(lambda: kept.stored == ["first"])
    for i in range(outcome_writer.BATCH - 1):
        writer.put(outcome(f"r{i}"))
        await asyncio.sleep(0)
    assert kept.stored == ["first"]
    writer.put(outcome("last"))
    await until(lambda: len(kept.stored) == outcome_writer.BATCH + 1)
    writer.put(outcome("late"))
    await soon(writer.drained())
    assert kept.stored[-1] == "late", "one that ends waits no more"
    writer.close()
    await soon(running)


async def test_a_store_out_of_reach_acknowledges_nothing_says_so_and_goes_on_when_it_is_back(writer, kept, store):
    async with store.begin() as connection:
        await connection.execute(text("ALTER TABLE outcomes RENAME TO away"))
    writer.put(outcome("r1"))
    await until(lambda: writer.trouble is not None)
    assert "outcomes" in writer.trouble
    assert kept.stored == []
    async with store.begin() as connection:
        await connection.execute(text("ALTER TABLE away RENAME TO outcomes"))
    await soon(writer.drained())
    assert kept.stored == ["r1"]
    assert writer.trouble is None


async def test_a_full_writer_takes_nothing_more(store, kept):
    idle = writer_of(store, kept)
    assert all(idle.put(outcome(str(i))) for i in range(MAX_WAITING))
    assert not idle.put(outcome("one too many"))
    assert idle.put(outcome("0")), "one that waits already is no news"


async def test_a_writer_that_refused_says_once_when_half_of_it_is_empty(writer, kept, monkeypatch):
    monkeypatch.setattr("weft_supervisor.outcome_writer.MAX_WAITING", 600)
    assert all(writer.put(outcome(str(i))) for i in range(600))
    assert not writer.put(outcome("refused"))
    await soon(writer.drained())
    assert kept.spaces == [400]


async def test_what_a_full_writer_refused_is_sent_again_on_a_new_stream(world, monkeypatch):
    monkeypatch.setattr("weft_supervisor.outcome_writer.MAX_WAITING", 1)
    await world.scheduler.next(SupervisorHello)
    world.server.writer.put(outcome("r1"))
    assert not world.server.writer.put(outcome("r2"))
    await world.scheduler.next(SupervisorHello)
    world.scheduler.send(outcome("r2"))
    while "r2" not in (await world.scheduler.next(OutcomeAck)).request_ids:
        pass


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=80), st.integers(1, 12))
def test_feedback_holds_the_latest_unacknowledged_outcomes_within_its_bound(steps, limit):
    feedback, model = UnackedFeedback(limit), dict[str, None]()
    for add, number in steps:
        name = f"r{number}"
        if add:
            feedback.add([outcome(name)])
            model.setdefault(name)
            if len(model) > limit:
                del model[next(iter(model))]
        else:
            feedback.acknowledge([name])
            model.pop(name, None)
    sent = [message.outcomes for message in feedback.messages()]
    assert [o.request_id for outcomes in sent for o in outcomes] == list(model)
    assert all(0 < len(outcomes) <= CHUNK for outcomes in sent)


async def test_what_is_closed_in_the_middle_of_a_write_ends_after_it(store, kept, monkeypatch):
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def held(*_, **__) -> int:
        begun.set()
        await go_on.wait()
        return 0

    monkeypatch.setattr(outcomes, "forget", held)
    writer = writer_of(store, kept)
    running = asyncio.create_task(writer.run())
    await soon(begun.wait())
    writer.close()
    go_on.set()
    await soon(running)

import asyncio
import dataclasses
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import stored
from harness.processes import started
from harness.stored import new_store
from weft.domain.request import FinishReason, Outcome
from weft.store import outcomes
from weft.store.database import open_database

DAY = 86_400_000
NOW = 1_700_000_000_500


async def record(engine, rows, *, now_unix_ms=NOW) -> set[str]:
    return await outcomes.record(engine, rows, now_unix_ms=now_unix_ms)


def outcome(request_id="r1", **changes) -> Outcome:
    plain = Outcome(
        request_id=request_id, pool="acme/pool", namespace="acme", model_name="acme/upper", adapter="sha256:00",
        prompt_tokens=3, completion_tokens=5, finish=FinishReason.EOS, error="", censored=False, predicted_p50_tokens=4,
        predicted_p90_tokens=9, model_version="ridge-ab+7", ttft_ms=1, total_ms=2, migrations=0, doublings=0,
        finished_unix_ms=1_700_000_000_000,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


async def test_a_second_outcome_of_a_request_changes_nothing(engine):
    assert await record(engine, [outcome()]) == {"r1"}
    assert await record(engine, [outcome(completion_tokens=99)]) == set()
    [row] = await stored.usage(engine)
    assert (row.requests, row.prompt_tokens, row.completion_tokens) == (1, 3, 5)
    assert await stored.count(engine) == 1


@pytest.mark.slow
async def test_batches_of_many_sizes_leave_no_memory_behind(engine):
    """Prepared statements of all numbers of rows are 19 MB with SQLite and 8 with PostgreSQL; 4 and 3 are left."""
    process = psutil.Process()
    for size in range(1, 33):
        await record(engine, [outcome(f"{size}-{n}") for n in range(size)])
    before = process.memory_info().rss
    for size in range(33, 129):
        await record(engine, [outcome(f"{size}-{n}") for n in range(size)])
    most_mb = 10 if engine.dialect.name == "sqlite" else 6
    assert process.memory_info().rss - before < most_mb << 20


async def test_the_choices_of_a_request_count_its_prompt_once(engine):
    await record(engine, [outcome(f"r1-{choice}", choice=choice) for choice in range(4)])
    [row] = await stored.usage(engine)
    assert (row.requests, row.prompt_tokens, row.completion_tokens) == (1, 3, 20)
    assert await stored.count(engine) == 4


async def test_an_odd_outcome_does_not_keep_its_batch_from_being_stored(engine):
    odd = outcome("odd", error="x" * 5_000, namespace="a\0b", finished_unix_ms=2**64 - 1, completion_tokens=2**32 - 1)
    assert await record(engine, [outcome("plain"), odd]) == {"plain", "odd"}
    [strange] = {row.namespace for row in await stored.usage(engine)} - {"acme"}
    assert "\0" not in strange
    assert strange != "ab", "another tenant's"


async def test_requests_that_differ_only_beyond_the_column_are_two(engine):
    long = "r" * 128
    rows = [outcome(long), outcome(f"{long}a"), outcome(f"{long}b"), outcome(f"{long}\0")]
    assert len(await record(engine, rows)) == 4
    assert await record(engine, rows) == set(), "told again, they are known"
    [row] = await stored.usage(engine)
    assert (await stored.count(engine), row.requests) == (4, 4)


@pytest.mark.parametrize(("name", "width"), [("namespace", 253), ("model_name", 512)])
async def test_no_key_of_a_sum_is_cut(engine, name, width):
    rows = [outcome(end, **{name: "n" * width + end}) for end in "ab"]
    await record(engine, rows)
    async with engine.connect() as connection:
        keys = (await connection.exec_driver_sql(f"SELECT {name} FROM usage")).scalars().all()
    assert len(set(keys)) == 2
    assert max(map(len, keys)) <= width


async def test_old_outcomes_go_by_the_time_they_were_stored_and_usage_stays(engine):
    await record(engine, [outcome("old", finished_unix_ms=2**50)], now_unix_ms=99)
    await record(engine, [outcome("new", finished_unix_ms=0)], now_unix_ms=100)
    assert await outcomes.forget(engine, before_unix_ms=100) == 1
    assert await record(engine, [outcome("new")], now_unix_ms=101) == set()
    assert await stored.count(engine) == 1
    assert sum(row.requests for row in await stored.usage(engine)) == 2


events = st.lists(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 1000)), max_size=6), max_size=12)


@given(batches=events)
@settings(max_examples=settings.default.max_examples // 3, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_repeated_in_whatever_batches_the_sums_are_those_of_a_dictionary(upgraded, batches):
    runner, engine = upgraded
    runner.run(agrees_with_a_dictionary(engine, batches))


@pytest.fixture
def upgraded(url):
    """An engine, and the loop that all its examples run in."""
    with asyncio.Runner() as runner:
        engine = runner.run(new_store(url))
        yield runner, engine
        runner.run(engine.dispose())


async def agrees_with_a_dictionary(engine, batches) -> None:
    async with engine.begin() as connection:
        for table in ("outcomes", "usage"):
            await connection.exec_driver_sql(f"DELETE FROM {table}")
    model: dict[str, int] = {}
    for batch in batches:
        rows = [outcome(f"r{key}", completion_tokens=tokens) for key, tokens in batch]
        fresh = {row.request_id for row in rows} - set(model)
        for row in rows:
            model.setdefault(row.request_id, row.completion_tokens)
        assert await record(engine, rows) == fresh
    rows = await stored.usage(engine)
    assert sum(row.requests for row in rows) == len(model)
    assert sum(row.completion_tokens for row in rows) == sum(model.values())


WRITER = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = {here!r}
from test_outcomes import outcome
from sqlalchemy import make_url
from weft.store import migrate, outcomes
from weft.store.database import open_database

async def main():
    engine = open_database(make_url({url!r}))
    await migrate.upgrade(engine)
    batch = 0
    while True:
        await outcomes.record(engine, [outcome(f"{{batch}}-{{i}}") for i in range(20)], now_unix_ms=1)
        print(batch, flush=True)
        batch += 1

asyncio.run(main())
"""


@pytest.mark.slow
async def test_kill_nine_in_the_middle_of_writes_keeps_the_store_consistent(url):
    acknowledged = await asyncio.to_thread(killed_writer, url)
    engine = open_database(url)
    async with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            assert (await connection.exec_driver_sql("PRAGMA integrity_check")).scalar_one() == "ok"
        ids = (await connection.exec_driver_sql("SELECT request_id FROM outcomes")).scalars().all()
        requests = (await connection.exec_driver_sql("SELECT sum(requests) FROM usage")).scalar_one()
    await engine.dispose()
    batches = Counter(request_id.partition("-")[0] for request_id in ids)
    assert set(batches.values()) == {20}, "a transaction is there whole or not at all"
    assert len(batches) >= acknowledged + 1, "what was acknowledged survived"
    assert requests == len(ids), "usage and outcomes are of one transaction"


def killed_writer(url) -> int:
    """A process that writes batch after batch, killed in one of them. Returns the last one it saw stored."""
    text = url.render_as_string(hide_password=False)
    script = WRITER.format(here=[str(Path(__file__).parent), str(Path(__file__).parents[2])], url=text)
    acknowledged = -1
    with started(sys.executable, "-c", script, stdout=subprocess.PIPE, text=True) as writer:
        for line in writer.stdout:
            acknowledged = int(line)
            if acknowledged == 10:
                writer.kill()
        writer.wait()
    assert writer.returncode == -signal.SIGKILL
    return acknowledged

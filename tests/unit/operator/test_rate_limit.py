"""Writes about one object: a burst, then a steady pace."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.operator.controlling import operator
from tests.unit.operator.planning import pool_object, pool_ref
from weft_operator.controller import BURST, PER_S, TokenBucket

GAPS_S = st.lists(st.floats(0.0, 30.0), min_size=1, max_size=400)


@given(GAPS_S)
def test_whoever_keeps_to_it_writes_no_more_than_the_burst_and_the_pace_allow(gaps_s: list[float]) -> None:
    budget, ref, now, writes = TokenBucket(), pool_ref(), 0.0, 0
    for gap_s in gaps_s:
        now += gap_s
        if budget.pause_s(ref, now) == 0:
            budget.take(ref, now)
            writes += 1
    assert writes <= BURST + now * PER_S + 1e-6


@given(GAPS_S)
def test_after_the_pause_it_may_be_written_about_again(gaps_s: list[float]) -> None:
    budget, ref, now = TokenBucket(), pool_ref(), 0.0
    for gap_s in gaps_s:
        now += gap_s
        budget.take(ref, now)
    assert budget.pause_s(ref, now + budget.pause_s(ref, now) + 1e-6) == 0


def test_objects_have_budgets_of_their_own_and_a_new_one_starts_afresh() -> None:
    budget = TokenBucket()
    for _ in range(2 * BURST):
        budget.take(pool_ref("hot"), 0.0)
    assert budget.pause_s(pool_ref("hot"), 0.0) > 0 == budget.pause_s(pool_ref("calm"), 0.0)
    budget.forget(pool_ref("hot"))
    assert budget.pause_s(pool_ref("hot"), 0.0) == 0


async def test_a_status_that_others_keep_changing_is_not_fought_over_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    async with operator(clock=lambda: 1e9) as op:
        op.store.apply(pool_object())
        await op.until(pool_ref(), "Available", "True", "RunnersReady")
        for _ in range(2 * BURST):
            await turns()
            obj = op.store.get(pool_ref())
            metadata, status = obj["metadata"], {**obj["status"], "observedGeneration": 0}
            op.store.set_status(pool_ref(), metadata["uid"], metadata["resourceVersion"], status)
        await turns()
        assert BURST <= op.metrics.writes.total() <= BURST + 5
        assert op.store.get(pool_ref())["status"]["observedGeneration"] == 0, "left alone, for now"
    assert sum("left alone" in record.message for record in caplog.records) == 1


async def turns() -> None:
    """Enough for the controller to write once and to come to rest."""
    for _ in range(20):
        await asyncio.sleep(0)

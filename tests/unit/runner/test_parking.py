"""Sequences of tenants beyond their share wait for those of tenants within theirs, and lose nothing by it."""

from dataclasses import replace

import pytest

from harness.runner_machine import flat, session, start_of, take
from weft.domain.ids import Epoch
from weft.domain.machine import Send
from weft.domain.request import NoCapacity, Step
from weft.domain.runner import Parking
from weft_runner.core import BatchLimits, PoolLimits, SampledToken
from weft_runner.core.events import StepResults, SwapDone, SwapFailed, SwapIn, SwapOut
from weft_runner.core.preempt.parking import MAX_PARKED_S
from weft_runner.core.request_pool import RequestPool, check_pool
from weft_runner.core.sequence import SequencePhase

LIMITS = PoolLimits(
    total_pages=40, page_tokens=4, max_sequences=2, max_adapters=2, max_context_tokens=32, vocab_size=99,
    batch=BatchLimits(max_prefills=2, max_batch_tokens=32), host_bytes=1000, swap_page_bytes=10,
)  # fmt: skip
SHORT = replace(LIMITS, total_pages=8, max_sequences=5)  # of pages


def begin(pool: RequestPool, key: str, *parks: str, now: float = 0.0, prompt: int = 8, owner: int = 1) -> None:
    pool.account_stall_time(now)
    start = start_of(key, round(now) + 1, (1,) * prompt, 20, reservation_tokens=4, parks=parks)
    pool.start(start, session(owner), "g", now)
    check_pool(pool)


def step(pool: RequestPool) -> set[str]:
    """Run one step. Returns whose rows it had."""
    batch = pool.schedule()
    if batch.rows:
        pool.account(batch, StepResults({row.key: SampledToken(5) for row in batch.rows if row.samples}, {}))
    check_pool(pool)
    return {row.key for row in batch.rows}


def stop(pool: RequestPool, key: str, now: float = 0.0) -> None:
    pool.account_stall_time(now)
    pool.stop(key, Epoch(1, 99), pool.sequences[key].owner)
    check_pool(pool)


def refused(pool: RequestPool) -> list[str]:
    return [message.request_id for message in flat(take(pool, Send)) if isinstance(message, NoCapacity)]


def copied(pool: RequestPool) -> list[SwapOut | SwapIn]:
    """Complete every copy that was ordered."""
    orders = take(pool, SwapOut, SwapIn)
    for order in orders:
        pool.on_swap_event(SwapDone(order.number, len(order.pages), 1e-9))
        check_pool(pool)
    return orders


def parking(pool: RequestPool) -> dict[str, Parking]:
    state_of = pool.preemption.parking.state_of
    return {key: state_of(sequence, pool.now) for key, sequence in pool.sequences.items()}


@pytest.fixture
def full() -> RequestPool:
    """Two sequences in the two places, with pages to spare."""
    pool = RequestPool(LIMITS)
    begin(pool, "f1")
    begin(pool, "f2")
    step(pool)
    return pool


def test_who_is_parked_computes_nothing_keeps_its_pages_and_goes_on_where_it_was(full: RequestPool) -> None:
    pages, tokens = [*full.pages.pages_of("f2")], [*full.sequences["f2"].tokens]
    begin(full, "v", "f2")
    assert parking(full) == {"f1": Parking.NONE, "f2": Parking.PARKED, "v": Parking.NONE}
    assert step(full) == step(full) == {"f1", "v"}
    assert (full.pages.pages_of("f2"), full.sequences["f2"].tokens) == (pages, tokens)
    stop(full, "v")
    assert parking(full) == {"f1": Parking.NONE, "f2": Parking.NONE}
    assert step(full) == {"f1", "f2"}
    assert full.sequences["f2"].tokens == [*tokens, 5]
    assert not take(full, SwapOut, SwapIn)


def test_a_row_in_flight_counts_though_its_sequence_is_parked_meanwhile(full: RequestPool) -> None:
    batch, before = full.schedule(), len(full.sequences["f2"].tokens)
    begin(full, "v", "f2")
    full.account(batch, StepResults({row.key: SampledToken(7) for row in batch.rows}, {}))
    assert full.sequences["f2"].tokens[before:] == [7]
    assert step(full) == {"f1", "v"}


def test_without_a_place_that_somebody_makes_a_newcomer_is_refused_and_nobody_parked(full: RequestPool) -> None:
    begin(full, "v")
    begin(full, "w", "gone", "also gone")
    assert refused(full) == ["v", "w"]
    assert step(full) == {"f1", "f2"}
    begin(full, "x", "gone", "f1")
    assert step(full) == {"f2", "x"}, "the first of those that are here"


def test_the_longest_parked_comes_back_first_and_before_anybody_new(full: RequestPool) -> None:
    begin(full, "v", "f2")
    begin(full, "w", "f1", now=1.0)
    stop(full, "v", now=2.0)
    begin(full, "late", now=2.0)
    assert refused(full) == ["late"]
    assert step(full) == {"f2", "w"}


def test_a_sequence_is_parked_for_a_minute_of_its_life_at_most(full: RequestPool) -> None:
    begin(full, "v", "f2")
    stop(full, "v", now=MAX_PARKED_S - 1)
    begin(full, "w", "f2", now=MAX_PARKED_S)  # it has a second left
    stop(full, "f1", now=MAX_PARKED_S)
    assert step(full) == {"f2", "w"}
    begin(full, "x", "f2", now=MAX_PARKED_S)
    full.account_stall_time(MAX_PARKED_S + 2)
    full.preemption.parking.expire(MAX_PARKED_S + 2)
    assert parking(full)["f2"] is Parking.OVER
    stop(full, "x", now=MAX_PARKED_S + 3)
    begin(full, "y", "f2", now=MAX_PARKED_S + 3)
    assert refused(full) == ["y"], "its time is over"
    assert step(full) == {"f2", "w"}


def test_once_its_time_is_over_nobody_new_comes_before_it(full: RequestPool) -> None:
    begin(full, "v", "f2")
    begin(full, "w", "f1", now=MAX_PARKED_S + 1)
    assert refused(full) == ["w"], "with f2, which is due, two would have no place"
    stop(full, "v", now=MAX_PARKED_S + 2)
    begin(full, "w", now=MAX_PARKED_S + 2)
    assert refused(full) == ["w"]
    assert step(full) == {"f1", "f2"}


def test_where_pages_are_short_the_newcomer_waits_for_the_copy_and_not_for_the_answer() -> None:
    pool = RequestPool(SHORT)
    for key in ("f1", "f2"):
        begin(pool, key, prompt=12)
    step(pool)
    begin(pool, "v", "f2")
    assert pool.sequences["f2"].phase is SequencePhase.SWAP_OUT
    assert "v" not in pool.sequences
    begin(pool, "other")
    assert refused(pool) == ["other"], "what comes free is promised"
    assert [type(order) for order in copied(pool)] == [SwapOut]
    assert step(pool) == {"f1", "v"}
    assert parking(pool)["f2"] is Parking.PARKED
    stop(pool, "v")
    assert [type(order) for order in copied(pool)] == [SwapIn]
    assert step(pool) == {"f1", "f2"}
    assert not refused(pool)


def test_who_is_copied_first_does_not_take_back_the_pages_that_a_newcomer_waits_for() -> None:
    pool = RequestPool(replace(SHORT, total_pages=9))
    for key in ("f1", "f2", "f3"):
        begin(pool, key)
    for _ in range(2):  # two prompts, then the third
        step(pool)
    begin(pool, "v", "f3", "f2", prompt=16)
    first, second = take(pool, SwapOut)
    for order in (first, second):
        assert "v" not in pool.sequences
        pool.on_swap_event(SwapDone(order.number, len(order.pages), 1e-9))
        check_pool(pool)
    assert step(pool) == {"f1", "v"}
    assert not refused(pool)


def test_pages_of_those_that_are_parked_already_go_first() -> None:
    pool = RequestPool(replace(SHORT, total_pages=10, max_sequences=2))
    for key in ("f1", "f2"):
        begin(pool, key, prompt=12)
    step(pool)
    begin(pool, "v", "f2", prompt=4)
    assert step(pool) == {"f1", "v"}
    begin(pool, "w", "f1", prompt=4)
    assert [pool.sequences[key].phase for key in ("f1", "f2")] == [SequencePhase.DECODE, SequencePhase.SWAP_OUT]
    copied(pool)
    assert step(pool) == {"v", "w"}


@pytest.mark.parametrize("limits", [replace(SHORT, swap_page_bytes=0), replace(SHORT, host_bytes=10)])
def test_where_nothing_can_be_swapped_nobody_leaves_for_pages(limits: PoolLimits) -> None:
    pool = RequestPool(limits)
    for key in ("f1", "f2"):
        begin(pool, key, prompt=12)
    step(pool)
    begin(pool, "v", "f2")
    assert refused(pool) == ["v"]
    assert step(pool) == {"f1", "f2"}


def test_a_start_that_waits_for_a_copy_ends_with_its_stop_its_session_and_its_copy() -> None:
    for end in ("stop", "session", "failure"):
        pool = RequestPool(SHORT)
        for key in ("f1", "f2"):
            begin(pool, key, prompt=12)
        step(pool)
        begin(pool, "v", "f2", owner=2)
        (order,) = take(pool, SwapOut)
        match end:
            case "stop":
                pool.stop("v", Epoch(1, 99), session(2))
            case "session":
                pool.cancel_session(session(2))
            case _:
                pool.on_swap_event(SwapFailed(order.number, "no memory"))
        check_pool(pool)
        assert not pool.preemption.parking.deferred
        assert ("v" in pool.sequences) == (end == "failure"), "f2 is computed again elsewhere, and has left its pages"
        if end != "failure":
            pool.on_swap_event(SwapDone(order.number, len(order.pages), 1e-9))
            copied(pool)
            assert step(pool) == {"f1", "f2"}


def test_a_newer_epoch_takes_the_place_of_a_start_that_waits_whatever_session_brings_it() -> None:
    pool = RequestPool(SHORT)
    for key in ("f1", "f2"):
        begin(pool, key, prompt=12)
    step(pool)
    begin(pool, "v", "f2", owner=2)
    begin(pool, "v", now=5.0, owner=3)
    assert refused(pool) == ["v"], "f2's pages are not free yet"
    copied(pool)
    assert "v" not in pool.sequences, "the epoch that waited is over"


def test_a_row_in_flight_of_a_sequence_that_left_and_is_back_does_not_count() -> None:
    """Found by the simulator: the pages that its token was written to were another's by then."""
    pool = RequestPool(SHORT)
    for key in ("f1", "f2"):
        begin(pool, key, prompt=12)
    step(pool)
    departures, f2 = pool.scheduler.departures, pool.sequences["f2"]
    pool.schedule()
    begin(pool, "v", "f2")
    copied(pool)
    stop(pool, "v")
    copied(pool)
    assert f2.runs
    assert not pool.runs(f2, departures)
    assert pool.runs(pool.sequences["f1"], departures)


def test_who_pauses_for_pages_has_a_parked_one_leave_before_one_that_runs() -> None:
    pool = RequestPool(replace(SHORT, max_sequences=2))
    begin(pool, "old", prompt=8)
    begin(pool, "late", prompt=8)
    step(pool)
    begin(pool, "v", "old", prompt=4)
    for _ in range(20):
        step(pool)
        if orders := take(pool, SwapOut):
            break
    assert [len(orders), pool.sequences["old"].phase] == [1, SequencePhase.SWAP_OUT]


def test_no_step_is_sent_twice_or_left_out_for_a_parked_sequence(full: RequestPool) -> None:
    take(full, Send)
    for now in range(6):
        begin(full, f"v{now}", "f2", now=float(now))
        step(full)
        stop(full, f"v{now}", now=float(now))
        step(full)
    steps = [one.message for one in take(full, Send) if isinstance(one.message, Step)]
    positions = [s.position for message in steps for s in message.sequences if s.request_id == "f2"]
    assert positions == [*range(1, 1 + len(positions))]
    assert len(positions) == 6

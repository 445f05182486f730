"""A lightly loaded runner is emptied: the orders, their bounds, and what stands against them."""

from typing import Any

import pytest

from harness.scheduler_driver import Driver, of
from weft.domain.request import Assign, FailReason, Preempt
from weft_scheduler.core import Consolidated

MEASURED = {
    "step_ms_1": 40.0,
    "step_ms_best": 52.0,
    "prefill_tokens_per_s": 2000.0,
    "max_sequences": 8,
    "numerics_class": "class-a",
}
LONG = {"max_tokens": 1000, "p90_tokens": 900}


def uuid_of(driver: Any, request_id: str) -> str:
    return driver.request(request_id).runner.uuid


def report(driver: Driver) -> None:
    """Every runner reports what it was assigned."""
    for uuid in ("a", "b"):
        owned = sorted(driver.record(uuid).accounts.owned)
        driver.runner(uuid, *[driver.view(r, 900) for r in owned], free=1000 - 60 * len(owned))


@pytest.fixture
def driver() -> Driver:
    return Driver(consolidation_s=2.0)


@pytest.fixture
def spread(driver: Any, request: pytest.FixtureRequest) -> Any:
    """Runner b has three sequences, runner a one; a parameter changes what both have measured."""
    driver.start(consolidation="always", min_runners=2, max_runners=2)
    for uuid in ("a", "b"):
        driver.runner(uuid, total_pages=1000, max_context_tokens=16000, **MEASURED | getattr(request, "param", {}))
    driver.place("r0", **LONG)
    driver.runner("b", driver.view("r0", 900), free=0)
    driver.place("lonely", **LONG)
    driver.runner("b", driver.view("r0", 900), free=940)
    driver.runner("a", driver.view("lonely", 900), free=940)
    assert (uuid_of(driver, "r0"), uuid_of(driver, "lonely")) == ("b", "a")
    for n in (1, 2):
        driver.place(f"r{n}", **LONG)
    report(driver)
    return driver


def test_the_lonely_request_migrates_and_its_failures_are_not_counted(spread: Any) -> None:
    effects = spread.wait(3.0)
    (emptied,) = of(effects, Consolidated)
    (preempt,) = of(effects, Preempt)
    assert (emptied.runner.uuid, preempt.request_id) == ("a", "lonely")
    spread.runner("a", free=1000)
    (assign,) = of(spread.failed("lonely", FailReason.PREEMPTED, 40), Assign)
    assert (assign.runner.uuid, spread.request("lonely").history.migrations) == ("b", 0)
    report(spread)
    assert not of(spread.wait(60.0), Consolidated), "there is nothing left to empty"


@pytest.mark.parametrize("spread", [{"prefill_tokens_per_s": 20.0}], indirect=True)
@pytest.mark.parametrize(("in_kv", "emptied"), [(20, 1), (600, 0)])
def test_what_a_migration_would_recompute_is_prompt_and_answer_so_far(spread: Any, in_kv: int, emptied: int) -> None:
    reported = spread.report_of("a", spread.view("lonely", 900), free=940)
    spread.reports(reported._replace(report=reported.report._replace(progress=[in_kv])))
    assert len(of(spread.wait(3.0), Consolidated)) == emptied


def test_a_request_migrates_a_bounded_number_of_times(spread: Any) -> None:
    for _ in range(2):
        assert of(spread.wait(3.0), Consolidated)
        spread.runner("b", *[spread.view(f"r{n}", 900) for n in range(3)], free=0)
        spread.runner("a", free=1000)
        (assign,) = of(spread.failed("lonely", FailReason.PREEMPTED, 40), Assign)
        assert assign.runner.uuid == "a", "b has filled up meanwhile"
        report(spread)
    assert not of(spread.wait(60.0), Consolidated)


def test_nothing_migrates_while_a_request_waits(spread: Any) -> None:
    spread.submit("large", prompt_tokens=15000, max_tokens=500, p90_tokens=500)
    assert not of(spread.wait(60.0), Consolidated)


def test_nothing_migrates_where_something_has_just_come(spread: Any) -> None:
    spread.runner("b", *[spread.view(f"r{n}", 900) for n in range(3)], free=0)
    spread.place("new", **LONG)
    spread.runner("b", *[spread.view(f"r{n}", 900) for n in range(3)], free=820)
    assert not of(spread.wait(4.0), Consolidated)


@pytest.mark.parametrize(
    ("mode", "least", "expected"),
    [("always", 2, True), ("autoscaled", 2, False), ("autoscaled", 1, True), ("never", 1, False)],
)
def test_a_pool_says_when(spread: Any, mode: str, least: int, expected: bool) -> None:
    spread.registry(consolidation=mode, min_runners=least, max_runners=2)
    assert bool(of(spread.wait(25.0), Consolidated)) is expected


@pytest.mark.parametrize(("mode", "packed"), [("always", "b"), ("autoscaled", "a")])
def test_a_pool_whose_runners_suffice_fills_batches_beyond_their_best(driver: Any, mode: str, packed: str) -> None:
    """Two runners are the least of this pool: only `always` wants one idle. Not before a period has passed."""
    driver.start(consolidation=mode, min_runners=2, max_runners=3)
    for uuid in ("a", "b"):
        driver.runner(uuid, total_pages=1000, **MEASURED | {"step_ms_best": 40.1}, best_batch=2)
    assert [driver.place(f"r{n}", **LONG).runner.uuid for n in range(2)] == ["b", "b"], "up to its best batch"
    report(driver)
    driver.wait(3.0)
    assert driver.place("beyond", **LONG).runner.uuid == packed
    assert driver.place("last", **LONG).runner.uuid == "a", "half as many more at the most"


def test_packing_ends_with_the_reason_for_it(spread: Any) -> None:
    spread.wait(3.0)
    assert spread.pool().fleet.prefers_packing
    spread.registry(consolidation="never", min_runners=2, max_runners=2)
    spread.wait(3.0)
    assert not spread.pool().fleet.prefers_packing


def test_an_idle_pool_has_no_deadline(spread: Any) -> None:
    for request_id in ("r0", "r1", "r2", "lonely"):
        spread.outcome(request_id)
    report(spread)
    spread.wait(200.0)
    assert spread.core.next_deadline() is None

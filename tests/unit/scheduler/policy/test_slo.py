"""A pool's objectives: who met them, who cannot, and what a runner takes for them."""

from typing import Any

import pytest

from harness.scheduler_driver import Driver, of
from weft.domain.request import Assign, OutcomeReport, Reject, RejectReason
from weft.domain.routes import PoolSpec, PoolStatus, SloAttainment
from weft_scheduler.core.effects import Judged, Queued
from weft_scheduler.core.policy.slo.attainment import TAU_S, Attainment, ServiceLevel


def test_the_share_is_of_what_finished_lately_and_stays_while_nothing_does() -> None:
    attainment = Attainment()
    assert attainment.percents() is None
    for met in (True, True, True, False):
        attainment.count(met, True, 0.0)
    assert attainment.percents() == SloAttainment(75, 75, 100)
    for number in range(50):
        attainment.count(True, number % 2 == 0, 40 * TAU_S)
    assert attainment.percents() == SloAttainment(50, 100, 50)


@pytest.mark.parametrize(
    ("objectives", "request_", "met"),
    [
        ((1.0, 0.1), (1.0, 11, 2.0), (True, True)),  # both just in time
        ((1.0, 0.1), (1.1, 11, 1.2), (False, True)),
        ((1.0, 0.1), (0.5, 2, 0.7), (True, False)),
        ((1.0, 0.1), (0.5, 1, 9.0), (True, True)),  # one token has no time between tokens
        ((1.0, 0.1), (0.0, 0, 9.0), (False, True)),  # none came
        ((0.0, 0.1), (9.0, 1, 9.0), (True, True)),
        ((1.0, 0.0), (0.5, 2, 9.0), (True, True)),
    ],
)
def test_a_request_is_judged_by_what_its_pool_states(
    objectives: tuple[float, float], request_: tuple[float, int, float], met: tuple[bool, bool]
) -> None:
    assert ServiceLevel(*objectives).judge(*request_, now=0.0) == met


@pytest.mark.parametrize("objectives", [(0.0, 0.0), (1.0, 0.0), (0.0, 0.1), (1.0, 0.1)])
def test_attainment_is_measured_where_a_pool_states_an_objective(objectives: tuple[float, float]) -> None:
    ttft_s, token_time_s = objectives
    assert PoolSpec("acme/p", slo_ttft_s=ttft_s, slo_token_time_s=token_time_s).has_slo == any(objectives)


def test_attainment_is_published_once_a_period() -> None:
    level, all_ = ServiceLevel(1.0, 0.0), SloAttainment(100, 100, 100)
    for ttft_s, now, published in ((0.5, 0.0, all_), (2.0, 59.9, all_), (2.0, 60.0, SloAttainment(29, 29, 100))):
        level.judge(ttft_s, 1, ttft_s, now)
        assert level.published(now, 60.0) == (published, 60.0 if published == all_ else 120.0)


def test_a_batch_ends_where_the_token_time_would(driver: Driver) -> None:
    driver.start(slo_token_time_s=0.03).runner("a", max_sequences=4, best_batch=2, step_ms_1=20.0, step_ms_best=25.0)
    assert [bool(of(driver.submit(f"r{number}"), Assign)) for number in range(4)] == [True, True, True, False]
    driver.registry()
    assert driver.request("r3").placed, "without the objective it takes all that it can"


def measured(driver: Driver, tokens_per_s: int = 100) -> None:
    """Add one full runner, of `tokens_per_s` tokens a second."""
    driver.runner("a", max_sequences=1)
    driver.place("running")
    driver.pool().scaling.autoscaler.throughput.measure(10 * tokens_per_s, 10.0)


def test_who_cannot_be_served_in_time_is_rejected_at_once_with_a_time(driver: Any) -> None:
    driver.start(slo_ttft_s=1.0, slo_reject=True)
    measured(driver)
    predicted = {"prompt_tokens": 16, "p10_tokens": 1, "p50_tokens": 34, "p90_tokens": 60}
    for number in range(2):  # 50 tokens each: after 0.5 s and after 1 s
        effects = driver.submit(f"r{number}", **predicted)
        assert (len(of(effects, Queued)), of(effects, Reject)) == (1, [])
    (reject,) = of(driver.submit("late", **predicted), Reject)
    assert (reject.reason, reject.retry_after_ms) == (RejectReason.SLO_UNATTAINABLE, 1000)
    assert not of(driver.submit("accepted", emitted_tokens=1, **predicted), Reject), "it was accepted before"
    assert not of(driver.submit("another", namespace="other", **predicted), Reject), "its share is free"


@pytest.mark.parametrize("spec", [{"slo_ttft_s": 1.0}, {}])
def test_without_admission_by_objective_everybody_waits(driver: Any, spec: dict[str, float]) -> None:
    driver.start(**spec)
    measured(driver)
    assert not any(of(driver.submit(f"r{number}", p90_tokens=90), Reject) for number in range(20))


def test_before_anything_was_measured_nobody_is_rejected(driver: Driver) -> None:
    driver.start(slo_ttft_s=0.001, slo_reject=True)
    assert not of(driver.submit("r"), Reject)


def test_attainment_is_counted_at_once_and_published_once_a_minute(driver: Driver) -> None:
    driver.start(slo_ttft_s=1.0, slo_token_time_s=0.1, idle_s=7.0).runner("a")

    def finish(request_id: str, ttft_ms: int, total_ms: int) -> list[Any]:
        driver.place(request_id)
        return driver.gateway_sends(OutcomeReport(request_id, "acme/p", "", 11, False, b"r", ttft_ms, total_ms))

    assert of(finish("r0", 900, 1900), Judged) == [Judged("acme/p", True, True)]
    published = [status.slo for status in of(driver.wait(1.0), PoolStatus)]
    assert published[-1] == SloAttainment(100, 100, 100)
    assert of(finish("r1", 1100, 1200), Judged) == [Judged("acme/p", False, True)]
    assert of(finish("r2", 100, 1200), Judged) == [Judged("acme/p", True, False)]
    assert {status.slo for status in of(driver.wait(50.0), PoolStatus)} <= {SloAttainment(100, 100, 100)}
    published = [status.slo for status in of(driver.wait(20.0), PoolStatus)]
    assert {*published} == {SloAttainment(33, 66, 66)}
    assert not of(driver.wait(600.0), PoolStatus), "nothing is written while nothing changes"

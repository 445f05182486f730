"""Outcomes wait for their acknowledgement, within a bound; failures become answers."""

import orjson
import pytest

from weft.wire.v1.common_pb2 import Outcome
from weft_gateway.core.events import Failure
from weft_gateway.errors import ApiError, Overloaded, from_failure
from weft_gateway.shell.outcomes import Outcomes


def kept(limit: int, count: int) -> tuple[Outcomes, list[str]]:
    dropped: list[str] = []
    outcomes = Outcomes(on_dropped=lambda: dropped.append("one"), limit=limit)
    for number in range(count):
        outcomes.keep(Outcome(request_id=f"r{number}"))
    return outcomes, dropped


def test_an_outcome_is_kept_until_it_is_acknowledged_twice_does_no_harm() -> None:
    outcomes, _ = kept(10, 3)
    outcomes.acknowledge(["r1", "unknown"])
    outcomes.acknowledge(["r1"])
    assert [outcome.request_id for outcome in outcomes] == ["r0", "r2"]


def test_beyond_the_bound_the_oldest_goes_and_is_counted() -> None:
    outcomes, dropped = kept(2, 5)
    assert outcomes.ids() == {"r3", "r4"}
    assert len(dropped) == 3


def test_a_second_outcome_of_a_request_is_a_bug() -> None:
    outcomes, _ = kept(2, 1)
    with pytest.raises(AssertionError):
        outcomes.keep(Outcome(request_id="r0"))


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        ("queue_full", 429, "true"),
        ("no_runner_available", 503, "true"),
        ("no_scheduler", 503, "true"),
        ("shutting_down", 503, "true"),
        ("too_many_moves", 503, "true"),
        ("too_large", 400, "false"),
        ("model_not_found", 404, "false"),
        ("adapter_failed", 500, "false"),
        ("internal_error", 500, "false"),
    ],
)
def test_each_named_failure_has_a_status_and_says_whether_to_retry(code: str, status: int, retry: str) -> None:
    error = from_failure(Failure(code, "Because."))
    assert (error.status, error.headers()["x-should-retry"]) == (status, retry)
    assert orjson.loads(error.body())["error"]["code"] == code


def test_retry_after_is_rounded_up_to_seconds_and_exact_in_milliseconds() -> None:
    headers = Overloaded("Full.", retry_after_ms=1001).headers()
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1001")
    assert "retry-after" not in ApiError("No.").headers()

"""Named failures become HTTP errors."""

import orjson
import pytest

from weft_gateway.core.events import Failure
from weft_gateway.errors import ApiError, Overloaded, from_failure


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        ("queue_full", 429, "true"),
        ("slo_unattainable", 429, "true"),
        ("rate_limit_exceeded", 429, "true"),
        ("no_runner_available", 503, "true"),
        ("no_scheduler", 503, "true"),
        ("shutting_down", 503, "true"),
        ("too_many_migrations", 503, "true"),
        ("too_large", 400, "false"),
        ("model_not_found", 404, "false"),
        ("adapter_failed", 500, "false"),
        ("runner_full", 507, "false"),
        ("internal_error", 500, "false"),
    ],
)
def test_each_named_failure_has_a_status_and_whether_to_retry(code: str, status: int, retry: str) -> None:
    error = from_failure(Failure(code, "Because."))
    assert (error.status, error.headers()["x-should-retry"]) == (status, retry)
    assert orjson.loads(error.body())["error"]["code"] == code


def test_retry_after_is_rounded_up_to_seconds_and_exact_in_milliseconds() -> None:
    headers = Overloaded("Full.", retry_after_ms=1001).headers()
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1001")
    assert "retry-after" not in ApiError("No.").headers()

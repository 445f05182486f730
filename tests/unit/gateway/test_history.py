"""The last hour: percentiles, errors by code, and what is whose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_gateway.core.history import MAX_NAMESPACES, MINUTES, History, Tally, UsageSum, bucket_of, quantile, summed

SECONDS = st.floats(2e-4, 900.0)


@given(st.lists(SECONDS, min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_is_within_a_twentieth_of_the_value(durations: list[float], share: float) -> None:
    tally = Tally()
    for seconds in durations:
        tally.ttft[bucket_of(seconds)] += 1
    rank = max(1, -int(-share * len(durations) // 1))
    exact = sorted(durations)[rank - 1]
    assert quantile(tally.ttft, share) == pytest.approx(exact, rel=0.06)


def test_nothing_measured_is_no_percentile_and_no_time_at_all_is_one() -> None:
    assert quantile({}, 0.5) is None
    assert quantile({bucket_of(0.0): 1}, 0.5) == 1e-4
    assert quantile({bucket_of(1e9): 1}, 0.5) == pytest.approx(1000, rel=0.1)


def test_an_hour_ago_is_forgotten_and_the_minutes_are_in_order() -> None:
    history = History()
    for minute in range(MINUTES + 30):
        history.answered("acme", 200, "", 60.0 * minute)
        history.timed("acme", 0.1, 0.01, 1.0, 60.0 * minute)
    now = 60.0 * (MINUTES + 29) + 59
    assert [tally.usage.requests for tally in history.minutes(None, now)] == [1] * 60
    assert summed(history.minutes(None, now)).token.total() == 60
    later = history.minutes(None, now + 60 * 10)
    assert [tally.usage.requests for tally in later] == [1] * (MINUTES - 10) + [0] * 10
    assert summed(history.minutes(None, now + 3600)).usage.requests == 0
    assert history.by_namespace(now + 3600) == {}


def test_a_namespace_has_its_own_errors_tokens_and_times_and_no_others() -> None:
    history, now = History(), 10.0
    history.answered("acme", 200, "", now)
    history.answered("rival", 429, "queue_full", now)
    history.answered("rival", 400, "bad", now)
    history.answered(None, 401, "invalid_api_key", now)  # nobody's
    history.used("rival", 7, 9, now)
    history.timed("rival", 0.5, None, 2.0, now)
    own, rival, everybody = (summed(history.minutes(of, now)) for of in ("acme", "rival", None))
    assert (own.usage, own.errors, own.total.total()) == (UsageSum(1), {}, 0)
    assert (rival.errors, rival.usage) == ({(429, "queue_full"): 1, (400, "bad"): 1}, UsageSum(2, 2, 7, 9))
    assert everybody.errors == {(429, "queue_full"): 1, (400, "bad"): 1, (401, "invalid_api_key"): 1}
    assert (rival.ttft.total(), rival.token.total(), everybody.total.total()) == (1, 0, 1)
    assert history.by_namespace(now) == {"acme": own.usage, "rival": rival.usage}


def test_namespaces_without_end_are_counted_in_the_sum_alone() -> None:
    history = History()
    for number in range(MAX_NAMESPACES + 50):
        history.answered(f"ns-{number}", 200, "", 0.0)
    assert len(history.by_namespace(0.0)) == MAX_NAMESPACES
    assert summed(history.minutes(None, 0.0)).usage.requests == MAX_NAMESPACES + 50

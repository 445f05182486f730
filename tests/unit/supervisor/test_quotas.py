"""Quotas of tokens a day, and when they are spent."""

from datetime import UTC, date, datetime

from weft.domain.limits import LimitRule
from weft_supervisor.admin import with_spent

TODAY = date(2026, 11, 24)


def test_a_quota_is_spent_by_its_subject_and_models() -> None:
    rules = [
        LimitRule("namespace/acme", tokens_per_day=30),
        LimitRule("namespace/acme", "acme/large-*", tokens_per_day=20),
        LimitRule("namespace/acme", "acme/small", tokens_per_day=20),
        LimitRule("namespace/umbra", tokens_per_day=30),
        LimitRule("namespace/quiet", tokens_per_day=1),
        LimitRule("key/1f00", requests_per_minute=1),
        LimitRule("key/acme", tokens_per_day=20),
        LimitRule("key/2f00", "acme/large-*", tokens_per_day=9),
    ]
    used = {
        "namespace/acme": {"": 30, "acme/large-1": 20, "acme/small": 10},
        "namespace/umbra": {"": 20},
        "key/2f00": {"": 30, "acme/large-1": 9},
    }
    end_ms = int(1000 * datetime(2026, 11, 25, tzinfo=UTC).timestamp())
    ends = [rule.spent_until_unix_ms for rule in with_spent(rules, used, TODAY)]
    assert ends == [end_ms, end_ms, 0, 0, 0, 0, 0, end_ms]

"""Which quotas of tokens a day are spent."""

from datetime import UTC, date, datetime, timedelta

from weft.domain.limits import LimitRule
from weft.store.usage import DailyUsage
from weft_supervisor.admin import with_spent

TODAY = date(2026, 11, 24)


def test_a_quota_is_spent_by_its_namespace_and_models_of_today_and_usage_is_read_once() -> None:
    rules = [
        LimitRule("namespace/acme", tokens_per_day=30),
        LimitRule("namespace/acme", "acme/large-*", tokens_per_day=20),
        LimitRule("namespace/acme", "acme/small", tokens_per_day=20),
        LimitRule("namespace/umbra", tokens_per_day=30),
        LimitRule("key/1f00", requests_per_minute=1),
    ]
    used = [
        DailyUsage(TODAY, "acme", "acme/large-1", 1, 5, 15),
        DailyUsage(TODAY, "acme", "acme/small", 1, 5, 5),
        DailyUsage(TODAY, "umbra", "umbra/a", 1, 5, 15),
        DailyUsage(TODAY - timedelta(days=1), "umbra", "umbra/a", 1, 5, 15),
    ]
    tomorrow = datetime(2026, 11, 25, tzinfo=UTC)
    ends = [rule.spent_until_unix_ms for rule in with_spent(rules, iter(used), TODAY)]
    end_ms = int(1000 * tomorrow.timestamp())
    assert ends == [end_ms, end_ms, 0, 0, 0]

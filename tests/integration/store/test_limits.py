from datetime import date

from weft.domain.limits import LimitRule
from weft.store import limits, outcomes, usage
from weft.store.access_mark import access_mark

from .test_outcomes import DAY, NOW, outcome

TODAY = date(2023, 11, 14)  # of NOW


async def test_a_rule_replaces_the_one_before_and_one_without_limits_deletes_it(engine):
    marks = [(await access_mark(engine)).limits]
    rules = [LimitRule("key/a", "", 1, 2, 3), LimitRule("key/a", "acme/*", 4), LimitRule("namespace/b", "", 0, 0, 0, 5)]
    for i, rule in enumerate(rules):
        await limits.put(engine, rule, now_unix_ms=i + 1)
        marks.append((await access_mark(engine)).limits)
    assert await limits.all_rules(engine) == rules
    await limits.put(engine, LimitRule("key/a", "", 9), now_unix_ms=9)
    marks.append((await access_mark(engine)).limits)
    assert (await limits.all_rules(engine))[0] == LimitRule("key/a", "", 9)
    await limits.put(engine, LimitRule("key/a"), now_unix_ms=10)
    marks.append((await access_mark(engine)).limits)
    assert await limits.all_rules(engine) == rules[1:]
    assert len(set(marks)) == len(marks)


async def test_usage_is_read_from_a_day_on_and_by_namespace(engine):
    rows = [
        outcome("r1"),
        outcome("r2", namespace="b", model_name="b/m"),
        outcome("r3", finished_unix_ms=outcome().finished_unix_ms - DAY),
    ]
    await outcomes.record(engine, rows, now_unix_ms=NOW)
    today = [usage.DailyUsage(TODAY, "acme", "acme/upper", 1, 3, 5), usage.DailyUsage(TODAY, "b", "b/m", 1, 3, 5)]
    assert await usage.since(engine, TODAY) == today
    assert [row.day.day for row in await usage.since(engine, date(2023, 11, 1), namespace="acme")] == [13, 14]
    assert len(await usage.since(engine, date(2023, 11, 1), max_rows=2)) == 2


async def test_usage_of_keys_is_kept_beside_that_of_their_namespaces(engine):
    rows = [
        outcome("r1", key_id="k1"),
        outcome("r2", key_id="k1", choice=1),
        outcome("r3", key_id="k2", model_name="acme/lower"),
        outcome("r4"),
        outcome("r5", key_id="k1", finished_unix_ms=outcome().finished_unix_ms - DAY),
        outcome("r6", key_id="k3", namespace="b"),
    ]
    await outcomes.record(engine, rows, now_unix_ms=NOW)
    await outcomes.record(engine, [*rows, outcome("r7", key_id="k2", model_name="acme/lower")], now_unix_ms=NOW)
    assert await usage.since(engine, TODAY, namespace="acme", by_key=True) == [
        usage.DailyUsage(TODAY, "acme", "acme/lower", 2, 6, 10, "k2"),
        usage.DailyUsage(TODAY, "acme", "acme/upper", 1, 3, 10, "k1"),
    ]
    assert [(row.model_name, row.requests) for row in await usage.since(engine, TODAY, namespace="acme")] == [
        ("acme/lower", 2), ("acme/upper", 2),
    ]  # fmt: skip
    found = await usage.tokens_of_keys(engine, TODAY, {"k1", "k2", "none"})
    assert found == {"k1": {"": 13, "acme/upper": 13}, "k2": {"": 16, "acme/lower": 16}}


async def test_a_days_tokens_are_summed_by_namespace_and_by_model_where_that_is_asked(engine):
    rows = [
        outcome("r1"),
        outcome("r2"),
        outcome("r3", model_name="acme/lower"),
        outcome("r4", namespace="b", model_name="b/m"),
        outcome("r5", finished_unix_ms=outcome().finished_unix_ms - DAY),
    ]
    await outcomes.record(engine, rows, now_unix_ms=NOW)
    assert await usage.tokens(engine, TODAY) == {"acme": {"": 24}, "b": {"": 8}}
    by_model = {"acme": {"": 24, "acme/upper": 16, "acme/lower": 8}, "b": {"": 8}}
    assert await usage.tokens(engine, TODAY, {"acme", "quiet"}) == by_model

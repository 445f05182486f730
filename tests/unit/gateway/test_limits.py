"""The limiter against an oracle that knows everything, and what gateways admit together."""

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.costs import lines_of
from weft.domain.limits import LimitRule, Metric
from weft_gateway.core.limits import REPORT_S, SILENT_S, SWEEP, Charge, Exceeded, Limiter, Remaining, rules_for
from weft_gateway.shell import duration

ASKED = st.tuples(
    st.integers(0, 64), st.integers(1, 4), st.integers(1, 500)
)  # eighths of a second since, requests, tokens


def admitted(limiter: Limiter, rules: Sequence[LimitRule], requests: int, tokens: int, now: float) -> Charge:
    charge = limiter.admit(rules, requests, tokens, now)
    assert isinstance(charge, Charge)
    return charge


def refused(limiter: Limiter, rules: Sequence[LimitRule], requests: int, tokens: int, now: float) -> Exceeded:
    refusal = limiter.admit(rules, requests, tokens, now)
    assert isinstance(refusal, Exceeded)
    return refusal


class Oracle:
    """One bucket of one rate, exact."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.at = limit, Fraction(0), Fraction(0)

    def level(self, now: Fraction) -> Fraction:
        self.used, self.at = max(Fraction(0), self.used - (now - self.at) * Fraction(self.limit, 60)), now
        return self.used

    def fits(self, cost: int, now: Fraction) -> bool:
        return self.level(now) + min(cost, self.limit) <= self.limit

    def add(self, amount: int, now: Fraction) -> None:
        self.used = max(Fraction(0), self.level(now) + amount)


@given(st.integers(1, 20), st.integers(1, 20), st.lists(st.tuples(ASKED, st.integers(0, 100)), max_size=60))
def test_one_gateway_admits_exactly_what_the_buckets_hold(
    requests_unit: int, tokens_unit: int, calls: list[tuple[tuple[int, int, int], int]]
) -> None:
    rule = LimitRule("key/a", "", 60 * requests_unit, 60 * tokens_unit)  # floats of these are exact
    limiter, now = Limiter("g"), Fraction(0)
    of_requests, of_tokens = Oracle(rule.requests_per_minute), Oracle(rule.tokens_per_minute)
    taken: list[tuple[Fraction, int]] = []
    for (eighths, requests, tokens), percent in calls:
        now += Fraction(eighths, 8)
        without_tokens = limiter.exceeded([rule], requests, None, float(now))
        assert (without_tokens is None) == of_requests.fits(requests, now)
        charged = limiter.admit([rule], requests, tokens, float(now))
        fits = of_requests.fits(requests, now) and of_tokens.fits(tokens, now)
        assert isinstance(charged, Charge) == fits
        if not isinstance(charged, Charge):
            assert 0 < charged.wait_s <= 60
            continue
        reserved, used = min(tokens, rule.tokens_per_minute), tokens * percent // 100
        of_requests.add(requests, now)
        of_tokens.add(reserved, now)
        limiter.settle(charged, used, float(now))
        of_tokens.add(used - reserved, now)
        taken.append((now, requests))
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            window = taken[last][0] - taken[first][0]
            most = rule.requests_per_minute * (1 + window / 60)
            assert sum(requests for _, requests in taken[first : last + 1]) <= most


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 2), st.integers(1, 40), st.integers(0, 60), st.booleans()),
        max_size=20,
    )
)
def test_gateways_that_report_at_once_know_all_use(calls: list[tuple[int, int, int, int, bool]]) -> None:
    """Each call: seconds since, the gateway, requests, tokens, and whether the oldest request there ends first."""
    rule, now = LimitRule("key/a", "", 60, 60), Fraction(0)
    limiters, running = [Limiter(f"g{i}") for i in range(3)], [list[Charge]() for _ in range(3)]
    of_requests, of_tokens = Oracle(60), Oracle(60)

    def report(index: int) -> None:
        said = limiters[index].report(float(now))
        for other in {*range(3)} - {index}:
            limiters[other].take(said, float(now))

    for index in range(3):
        report(index)
    for seconds, index, requests, tokens, ends in calls:
        now += seconds
        if ends and running[index]:
            charge = running[index].pop(0)
            limiters[index].settle(charge, tokens, float(now))
            of_tokens.add(tokens - (charge.tokens[0][1] or 0), now)
            report(index)
        fits = of_requests.fits(requests, now) and of_tokens.fits(tokens, now)
        charged = limiters[index].admit([rule], requests, tokens, float(now))
        assert isinstance(charged, Charge) == fits
        if isinstance(charged, Charge):
            running[index].append(charged)
            of_requests.add(requests, now)
            of_tokens.add(tokens, now)
        report(index)
        for metric, oracle in ((Metric.REQUESTS, of_requests), (Metric.TOKENS, of_tokens)):
            used = float(oracle.level(now))
            known = [one.remaining([rule], metric, float(now)) for one in limiters]
            assert known == [Remaining(60, max(0, int(60 - used)), used)] * 3


@given(
    st.integers(1, 4),
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(0, 8), st.lists(st.integers(0, 40), min_size=4, max_size=4)), max_size=12),
    st.integers(1, 4),
)
@example(3, 60, [(0, [1, 18, 20, 0]), (8, [8, 8, 8, 0]), (8, [1, 1, 1, 0])], 1)  # each left out all that time pays back
def test_several_gateways_stay_within_the_bound_together(
    gateways: int, limit: int, bursts: list[tuple[int, list[int]]], requests: int
) -> None:
    """Each burst: eighths of a second since the one before, and how often each gateway is asked."""
    rule, largest = LimitRule("namespace/a", "", limit), min(requests, limit)
    limiters = [Limiter(f"g{i}") for i in range(gateways)]
    now, due, oracle = 0.0, 0.0, Oracle(limit)
    for eighths, asked in bursts:
        now += eighths / 8
        while due <= now:
            reports = [limiter.report(due) for limiter in limiters]
            for i, report in enumerate(reports):
                for limiter in (*limiters[:i], *limiters[i + 1 :]):
                    limiter.take(report, due)
            due += REPORT_S
        for limiter, times in zip(limiters, asked, strict=False):
            for _ in range(times):
                if isinstance(limiter.admit([rule], requests, 0, now), Charge):
                    oracle.add(largest, Fraction(now))
        assert oracle.level(Fraction(now)) <= limit + (gateways - 1) * largest + limit * REPORT_S / 60 + 1e-6


def test_a_limit_can_be_used_up_through_one_of_several_gateways() -> None:
    rule, one, other = LimitRule("key/a", "", 60), Limiter("one"), Limiter("other")
    taken = 0
    for second in range(12):
        one.take(other.report(second), second)
        other.take(one.report(second), second)
        taken += sum(isinstance(one.admit([rule], 1, 0, second), Charge) for _ in range(60))
    assert taken >= 60


@pytest.mark.parametrize(("limit", "others", "share"), [(60, 0, 30), (60, 20, 20), (3, 0, 1)])
def test_between_reports_a_gateway_admits_its_share_of_what_is_left(limit: int, others: int, share: int) -> None:
    rule, one, other = LimitRule("key/a", "", limit), Limiter("one"), Limiter("other")
    other.admit([rule], others, 0, 0.0)
    one.take(other.report(0.0), 0.0)
    assert sum(isinstance(one.admit([rule], 1, 0, 0.0), Charge) for _ in range(limit)) == share


def test_what_ends_before_the_report_leaves_its_share() -> None:
    rule, limiter = LimitRule("key/a", "", 0, 60, concurrent=8), Limiter("one")
    limiter.take(Limiter("other").report(0.0), 0.0)

    def charges(times: int) -> list[Charge]:
        return [one for one in (limiter.admit([rule], 1, 1, 0.0) for _ in range(times)) if isinstance(one, Charge)]

    first, *others = charges(5)
    limiter.settle(first, 0, 0.0)
    (again,) = charges(2)
    for charge in (*others, again):
        limiter.settle(charge, 0, 0.0)
    assert limiter.exceeded([rule], 1, 60, 0.0) is None, "nothing of it is used"
    assert (len(others), len(charges(5))) == (3, 4)


def test_a_place_among_concurrent_requests_comes_after_their_mean_duration() -> None:
    rule, limiter = LimitRule("key/a", "", concurrent=1), Limiter("g")
    limiter.settle(admitted(limiter, [rule], 1, 0, 1.0), 0, 5.0)
    admitted(limiter, [rule], 1, 0, 5.0)
    waits = [refused(limiter, [rule], 1, 0, 5.0).wait_s for _ in range(3)]
    assert waits == pytest.approx([0.1, 1.25, 2.4]), "the mean of 1 s, moved by a twentieth to 4 s"


def test_a_rule_that_changes_keeps_its_use() -> None:
    limiter = Limiter("g")
    admitted(limiter, [LimitRule("key/a", "", 60, concurrent=1)], 1, 0, 0.0)
    wider, none = LimitRule("key/a", "", 120), LimitRule("key/a", "", 0, 60)
    assert limiter.remaining([wider], Metric.REQUESTS, 0.0) == Remaining(120, 119, 0.5)
    assert limiter.exceeded([wider], 2, None, 0.0) is None, "nothing bounds what runs at once"
    assert limiter.remaining([none], Metric.REQUESTS, 0.0) is None


def test_use_outlives_a_look_at_what_can_be_forgotten() -> None:
    rule, limiter = LimitRule("key/a", "", 60), Limiter("g")
    limiter.settle(admitted(limiter, [rule], 60, 0, 0.0), 0, 0.0)
    limiter.report(0.0)
    limiter.forget(1.0)
    refused(limiter, [rule], 60, 0, 1.0)


def test_concurrent_requests_are_counted_at_every_gateway_and_end_with_it() -> None:
    rule, here, there = LimitRule("key/a", "", concurrent=3), Limiter("here"), Limiter("there")
    first, *_ = [admitted(there, [rule], 1, 0, 0.0) for _ in range(3)]
    here.take(there.report(0.0), 0.0)
    refusal = refused(here, [rule], 1, 0, 0.0)
    assert (refusal.metric, refusal.used) == (Metric.CONCURRENT, 3)
    there.settle(first, 0, 1.0)
    here.take(there.report(1.0), 1.0)
    admitted(here, [rule], 1, 0, 1.0)
    assert refused(here, [rule], 1, 0, 1.5).used == 3
    ended = Limiter("there").report(2.0)
    here.take(ended, 2.0)
    assert refused(here, [rule], 3, 0, 2.0).used == 1, "what a report does not name has ended"
    here.take(there.report(2.0), 2.0)
    here.reconnected(5.0)
    here.forget(5.0 + SILENT_S)
    assert here.gateways == 2, "it could not be heard"
    here.forget(5.1 + SILENT_S)
    assert here.gateways == 1
    admitted(here, [rule], 2, 0, 11.0)  # what a lost gateway ran is over


def test_refused_requests_come_back_one_after_another_and_find_their_place() -> None:
    rule, limiter = LimitRule("key/a", "", 60), Limiter("g")
    admitted(limiter, [rule], 60, 0, 0.0)
    waits = [refused(limiter, [rule], 1, 0, 0.0).wait_s for _ in range(10)]
    assert waits == pytest.approx([float(i) for i in range(1, 11)])
    for wait_s in waits:
        admitted(limiter, [rule], 1, 0, wait_s + 1e-6)


def test_a_refused_request_is_charged_by_no_rule() -> None:
    wide, narrow, limiter = LimitRule("namespace/a", "", 10), LimitRule("key/a", "", 1), Limiter("g")
    admitted(limiter, [wide, narrow], 1, 0, 0.0)
    refused(limiter, [wide, narrow], 1, 0, 0.0)
    assert limiter.remaining([wide], Metric.REQUESTS, 0.0) == Remaining(10, 9, 6.0)
    assert limiter.remaining([wide, narrow], Metric.REQUESTS, 0.0) == Remaining(1, 0, 60.0)


def test_a_request_larger_than_the_limit_waits_for_all_of_it_and_is_paid_back() -> None:
    rule, limiter = LimitRule("key/a", "", tokens_per_minute=60), Limiter("g")
    charge = admitted(limiter, [rule], 1, 1000, 0.0)
    other = Limiter("g")
    other.settle(admitted(other, [rule], 1, 60, 0.0), 80, 0.0)
    assert other.admit([rule], 1, 1, 0.0) == Exceeded(rule, Metric.TOKENS, 80, 21.0)
    limiter.settle(charge, 180, 0.0)
    assert limiter.remaining([rule], Metric.TOKENS, 0.0) == Remaining(60, 0, 180.0)
    assert refused(limiter, [rule], 1, 30, 0.0).wait_s == 60.0, "150 s; the client may ask earlier, not later"
    admitted(limiter, [rule], 1, 30, 151.0)


def test_use_that_time_has_paid_back_is_not_reported() -> None:
    rule, limiter = LimitRule("key/a", "", 60), Limiter("g")
    admitted(limiter, [rule], 60, 0, 0.0)
    assert limiter.report(600.0).uses[0].requests == 0


def test_a_report_names_what_was_used_since_the_last_one_and_what_runs() -> None:
    rules = [LimitRule(f"key/{i:04}", "", 60) for i in range(SWEEP + 500)]
    here, there = Limiter("here"), Limiter("there")
    _, *charges = [admitted(here, [rule], 2, 0, 0.0) for rule in rules]
    there.take(here.report(0.0), 0.0)
    for charge in charges:
        here.settle(charge, 0, 0.5)
    ended = here.report(1.0)
    assert [(use.rule, use.requests, use.concurrent) for use in ended.uses] == [(rules[0], 0, 2)]
    there.take(ended, 1.0)
    costs = [lines_of(work) for work in (lambda: here.report(1.5), lambda: there.take(ended, 1.5))]
    assert max(costs) < 100, "of one rule, not of 1,500"
    admitted(there, rules[:1], 59, 0, 2.0)  # two of 60 in the first seconds, and none since
    for second in (400.0, 401.0):
        here.forget(second)
    assert lines_of(lambda: here.forget(402.0)) < 100, "nothing of the others is left"


def test_a_rule_is_for_the_models_that_it_names() -> None:
    rules = [LimitRule("key/a"), LimitRule("key/a", "a/chat-*"), LimitRule("key/a", "b")]
    assert rules_for(rules, "a/chat-1") == rules[:2]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.12, "120ms"), (1, "1s"), (8.64, "8.64s"), (59.9999, "1m0s"), (360, "6m0s"), (3661.5, "1h1m1.5s")],
)
def test_times_have_the_form_of_openais_headers(seconds: float, text: str) -> None:
    assert duration(seconds) == text

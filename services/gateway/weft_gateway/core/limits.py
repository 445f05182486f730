"""Limits of keys and namespaces, held by every gateway for itself and together within a bound.

A rate is a token bucket, written as its debt: `used` grows by what is admitted and shrinks by limit / 60 a second, and
nothing is admitted that takes `used` above the limit. So an idle caller may use a minute's worth at once, and in any T
seconds at most limit + limit * T / 60 are admitted. (The leaky bucket as a meter, ITU-T I.371 annex A, of which GCRA is
the equivalent virtual scheduling form.) Concurrent requests are a bucket that does not shrink by itself.

Tokens are charged at admission: prompt and `max_tokens` of every answer (1,024 where nobody asked for any), at most the
limit, so that no request is refused for good; the end corrects the charge to the tokens there were.

Gateways report what they used every `REPORT_S` and add what the others report. Between two of its reports a gateway
admits at most its share of what is left, 1 / gateways, and always one request. So at any moment `used` is above the
limit by at most one request of every other gateway, and by what was used within one interval and the message's way;
what is above it is paid back before anything else is admitted. A gateway that cannot report keeps its share.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice

from weft.domain.limits import SECONDS, LimitReport, LimitRule, LimitUse, Metric

REPORT_S = 1.0
SILENT_S = 5.0  # a gateway that reports nothing for so long is gone, and what it ran with it
MAX_WAIT_S = 60.0  # the official clients wait no longer
MIN_WAIT_S = 0.1  # for a place among concurrent requests
MEAN_WEIGHT = 0.05  # of the newest request in the mean duration
SWEEP = 1000  # rules that `forget` looks at, in turn: all of 10,000 keep the event loop for 25 ms
Name = tuple[str, str]  # subject and model of a rule


class Meter:
    """The use of one metric of one rule."""

    def __init__(self, limit: int, *, rate: bool, now: float) -> None:
        self.limit, self.per_s = limit, limit / SECONDS if rate else 0.0
        self.used = 0.0  # by all gateways, as far as known
        self.unreported = 0.0  # of that what the others do not know of
        self.delta = 0  # to report, with its sign
        self._at = self._next_place = now

    def set_limit(self, limit: int) -> None:
        """What was used stays."""
        self.limit = limit
        if self.per_s:
            self.per_s = limit / SECONDS

    def advance(self, now: float, gateways: int) -> None:
        """Use shrinks with time; a gateway's own part by its share, so that it is right without any report."""
        elapsed, self._at = max(0.0, now - self._at), max(self._at, now)
        self.used = max(0.0, self.used - elapsed * self.per_s)
        self.unreported = max(0.0, self.unreported - elapsed * self.per_s / gateways)

    def fits(self, cost: int, gateways: int) -> bool:
        """Whether `cost` may be added now."""
        if self.used + cost > self.limit:
            return False
        left = self.limit - max(0.0, self.used - self.unreported)
        return gateways == 1 or self.unreported <= 0 or self.unreported + cost <= left / gateways

    def add(self, amount: int) -> None:
        """Use, or the correction of an earlier one."""
        self.delta += amount
        self.used, self.unreported = max(0.0, self.used + amount), max(0.0, self.unreported + amount)

    def add_others(self, amount: int) -> None:
        self.used = max(0.0, self.used + amount)

    def reported(self) -> int:
        """Return what the others add to their use; from now on they know of everything.

        Of what time has paid back this gateway's share is left out: the others have paid back theirs.
        """
        delta, self.delta, self.unreported = min(self.delta, math.ceil(self.unreported)), 0, 0.0
        return delta

    def place(self, cost: int, now: float, mean_s: float) -> float:
        """Seconds until a refused request should come back: each is given a time of its own."""
        if self.per_s:
            wait_s, step_s = (self.used + cost - self.limit) / self.per_s, cost / self.per_s
        else:
            wait_s, step_s = MIN_WAIT_S, mean_s / self.limit
        self._next_place = max(now + max(wait_s, MIN_WAIT_S), self._next_place + step_s)
        self._next_place = min(self._next_place, now + MAX_WAIT_S)
        return self._next_place - now

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self.limit - self.used))

    @property
    def reset_s(self) -> float:
        """Until nothing of a rate is used."""
        return self.used / self.per_s


class Bucket:
    """One rule's meters, by what it limits."""

    def __init__(self, rule: LimitRule, now: float) -> None:
        self.rule = rule
        self.running = 0  # here
        self.running_at: dict[str, int] = {}  # the other gateways
        self.mean_s = 1.0  # of its requests, exponentially weighted
        self.meters: dict[Metric, Meter] = {}
        self.follow(rule, now)

    def follow(self, rule: LimitRule, now: float) -> None:
        """The rule has changed, or is new; what was used stays."""
        self.rule = rule
        for metric in Metric:
            limit, meter = rule.limit(metric), self.meters.get(metric)
            if not limit:
                self.meters.pop(metric, None)
            elif meter is None:
                self.meters[metric] = Meter(limit, rate=metric is not Metric.CONCURRENT, now=now)
            else:
                meter.set_limit(limit)

    def advance(self, now: float, gateways: int) -> None:
        for metric, meter in self.meters.items():
            meter.advance(now, gateways)
            if metric is Metric.CONCURRENT:
                meter.used = float(self.running + sum(self.running_at.values()))

    @property
    def idle(self) -> bool:
        return not (self.running or self.running_at or any(meter.used or meter.delta for meter in self.meters.values()))


@dataclass(frozen=True, slots=True)
class Charge:
    """What was charged for a request, to be settled at its end."""

    tokens: tuple[tuple[Name, int | None], ...]  # by rule; None: it does not limit tokens
    requests: int
    at: float


@dataclass(frozen=True, slots=True)
class Remaining:
    """What is left of a rate by the rule that leaves the least."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Exceeded:
    """A limit that is reached: nothing was charged."""

    rule: LimitRule
    metric: Metric
    used: int
    wait_s: float


class Limiter:
    """The meters of one gateway. Times are of one clock that never goes back; one owner calls it.

    A report, sent or taken, costs the rules that it names, however many there are.
    """

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._buckets: dict[Name, Bucket] = {}
        self._unreported: dict[Name, None] = {}  # an ordered set: rules used since the last report, or running here
        self._running_at: dict[str, list[Name]] = {}  # by the other gateways, the rules that their requests count for
        self._reported_at: dict[str, float] = {}  # by the other gateways, the last time

    @property
    def gateways(self) -> int:
        """How many gateways share the limits, this one included."""
        return 1 + len(self._reported_at)

    def exceeded(self, rules: Sequence[LimitRule], requests: int, tokens: int | None, now: float) -> Exceeded | None:
        """The first limit that has no room for a request. `tokens`: as of `admit`; None: not known yet, any number."""
        for rule in rules:
            bucket = self._bucket(rule, now)
            for metric, meter in bucket.meters.items():
                amount = tokens if metric is Metric.TOKENS else requests
                if amount is not None and not meter.fits(cost := min(amount, meter.limit), self.gateways):
                    return Exceeded(rule, metric, math.ceil(meter.used), meter.place(cost, now, bucket.mean_s))
        return None

    def admit(self, rules: Sequence[LimitRule], requests: int, tokens: int, now: float) -> Charge | Exceeded:
        """Charge every rule, or none. `tokens`: of the prompts and of the longest answers."""
        if (exceeded := self.exceeded(rules, requests, tokens, now)) is not None:
            return exceeded
        charged: list[tuple[Name, int | None]] = []
        for rule in rules:
            bucket, name, charged_tokens = self._bucket(rule, now), _name(rule), None
            bucket.running += requests
            self._unreported[name] = None
            for metric, meter in bucket.meters.items():
                amount = min(tokens if metric is Metric.TOKENS else requests, meter.limit)
                meter.add(amount)
                if metric is Metric.TOKENS:
                    charged_tokens = amount
            charged.append((name, charged_tokens))
        return Charge(tuple(charged), requests, now)

    def settle(self, charge: Charge, tokens: int, now: float) -> None:
        """Settle a charge, once, when its request has ended with `tokens` tokens."""
        for name, charged in charge.tokens:
            if (bucket := self._buckets.get(name)) is None:
                continue
            self._unreported[name] = None
            bucket.running = max(0, bucket.running - charge.requests)
            bucket.mean_s += MEAN_WEIGHT * (now - charge.at - bucket.mean_s)
            bucket.advance(now, self.gateways)
            if charged is not None and (meter := bucket.meters.get(Metric.TOKENS)) is not None:
                meter.add(tokens - charged)
            if (meter := bucket.meters.get(Metric.CONCURRENT)) is not None:
                meter.unreported = max(0.0, meter.unreported - charge.requests)

    def remaining(self, rules: Iterable[LimitRule], metric: Metric, now: float) -> Remaining | None:
        """Return what the rule that leaves the least leaves; None: no rule limits it."""
        meters = [self._bucket(rule, now).meters.get(metric) for rule in rules]
        remaining = [Remaining(meter.limit, meter.remaining, meter.reset_s) for meter in meters if meter is not None]
        return min(remaining, key=lambda entry: entry.remaining, default=None)

    def report(self, now: float) -> LimitReport:
        """What the others are to know: what was used since the last report."""
        uses: list[LimitUse] = []
        names, self._unreported = self._unreported, {}
        for name in names:
            bucket = self._buckets[name]
            bucket.advance(now, self.gateways)
            requests, tokens, _ = (
                bucket.meters[metric].reported() if metric in bucket.meters else 0 for metric in Metric
            )
            if requests or tokens or bucket.running:
                uses.append(LimitUse(bucket.rule, requests, tokens, bucket.running))
            if bucket.running:
                self._unreported[name] = None
        return LimitReport(self._gateway, tuple(uses))

    def take(self, report: LimitReport, now: float) -> None:
        """What another gateway used. What it ran before and does not name has ended."""
        self._reported_at[report.gateway] = now
        self._end_running(report.gateway)
        for use in report.uses:
            bucket = self._bucket(use.rule, now)
            if use.concurrent:
                bucket.running_at[report.gateway] = use.concurrent
            for metric, amount in ((Metric.REQUESTS, use.requests), (Metric.TOKENS, use.tokens)):
                if metric in bucket.meters:
                    bucket.meters[metric].add_others(amount)
        self._running_at[report.gateway] = [_name(use.rule) for use in report.uses if use.concurrent]

    def reconnected(self, now: float) -> None:
        """This gateway could hear nobody: the others' silence counts from now."""
        self._reported_at = dict.fromkeys(self._reported_at, now)

    def forget(self, now: float) -> None:
        """Silent gateways, and of the next SWEEP rules those that nobody uses. Not while this one hears nobody."""
        for gateway in [name for name, at in self._reported_at.items() if now - at > SILENT_S]:
            del self._reported_at[gateway]
            self._end_running(gateway)
        for name in list(islice(self._buckets, SWEEP)):
            bucket = self._buckets.pop(name)
            bucket.advance(now, self.gateways)
            if not bucket.idle or name in self._unreported:
                self._buckets[name] = bucket  # at the end: others are next

    def _end_running(self, gateway: str) -> None:
        for name in self._running_at.pop(gateway, ()):
            self._buckets[name].running_at.pop(gateway, None)

    def _bucket(self, rule: LimitRule, now: float) -> Bucket:
        """Return the bucket of a rule as it is now."""
        bucket = self._buckets.get(_name(rule))
        if bucket is None:
            bucket = self._buckets[_name(rule)] = Bucket(rule, now)
        elif bucket.rule != rule:
            bucket.follow(rule, now)
        bucket.advance(now, self.gateways)
        return bucket


def rules_for(rules: Iterable[LimitRule], model: str) -> list[LimitRule]:
    """Return the rules that a request to this model counts for."""
    return [rule for rule in rules if not rule.model or fnmatchcase(model, rule.model)]


def _name(rule: LimitRule) -> Name:
    return rule.subject, rule.model

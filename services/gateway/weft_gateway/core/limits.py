"""Limits of keys and namespaces. Each gateway keeps its limits, and all gateways together keep them within a bound.

A rate is a token bucket, written as its debt. `used` grows by the admitted amount and shrinks by limit / 60 a second;
no request may take `used` above the limit. So an idle caller may use a minute's worth at once. In any T seconds at most
limit + limit * T / 60 are admitted. This is the leaky bucket as a meter (ITU-T I.371 annex A); GCRA is the equivalent
virtual scheduling form. Concurrent requests are a bucket without a shrinking debt.

Tokens are charged at admission: prompt and `max_tokens` of every answer (1,024 without `max_tokens`). The charge is at
most the limit, so that no request is refused for good. The end of the request corrects the charge to the real tokens.

Gateways report their use every `REPORT_S` and add the reports of the rest. Between two of its reports a gateway admits
at most its share of the remainder, 1 / gateways, and always a single request. So `used` exceeds the limit at most by a
request of each further gateway, and by the use within an interval and the message's way. The excess is paid back before
the next admission. A gateway that cannot report keeps its share.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice

from weft.domain.limits import SECONDS, LimitReport, LimitRule, LimitUse, Metric

REPORT_S = 1.0
SILENT_S = 5.0  # a gateway silent for this time is gone, with its running requests
MAX_WAIT_S = 60.0  # the official clients wait no longer
MIN_WAIT_S = 0.1  # for a place among concurrent requests
MEAN_WEIGHT = 0.05  # weight of the newest request in the mean duration
SWEEP = 1000  # rules checked by `forget`, in turn: all of 10,000 block the event loop for 25 ms
Name = tuple[str, str]  # subject and model of a rule


class Meter:
    """The use of a metric of a rule."""

    def __init__(self, limit: int, *, rate: bool, now: float) -> None:
        self.limit, self.per_s = limit, limit / SECONDS if rate else 0.0
        self.used = 0.0  # by all gateways, as far as known
        self.unreported = 0.0  # the part not yet known to further gateways
        self.delta = 0  # to report, with its sign
        self._at = self._next_place = now

    def set_limit(self, limit: int) -> None:
        """Set a new limit and keep the use."""
        self.limit = limit
        if self.per_s:
            self.per_s = limit / SECONDS

    def advance(self, now: float, gateways: int) -> None:
        """Shrink the use by the time passed. This gateway's part shrinks by its share, so that it is right without any
        report."""
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
        """Add a use, or the correction of an earlier use."""
        self.delta += amount
        self.used, self.unreported = max(0.0, self.used + amount), max(0.0, self.unreported + amount)

    def add_others(self, amount: int) -> None:
        self.used = max(0.0, self.used + amount)

    def reported(self) -> int:
        """Return the amount that further gateways add; from now on they know the full use.

        The amount paid back by time is left out at this gateway's share: the rest of the gateways have paid back
        theirs.
        """
        delta, self.delta, self.unreported = min(self.delta, math.ceil(self.unreported)), 0, 0.0
        return delta

    def place(self, cost: int, now: float, mean_s: float) -> float:
        """Return the seconds until a refused request should come back: each request gets a separate time."""
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
        """Return the seconds until the rate's use is 0."""
        return self.used / self.per_s


class Bucket:
    """The meters of a rule, by limited metric."""

    def __init__(self, rule: LimitRule, now: float) -> None:
        self.rule = rule
        self.running = 0  # here
        self.running_at: dict[str, int] = {}  # the other gateways
        self.mean_s = 1.0  # mean duration of its requests, exponentially weighted
        self.meters: dict[Metric, Meter] = {}
        self.follow(rule, now)

    def follow(self, rule: LimitRule, now: float) -> None:
        """Follow a changed or new rule; the use stays."""
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
    """The charge of a request, to be settled at its end."""

    tokens: tuple[tuple[Name, int | None], ...]  # by rule; None: the rule does not limit tokens
    requests: int
    at: float


@dataclass(frozen=True, slots=True)
class Remaining:
    """The remainder of a rate by its tightest rule."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Exceeded:
    """A reached limit; no charge was made."""

    rule: LimitRule
    metric: Metric
    used: int
    wait_s: float


class Limiter:
    """The meters of a gateway. Times are of a clock that never goes back; a single owner calls it.

    The cost of a report, sent or taken, depends only on the rules in it.
    """

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._buckets: dict[Name, Bucket] = {}
        self._unreported: dict[Name, None] = {}  # an ordered set: rules used since the last report, or running here
        self._running_at: dict[str, list[Name]] = {}  # by gateway, the rules of its running requests
        self._reported_at: dict[str, float] = {}  # by gateway, the time of its last report

    @property
    def gateways(self) -> int:
        """Return the number of gateways that share the limits, including this gateway."""
        return 1 + len(self._reported_at)

    def exceeded(self, rules: Sequence[LimitRule], requests: int, tokens: int | None, now: float) -> Exceeded | None:
        """Return the first limit without room for a request. `tokens`: as of `admit`; None: not known yet, any
        number."""
        for rule in rules:
            bucket = self._bucket(rule, now)
            for metric, meter in bucket.meters.items():
                amount = tokens if metric is Metric.TOKENS else requests
                if amount is not None and not meter.fits(cost := min(amount, meter.limit), self.gateways):
                    return Exceeded(rule, metric, math.ceil(meter.used), meter.place(cost, now, bucket.mean_s))
        return None

    def admit(self, rules: Sequence[LimitRule], requests: int, tokens: int, now: float) -> Charge | Exceeded:
        """Charge every rule, or no rule. `tokens`: of the prompts and of the longest answers."""
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
        """Settle a charge, once, at its request's end with `tokens` tokens."""
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
        """Return the remainder by the tightest rule; None: no rule limits it."""
        meters = [self._bucket(rule, now).meters.get(metric) for rule in rules]
        remaining = [Remaining(meter.limit, meter.remaining, meter.reset_s) for meter in meters if meter is not None]
        return min(remaining, key=lambda limit: limit.remaining, default=None)

    def report(self, now: float) -> LimitReport:
        """Return the use since the last report, for further gateways."""
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
        """Take a further gateway's use. Its earlier running requests have ended unless the report names them."""
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
        """Restart the silence of all gateways after this gateway was disconnected."""
        self._reported_at = dict.fromkeys(self._reported_at, now)

    def forget(self, now: float) -> None:
        """Forget silent gateways, and the unused rules among the next SWEEP rules. Not to be called while this gateway
        is disconnected."""
        for gateway in [gateway_id for gateway_id, at in self._reported_at.items() if now - at > SILENT_S]:
            del self._reported_at[gateway]
            self._end_running(gateway)
        for name in list(islice(self._buckets, SWEEP)):
            bucket = self._buckets.pop(name)
            bucket.advance(now, self.gateways)
            if not bucket.idle or name in self._unreported:
                self._buckets[name] = bucket  # at the end: further rules are next

    def _end_running(self, gateway: str) -> None:
        for name in self._running_at.pop(gateway, ()):
            self._buckets[name].running_at.pop(gateway, None)

    def _bucket(self, rule: LimitRule, now: float) -> Bucket:
        """Return the bucket of a rule at its present limits."""
        bucket = self._buckets.get(_name(rule))
        if bucket is None:
            bucket = self._buckets[_name(rule)] = Bucket(rule, now)
        elif bucket.rule != rule:
            bucket.follow(rule, now)
        bucket.advance(now, self.gateways)
        return bucket


def rules_for(rules: Iterable[LimitRule], model: str) -> list[LimitRule]:
    """Return the rules of requests to a model."""
    return [rule for rule in rules if not rule.model or fnmatchcase(model, rule.model)]


def _name(rule: LimitRule) -> Name:
    return rule.subject, rule.model

"""Limits at the API: who may ask, what the answer's headers say, what a refused client reads."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.domain.limits import LimitReport, LimitRule, Metric
from weft_gateway.core.limits import Charge, Exceeded, Limiter, rules_for
from weft_gateway.core.routes import Principal
from weft_gateway.errors import LimitReached, QuotaSpent

EVERY_MODEL = ("", "*")  # of a rule
_HEADERS = {Metric.REQUESTS: "requests", Metric.TOKENS: "tokens"}


@dataclass(frozen=True, slots=True)
class AdmittedCall:
    """A request within its limits. `headers`: of its answer."""

    charge: Charge
    headers: dict[str, str]


class RateLimits:
    """A gateway's limiter with the process's clocks."""

    def __init__(self, gateway: str, clock: Callable[[], float]) -> None:
        self._limiter, self._clock = Limiter(gateway), clock

    def check_caller(self, caller: Principal) -> None:
        """Refuse a caller that `admit` would refuse for every model. Raises LimitReached, QuotaSpent."""
        self._check([rule for rule in caller.limits if rule.model in EVERY_MODEL], 1)

    def check_requests(self, caller: Principal, model: str, requests: int) -> None:
        """Refuse a request that `admit` would refuse for any number of tokens, before its prompt is tokenised.

        Raises LimitReached, QuotaSpent.
        """
        self._check(rules_for(caller.limits, model), requests)

    def _check(self, rules: Sequence[LimitRule], requests: int) -> None:
        if rules:
            check_quota(rules)
            if (exceeded := self._limiter.exceeded(rules, requests, None, self._clock())) is not None:
                raise _refusal(exceeded, requests, self._headers_of(rules))

    def admit(self, caller: Principal, model: str, requests: int, tokens: int) -> AdmittedCall | None:
        """Charge a request that `check_requests` has let through; None: nothing limits it. Raises LimitReached."""
        if not (rules := rules_for(caller.limits, model)):
            return None
        charged = self._limiter.admit(rules, requests, tokens, self._clock())
        headers = self._headers_of(rules)
        if isinstance(charged, Exceeded):
            raise _refusal(charged, tokens if charged.metric is Metric.TOKENS else requests, headers)
        return AdmittedCall(charged, headers)

    def settle(self, admitted: AdmittedCall, tokens: int) -> None:
        """Note that a request has ended after `tokens` tokens. Once for each."""
        self._limiter.settle(admitted.charge, tokens, self._clock())

    def reconnected(self) -> None:
        """The scheduler passes reports on again."""
        self._limiter.reconnected(self._clock())

    def report(self) -> LimitReport:
        """For the other gateways, once every `REPORT_S` while the scheduler passes it on."""
        now = self._clock()
        self._limiter.forget(now)
        return self._limiter.report(now)

    def take(self, report: LimitReport) -> None:
        """Another gateway's."""
        self._limiter.take(report, self._clock())

    def _headers_of(self, rules: Sequence[LimitRule]) -> dict[str, str]:
        headers: dict[str, str] = {}
        for metric, name in _HEADERS.items():
            if (left := self._limiter.remaining(rules, metric, self._clock())) is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(left.limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(left.remaining)
                headers[f"x-ratelimit-reset-{name}"] = duration(left.reset_s)
        return headers


def check_quota(rules: Sequence[LimitRule]) -> None:
    """Raises QuotaSpent."""
    now_ms = time.time_ns() // 1_000_000
    for rule in rules:
        if rule.spent_until_unix_ms > now_ms:
            text = f"The {rule.tokens_per_day} tokens a day{_name_of(rule)} are used up; the day ends at 00:00 UTC."
            raise QuotaSpent(text)


def duration(seconds: float) -> str:
    """A time as OpenAI's headers have it: 0s, 120ms, 1.5s, 6m0s, 1h0m0s."""
    ms = math.ceil(1000 * seconds)
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, rest_ms = divmod(ms, 60_000)
    rest = f"{rest_ms / 1000:g}s"
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}"
    return f"{minutes}m{rest}" if minutes else rest


def _refusal(exceeded: Exceeded, requested: int, headers: dict[str, str]) -> LimitReached:
    rule, metric, wait_ms = exceeded.rule, exceeded.metric, math.ceil(1000 * exceeded.wait_s)
    text = (
        f"Rate limit reached{_name_of(rule)} on {metric.value}: Limit {rule.limit(metric)}, Used {exceeded.used}, "
        f"Requested {requested}. Please try again in {duration(wait_ms / 1000)}."
    )
    return LimitReached(text, _HEADERS.get(metric, "requests"), headers, retry_after_ms=wait_ms)


def _name_of(rule: LimitRule) -> str:
    kind, _, name = rule.subject.partition("/")
    return f" for {kind} {name}" + (f" and model {rule.model}" if rule.model else "")

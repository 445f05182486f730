"""Limits on requests, tokens and concurrent answers: what is set for a key or a namespace, and what gateways used."""

from dataclasses import dataclass
from enum import Enum

SECONDS = 60.0  # of the period that rates are given for


class Metric(Enum):
    """What is limited. The value is its name for people."""

    REQUESTS = "requests per minute"
    TOKENS = "tokens per minute"
    CONCURRENT = "concurrent requests"


@dataclass(frozen=True, slots=True)
class LimitRule:
    """Limits of a key or of a namespace, on its models together or on those that `model` names. 0: none."""

    subject: str  # "key/ID" or "namespace/NAME"
    model: str = ""  # a name, or a pattern with * and ?; "": every model
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0
    tokens_per_day: int = 0  # UTC; of a namespace
    spent_until_unix_ms: int = 0  # the day's tokens are used up until then; 0: they are not

    def limit(self, metric: Metric) -> int:
        """0: none."""
        if metric is Metric.REQUESTS:
            return self.requests_per_minute
        return self.tokens_per_minute if metric is Metric.TOKENS else self.concurrent


@dataclass(frozen=True, slots=True)
class LimitUse:
    """How the use of a rule has changed at a gateway since its last report; `concurrent` is the number now."""

    rule: LimitRule
    requests: int
    tokens: int  # below 0: answers were shorter than what they had reserved
    concurrent: int


@dataclass(frozen=True, slots=True)
class LimitReport:
    """What a gateway used of its rules, for the others. Sent at an interval, also where it used nothing."""

    gateway: str
    uses: tuple[LimitUse, ...] = ()

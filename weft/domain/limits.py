"""Limits on requests, tokens and concurrent answers: what is set for a key or a namespace, and what gateways used."""

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from weft.domain.bounds import MAX_MODEL_CHARS, MAX_NAME_CHARS, Any64, Bound, Listed

MAX_LIMIT_VALUE = 1 << 50  # of requests or tokens
Limit = Annotated[int, Bound(MAX_LIMIT_VALUE)]
SECONDS = 60.0  # of the period that rates are given for


class Metric(Enum):
    """What is limited. The value is its name for people."""

    REQUESTS = "requests per minute"
    TOKENS = "tokens per minute"
    CONCURRENT = "concurrent requests"


@dataclass(frozen=True, slots=True)
class LimitRule:
    """Limits of a key or of a namespace, on its models together or on those that `model` names. 0: none."""

    subject: Annotated[str, Bound(MAX_NAME_CHARS, 1, "the subject of a limit")]  # "key/ID" or "namespace/NAME"
    # A name, or a pattern with * and ?; "": every model.
    model: Annotated[str, Bound(MAX_MODEL_CHARS, subject="the model of a limit")] = ""
    requests_per_minute: Limit = 0
    tokens_per_minute: Limit = 0
    concurrent: Limit = 0
    tokens_per_day: Limit = 0  # UTC; of a namespace
    spent_until_unix_ms: Any64 = 0  # the day's tokens are used up until then; 0: they are not

    def limit(self, metric: Metric) -> int:
        """The limit of this metric; 0: none."""
        if metric is Metric.REQUESTS:
            return self.requests_per_minute
        return self.tokens_per_minute if metric is Metric.TOKENS else self.concurrent


@dataclass(frozen=True, slots=True)
class LimitUse:
    """How the use of a rule has changed at a gateway since its last report; `concurrent` is the number now."""

    rule: LimitRule
    requests: Annotated[int, Bound(MAX_LIMIT_VALUE, -MAX_LIMIT_VALUE)]
    # Below 0: answers were shorter than what they had reserved.
    tokens: Annotated[int, Bound(MAX_LIMIT_VALUE, -MAX_LIMIT_VALUE)]
    concurrent: Limit


@dataclass(frozen=True, slots=True)
class LimitReport:
    """A gateway's use of its limit rules, for the other gateways. Sent at an interval, even without use."""

    gateway: Annotated[str, Bound(MAX_NAME_CHARS, subject="a gateway's id")]
    uses: Listed[LimitUse] = ()

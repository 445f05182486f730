"""The last hour of a gateway: latencies, answers by status, and tokens, in total and for each namespace.

A minute holds counts by bucket. Buckets grow by a tenth, so a percentile is within 5 % of the value. An answer costs
three of them; a token costs nothing.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil, exp, log

MINUTES = 60
MAX_NAMESPACES = 500  # namespaces with figures per minute; further namespaces count in the total only
MIN_S, GROWTH = 1e-4, 1.1
BUCKETS = 170  # the last bucket holds everything from 1,000 s on
EVERYBODY = None
FAILED = 400  # an error's HTTP status, at least
_LOG_GROWTH = log(GROWTH)


def bucket_of(seconds: float) -> int:
    """Return the bucket of a duration; bucket b holds (MIN_S * GROWTH^(b-1), MIN_S * GROWTH^b]."""
    return min(BUCKETS, ceil(log(max(seconds, MIN_S) / MIN_S) / _LOG_GROWTH))


def quantile(buckets: Mapping[int, int], share: float) -> float | None:
    """Return the quantile of the durations in seconds at a share (0..1); None: no durations."""
    total = sum(buckets.values())
    if not total:
        return None
    rank, seen = max(1, ceil(share * total)), 0
    for bucket in sorted(buckets):
        seen += buckets[bucket]
        if seen >= rank:
            return MIN_S * exp((bucket - 0.5) * _LOG_GROWTH) if bucket else MIN_S
    raise AssertionError("a rank beyond the total")


@dataclass(slots=True)
class UsageSum:
    """The sum of requests, answers and tokens. `failed`: answers with an error."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, usage: "UsageSum") -> None:
        self.requests += usage.requests
        self.failed += usage.failed
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens


@dataclass(slots=True)
class Tally:
    """The counts of a minute, or of several minutes. Durations by bucket; answers by (status, code)."""

    ttft: Counter[int] = field(default_factory=Counter[int])
    token: Counter[int] = field(default_factory=Counter[int])  # mean time of a token after the first, by answer
    total: Counter[int] = field(default_factory=Counter[int])
    answers: Counter[tuple[int, str]] = field(default_factory=Counter[tuple[int, str]])
    usage: UsageSum = field(default_factory=UsageSum)

    @property
    def errors(self) -> Counter[tuple[int, str]]:
        return Counter({status: count for status, count in self.answers.items() if status[0] >= FAILED})

    def add(self, tally: "Tally") -> None:
        self.ttft.update(tally.ttft)
        self.token.update(tally.token)
        self.total.update(tally.total)
        self.answers.update(tally.answers)
        self.usage.add(tally.usage)


@dataclass(slots=True)
class _Minute:
    number: int  # since the clock's zero
    tallies: dict[str | None, Tally] = field(default_factory=lambda: {EVERYBODY: Tally()})

    def tallies_of(self, namespace: str | None) -> Iterable[Tally]:
        """Yield the tallies of a namespace; None: of an unknown caller."""
        yield self.tallies[EVERYBODY]
        if namespace is None:
            return
        if namespace not in self.tallies:
            if len(self.tallies) > MAX_NAMESPACES:
                return
            self.tallies[namespace] = Tally()
        yield self.tallies[namespace]


class History:
    """The counts of the last hour. All times are of a monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._minutes: deque[_Minute] = deque(maxlen=MINUTES)

    def answered(self, namespace: str | None, status: int, code: str, now: float) -> None:
        """Count an answer to a client. `code`: of an error, or ""; `namespace` None: an unknown caller."""
        for tally in self._minute(now).tallies_of(namespace):
            tally.answers[status, code] += 1
            tally.usage.requests += 1
            tally.usage.failed += status >= FAILED

    def used(self, namespace: str, prompt_tokens: int, completion_tokens: int, now: float) -> None:
        """Count the billed tokens of an answer."""
        for tally in self._minute(now).tallies_of(namespace):
            tally.usage.prompt_tokens += prompt_tokens
            tally.usage.completion_tokens += completion_tokens

    def timed(self, namespace: str, ttft_s: float | None, token_s: float | None, total_s: float, now: float) -> None:
        """Count the times of an answer with a waiting client."""
        for tally in self._minute(now).tallies_of(namespace):
            tally.total[bucket_of(total_s)] += 1
            if ttft_s is not None:
                tally.ttft[bucket_of(ttft_s)] += 1
            if token_s is not None:
                tally.token[bucket_of(token_s)] += 1

    def minutes(self, namespace: str | None, now: float) -> list[Tally]:
        """Return the last MINUTES minutes, the present minute last; empty tallies without answers. None: all
        namespaces."""
        tallies = {minute.number: minute.tallies.get(namespace) for minute in self._minutes}
        present = int(now // 60)
        return [tallies.get(number) or Tally() for number in range(present - MINUTES + 1, present + 1)]

    def by_namespace(self, now: float) -> dict[str, UsageSum]:
        """Sum the last hour of each namespace. A minute holds at most MAX_NAMESPACES."""
        sums: dict[str, UsageSum] = {}
        for minute in self._minutes:
            if minute.number > now // 60 - MINUTES:
                for namespace, tally in minute.tallies.items():
                    if namespace is not None:
                        sums.setdefault(namespace, UsageSum()).add(tally.usage)
        return sums

    def _minute(self, now: float) -> _Minute:
        number = int(now // 60)
        if not self._minutes or self._minutes[-1].number < number:
            self._minutes.append(_Minute(number))
        return self._minutes[-1]


def summed(tallies: Iterable[Tally]) -> Tally:
    """Return the sum of all given tallies."""
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total

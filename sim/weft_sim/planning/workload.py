"""What a cluster is planned for: requests from a trace, or drawn from distributions."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weft_sim.traces import TraceArrival

Draw = Callable[[random.Random], int]


class BadWorkload(ValueError):
    """A distribution or a rate that cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to plan for. `trace`: to draw from. `rate_s`: of Poisson arrivals; None: the trace's own times.

    With `prompt` and `output` lengths are drawn from them instead, independently of each other.
    """

    trace: tuple[TraceArrival, ...] = ()
    rate_s: float | None = None
    prompt: Draw | None = None
    output: Draw | None = None

    def arrivals(self, requests: int, seed: int) -> tuple[TraceArrival, ...]:
        """Return `requests` requests from time 0 on. A different seed gives different requests, or a later part of a
        trace with times.

        Raises BadWorkload.
        """
        chance = random.Random(f"workload/{seed}")
        if self.rate_s is None:
            return self._part(min(requests, len(self.trace)), chance)
        at_s, arrivals = 0.0, list[TraceArrival]()
        for _ in range(requests):
            at_s += chance.expovariate(self.rate_s)
            arrivals.append(replace(self._drawn(chance), at_s=at_s))
        return tuple(arrivals)

    def _drawn(self, chance: random.Random) -> TraceArrival:
        if self.prompt is not None and self.output is not None:
            return TraceArrival(0.0, self.prompt(chance), self.output(chance))
        if not self.trace:
            raise BadWorkload("give a trace, or distributions of prompt and output")
        return chance.choice(self.trace)

    def _part(self, requests: int, chance: random.Random) -> tuple[TraceArrival, ...]:
        """Return consecutive requests of the trace."""
        if not self.trace:
            raise BadWorkload("give a trace, or a rate and distributions of prompt and output")
        first = chance.randrange(len(self.trace) - requests + 1)
        part = self.trace[first : first + requests]
        return tuple(replace(arrival, at_s=arrival.at_s - part[0].at_s) for arrival in part)


def distribution(text: str) -> Draw:
    """Parse `fixed:N`, `uniform:LEAST,MOST` or `lognormal:MEDIAN,SIGMA` tokens. Raises BadWorkload."""
    name, _, values = text.partition(":")
    try:
        numbers: Sequence[float] = [float(value) for value in values.split(",")]
        if name == "fixed":
            (tokens,) = numbers
            return lambda _: max(1, round(tokens))
        first, second = numbers
    except ValueError:
        raise BadWorkload(f"{text!r}: write fixed:N, uniform:LEAST,MOST or lognormal:MEDIAN,SIGMA") from None
    if name == "uniform" and 0 < first <= second:
        return lambda chance: chance.randint(round(first), round(second))
    if name == "lognormal" and first > 0 and second >= 0:
        return lambda chance: max(1, round(first * chance.lognormvariate(0.0, second)))
    raise BadWorkload(f"{text!r}: write fixed:N, uniform:LEAST,MOST or lognormal:MEDIAN,SIGMA")

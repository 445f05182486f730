"""Service-level objectives, and runs that end as soon as one of them is certain to be missed."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from operator import attrgetter

from weft_sim.planning.cluster import Cluster
from weft_sim.planning.machine import GAP_S
from weft_sim.planning.request import PlannedRequest
from weft_sim.report import quantile

Value = Callable[[PlannedRequest], float]
PER_REQUEST: Mapping[str, Value] = {
    "ttft": attrgetter("ttft_s"),
    "tpot": attrgetter("tpot_s"),
    "e2e": attrgetter("e2e_s"),
}
TBT = "tbt"
METRICS = (*PER_REQUEST, TBT)


@dataclass(frozen=True, slots=True)
class Objective:
    """The quantile `level` of `name` is at most `bound`. `value` of a request; None: `tbt`, over all tokens of a run.

    `at_first`: the value is known with the first token.
    """

    name: str
    level: float
    bound: float
    value: Value | None
    at_first: bool = False

    @classmethod
    def of_level(cls, metric: str, level: float, seconds: float) -> "Objective":
        """Make the objective of a metric in METRICS."""
        return cls(metric, level, seconds, PER_REQUEST.get(metric), metric == "ttft")

    def above(self, request: PlannedRequest) -> bool:
        return self.value is not None and self.value(request) > self.bound

    @property
    def label(self) -> str:
        return f"{self.name} p{self.level * 100:g}"

    def measured(self, cluster: Cluster) -> float:
        """Measure a finished run; infinite for unfinished requests."""
        if any(request.ended is None for request in cluster.requests):
            return inf
        if self.value is None:
            return GAP_S * counted_quantile(cluster.gaps, self.level)
        return quantile([self.value(request) for request in cluster.requests], self.level)


class Watch:
    """Observes a run of `requests` requests; True once an objective is certain to be missed (`tbt` never is)."""

    def __init__(self, objectives: Iterable[Objective], requests: int) -> None:
        self.missed: Objective | None = None
        self._left = {
            objective: _tolerated(objective.level, requests) for objective in objectives if objective.value is not None
        }

    def __call__(self, request: PlannedRequest) -> bool:
        for objective, left in self._left.items():
            if objective.at_first == (request.ended is None) and objective.above(request):
                self._left[objective] = left - 1
                if left == 0:
                    self.missed = objective
                    return True
        return False


def _tolerated(level: float, requests: int) -> int:
    """Count the values above the bound with which the quantile may still be below it."""
    return requests - int(level * (requests - 1)) - 1


def counted_quantile(counts: Counter[int], level: float) -> float:
    """Return the quantile of values that were counted: the nearest rank."""
    place, seen = level * (counts.total() - 1), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen > place:
            return value
    return 0.0

"""Which adapters are worth a runner's disk, and which runner is sent which of them; `README.md` has the rules."""

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from weft_scheduler.core.policy.placement.punica import placement_score
from weft_scheduler.core.policy.prefetch.arrival_forecast import DAY_S, ArrivalForecast

MODES = ("forecast", "never")
KEEP_S = DAY_S  # a file that nobody else's room is needed for stays about as long
WORTH = 0.1  # fetched where a request that reaches the runner within KEEP_S is at least so probable
LEAST_HAZARD = -math.log1p(-WORTH)
SOON_S = 600.0  # the most probable within this comes first
JUDGED = 128  # adapters judged in one period, and as many that were requested since: 2 ms
CANDIDATES = 512  # adapters of a pool that are kept on its runners' disks
RUNNER_ORDERS = 1  # adapters that a runner is sent in one period: requests that need its link find it free
ARRIVALS = 16_384  # adapters of a pool whose arrivals are remembered
ORDERS = 64  # of a pool in one period: the depot serves requests, too


class PrefetchCandidate(NamedTuple):
    """An adapter that may be worth a fetch. `hazard`: of a request within KEEP_S; `soon`: its probability in SOON_S."""

    digest: str
    hazard: float
    soon: float


@dataclass(frozen=True, slots=True)
class PrefetchRunner:
    """A runner that placement may choose. `has`: what it was sent or has served; `busy`: with what it was sent."""

    uuid: str
    working_set: int
    good_sequences: int
    busy: bool
    has: Container[str]


class Candidates:
    """The adapters of one pool that are worth a fetch. All registered ones are judged in turn, JUDGED a period."""

    def __init__(self) -> None:
        self.forecast = ArrivalForecast(ARRIVALS)
        self.found: dict[str, PrefetchCandidate] = {}
        self._round: list[str] = []  # left to judge
        self._arrived: dict[str, None] = {}  # since the last period

    @property
    def known(self) -> bool:
        """Whether an adapter was ever requested."""
        return bool(len(self.forecast))

    def arrived(self, digest: str, now: float) -> None:
        """A request names it."""
        self.forecast.arrived(digest, now)
        if len(self._arrived) < JUDGED:
            self._arrived[digest] = None

    def judge(self, registered: Callable[[], Iterable[str]], adapters: int, now: float) -> None:
        """Judge those that were requested, and the next ones in turn. `registered`: all, for another round."""
        self.forecast.settle(adapters, now)
        judged, self._arrived = [*self._arrived], {}
        if not self._round:
            self._round = list(registered())
            there = {*self._round}
            self.found = {digest: found for digest, found in self.found.items() if digest in there}
        judged += self._round[-JUDGED:]
        del self._round[-JUDGED:]
        for digest in judged:
            hazard, soon = self.forecast.hazards(digest, now, KEEP_S, SOON_S)
            if hazard < LEAST_HAZARD:
                self.found.pop(digest, None)
            else:
                self.found[digest] = PrefetchCandidate(digest, hazard, -math.expm1(-soon))
        if len(self.found) > CANDIDATES:
            self.found = {one.digest: one for one in self.ranked()[:CANDIDATES]}

    def ranked(self) -> list[PrefetchCandidate]:
        """The one that is most probably requested soon first."""
        return sorted(self.found.values(), key=lambda one: (-one.soon, one.digest))


def orders(ranked: Sequence[PrefetchCandidate], runners: Iterable[PrefetchRunner]) -> list[tuple[str, tuple[str, ...]]]:
    """What each runner is sent, in the order in which placement would choose them.

    Runners that have work, and a quarter more (one at least): placement fills those next, and leaves the others idle. A
    request reaches each of these alike, so that the hazard of a fetch's use is that of the adapter over their number.
    """
    in_line = sorted(runners, key=lambda r: (placement_score(r.working_set, r.good_sequences), r.uuid), reverse=True)
    in_line.sort(key=lambda runner: not runner.working_set)
    used = sum(runner.working_set > 0 for runner in in_line)
    in_line = in_line[: used + max(1, used // 4)]
    worth = [one.digest for one in ranked if one.hazard >= LEAST_HAZARD * len(in_line)]
    found: list[tuple[str, tuple[str, ...]]] = []
    left = ORDERS
    for runner in in_line:
        missing = (digest for digest in worth if not (runner.busy or digest in runner.has))
        digests = tuple(islice(missing, min(RUNNER_ORDERS, left)))
        if digests:
            found.append((runner.uuid, digests))
            left -= len(digests)
    return found

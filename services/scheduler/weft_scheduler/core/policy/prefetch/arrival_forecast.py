"""How probable it is that an adapter is requested within a time, by its own arrivals.

A life table of the gaps between an adapter's arrivals (Kaplan and Meier, 1958; the histogram of idle times of Shahrad
et al., "Serverless in the Wild", ATC 2020): bucket b holds gaps of 2^(b-1) to 2^b seconds. The hazard of a bucket is
the share of the gaps that reach it which end in it, so that the thousand short gaps of a burst say nothing of the night
after it. An adapter with few gaps borrows those of its pool.

An adapter without an arrival is judged by its pool: each time the age of this forecast doubles, some of those that had
no arrival get their first one, and the share that did so lately is what the next doubling is expected to bring.

An arrival costs the same however many there were. Adapters are bounded: the one whose last arrival is the longest ago
is forgotten, and then it is one without an arrival.
"""

import math
from array import array

from weft.domain.lru import LruDict

BUCKETS = 21  # up to 2^19 s, 6 days; the last one is open
MOST_GAPS = 4096  # in one bucket; beyond it all are halved, so that old gaps fade, and rare ones stay
PRIOR_GAPS = 2.0  # gaps of the pool that each of an adapter's buckets begins with
DAY_S = 86_400.0
UNSEEN_S = 600.0  # before this age nothing is said of adapters without an arrival
EVEN = [0.5] * BUCKETS  # hazards of which nothing is known


class GapTable:
    """Gaps by the bucket in which they ended."""

    __slots__ = ("ended",)

    def __init__(self) -> None:
        self.ended = array("H", bytes(2 * BUCKETS))

    def add(self, gap_s: float) -> None:
        bucket = bucket_of(gap_s)
        self.ended[bucket] += 1
        if self.ended[bucket] > MOST_GAPS:
            self.ended = array("H", [(count + 1) // 2 for count in self.ended])

    def hazards(self, prior: list[float], weight: float) -> list[float]:
        """For each bucket the share of the gaps that reach it which end in it; `weight` more end by `prior`."""
        reached, found = 0, list[float]()
        for ended, expected in zip(reversed(self.ended), reversed(prior), strict=True):
            reached += ended
            found.append((ended + weight * expected) / (reached + weight))
        return found[::-1]


class ArrivalForecast:
    """One pool's adapters. Times never go back; a clock that jumps ahead makes one long gap."""

    def __init__(self, adapters: int) -> None:
        self._own = LruDict[str, tuple[float, GapTable]](adapters)  # digest -> its last arrival, its gaps
        self._pool = GapTable()
        self._prior = EVEN  # as of the last `settle`
        self._first = GapTable()  # from the beginning to each adapter's first arrival
        self._begun_s: float | None = None
        self._unseen: int  # registered adapters without an arrival, as of the last `settle`

    def arrived(self, digest: str, now: float) -> None:
        """A request names it."""
        known = self._own.get(digest)
        if known is None:
            self._first.add(now - self._begin(now))
            self._own[digest] = now, GapTable()
            return
        last_s, gaps = known
        gap_s = now - last_s
        gaps.add(gap_s)
        self._pool.add(gap_s)
        self._own[digest] = now, gaps

    def settle(self, adapters: int, now: float) -> None:
        """So many adapters are registered. What arrived since the last call counts for others from now on."""
        self._begin(now)
        self._unseen = max(0, adapters - len(self._own))
        self._prior = self._pool.hazards(EVEN, PRIOR_GAPS)

    def probability(self, digest: str, now: float, within_s: float) -> float:
        """That it is requested within so many seconds from now."""
        return -math.expm1(-self.hazards(digest, now, within_s)[0])

    def hazards(self, digest: str, now: float, *within_s: float) -> list[float]:
        """Cumulative hazards over these times: the negative logarithm of the probability that nobody requests it."""
        known = self._own.get(digest)
        if known is None:
            return [self._hazard_unseen(now, seconds) for seconds in within_s]
        last_s, gaps = known
        age_s, of_buckets = now - last_s, gaps.hazards(self._prior, PRIOR_GAPS)
        return [_cumulative(of_buckets, age_s, age_s + seconds) for seconds in within_s]

    def _hazard_unseen(self, now: float, within_s: float) -> float:
        """By the first arrivals of the last one to two doublings of the age."""
        if self._begun_s is None or (age_s := now - self._begun_s) < UNSEEN_S:
            return 0.0
        bucket = bucket_of(age_s)
        lately = self._first.ended[bucket - 1] + self._first.ended[bucket]
        doublings = math.log2(age_s) - (bucket - 2)
        return -math.log1p(-lately / (lately + self._unseen + 1)) / doublings * math.log2(1 + within_s / age_s)

    def _begin(self, now: float) -> float:
        """Begin at the first call. Returns when that was."""
        self._begun_s = now if self._begun_s is None else self._begun_s
        return self._begun_s

    def __len__(self) -> int:
        return len(self._own)


def _cumulative(hazards: list[float], since_s: float, until_s: float) -> float:
    """Over gaps of that length; within a bucket the hazard is the same at any moment."""
    total = 0.0
    for bucket in range(bucket_of(since_s), bucket_of(until_s) + 1):
        begins_s = width_s = 2.0 ** (bucket - 1)
        if not bucket:
            begins_s, width_s = 0.0, 1.0
        ends_s = begins_s + width_s if bucket < BUCKETS - 1 else math.inf
        share = (min(until_s, ends_s) - max(since_s, begins_s)) / width_s
        total -= share * math.log1p(-hazards[bucket])
    return total


def bucket_of(gap_s: float) -> int:
    return min(int(gap_s).bit_length(), BUCKETS - 1)

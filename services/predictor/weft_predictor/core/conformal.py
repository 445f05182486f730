"""Split conformal quantiles of prediction errors, with adaptive steps, per adapter.

A calibrator keeps its ~1,000 latest scores (error over its expected size). The q-quantile of the scores bounds the next
error with probability q if nothing drifts (Vovk et al. 2005; split conformal). Against drift the level itself is
adjusted after every outcome: level += step * (q - covered). This is adaptive conformal inference (Gibbs and Candes
2021). It bounds the coverage error over T outcomes by about 1 / (step * T) for any data.

Of a censored outcome only a lower bound of its score is known. A known score above the bound is its stand-in (the
self-consistency of the product-limit estimate, Efron 1967). A golden-ratio sequence picks it: deterministic, and evenly
spread. Taking the bound itself for the score would teach short answers.
"""

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from statistics import NormalDist

from weft.domain.lru import LruDict
from weft_predictor.core.offsets import Group

WINDOW = 1_000
STEP = 0.02
MIN_LEVEL = 0.5
OWN_SCORES = 100  # an adapter with fewer scores uses the pooled group
MAX_CALIBRATED_ADAPTERS = 1_000
UNINFORMATIVE = 0.05  # a censored outcome above a smaller share of the known scores teaches nothing
PRIOR_SCORES = tuple(1.25 * NormalDist().inv_cdf((i + 0.5) / 20) for i in range(20))  # mean absolute value 1
GOLDEN = 0.618034  # (5 ** 0.5 - 1) / 2


class ConformalCalibrator:
    """The latest scores of an adapter, or of all adapters. `level`: the quantile that covers `target` now."""

    def __init__(self, scores: Iterable[float] = PRIOR_SCORES, *, target: float = 0.9, prior: int = 20) -> None:
        self.target, self.level = target, target
        self.prior = prior  # made-up scores, the oldest; each real score replaces a made-up score
        self.draws = 0
        self._scores: deque[float] = deque(scores)
        self._sorted = sorted(self._scores)

    def __len__(self) -> int:
        """Return the number of real scores held."""
        return len(self._scores) - self.prior

    def scores(self) -> list[float]:
        """Return all scores, the oldest first."""
        return list(self._scores)

    def quantile(self, level: float) -> float:
        """Return the conformal quantile: the ceil((n + 1) level)-th smallest score, at most the largest known score."""
        rank = math.ceil((len(self._sorted) + 1) * level)
        return self._sorted[min(max(rank, 1), len(self._sorted)) - 1]

    def bound(self) -> float:
        """Return the bound that covers `target` of the next outcomes."""
        return self.quantile(self.level)

    def learn(self, score: float) -> bool:
        """Adjust the level, then add the score. Return whether the bound had covered the score."""
        covered = score <= self.bound()
        # Above 1 the bound is the largest score, so a longer memory of misses would only overshoot afterwards.
        self.level = min(max(self.level + STEP * (self.target - covered), MIN_LEVEL), 1.0)
        self._append(score)
        return covered

    def impute_censored(self, bound: float) -> float | None:
        """Choose a stand-in for a censored score: a known score above `bound`, else `bound`. None: the outcome teaches
        nothing."""
        below = bisect_right(self._sorted, bound)
        if below < UNINFORMATIVE * len(self._sorted):
            return None
        if below == len(self._sorted):
            return bound
        self.draws += 1
        return self._sorted[below + int((self.draws * GOLDEN % 1.0) * (len(self._sorted) - below))]

    def _append(self, score: float) -> None:
        self._scores.append(score)
        insort(self._sorted, score)
        if self.prior or len(self._scores) > WINDOW:
            self.prior = max(self.prior - 1, 0)
            self._sorted.pop(bisect_right(self._sorted, self._scores.popleft()) - 1)


class ConformalCalibrators:
    """The calibrators of tenants' adapters and of adapters, each used once it has enough scores, and the pooled
    calibrator.

    Bounded: the oldest calibrators are dropped.
    """

    def __init__(self, *, target: float = 0.9, max_adapters: int = MAX_CALIBRATED_ADAPTERS) -> None:
        self.pooled = ConformalCalibrator(target=target)
        self.by_group: LruDict[Group, ConformalCalibrator] = LruDict(max_adapters)
        self._target = target

    def of_group(self, group: Group) -> ConformalCalibrator:
        """Return the calibrator used for a tenant's adapter now."""
        for key in (group, ("", group[1])):
            calibrator = self.by_group.get(key)
            if calibrator is not None and len(calibrator) >= OWN_SCORES:
                return calibrator
        return self.pooled

    def learn(self, group: Group, score: float, *, shared: bool = True) -> bool:
        """Teach the group's calibrator, and (`shared`) the adapter's and the pooled calibrators.

        Returns whether the calibrator in use had covered the score.
        """
        covered = score <= self.of_group(group).bound()
        if shared:
            self.pooled.learn(score)
        for key in dict.fromkeys((("", group[1]), group)):
            if shared or key[0]:
                self.by_group.touch(key, lambda: ConformalCalibrator(target=self._target)).learn(score)
        return covered

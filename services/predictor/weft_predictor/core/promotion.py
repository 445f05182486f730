"""The serving model and a candidate for its place. The candidate takes it only by better predictions of outcomes new to
both.

The candidate, mounted later, predicts every prompt and learns every outcome alongside the served model. Each outcome is
scored against both before either learns it, so it is held out by construction. The candidate is promoted once its mean
loss is lower by more than chance (CONFIDENCE standard errors of the paired difference). Without promotion it is dropped
after MAX_JUDGED outcomes. A promoted model's predecessor is the next candidate: a model that proves worse after its
promotion is rolled back by the same rule.

Loss: see `ObservationResult`. An outcome counts at most MAX_DIFFERENCE. A tenant with half of the judged outcomes adds
none until other tenants have added theirs.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from weft.domain.prediction import Prediction, PredictItem
from weft.domain.request import Outcome
from weft_predictor.core.length_model import Arrays, LengthModel, ObservationResult

MIN_JUDGED, MAX_JUDGED = 200, 2_000  # outcomes
CONFIDENCE = 3.0  # standard errors: checked after every outcome, about 2 % of equal candidates are promoted by chance
MAX_DIFFERENCE = 1.0  # log tokens


@dataclass(frozen=True, slots=True)
class PromotionDecision:
    """A decision on a candidate. `gain`: the reduction of the loss, as a share of the served model's loss; `judged`:
    outcomes."""

    result: Literal["promoted", "dropped"]
    candidate: str
    served: str
    gain: float
    judged: int


class Judge:
    """The paired differences of two losses: their count, mean and squares (Welford)."""

    def __init__(self) -> None:
        self.judged, self.mean, self._squares, self._served = 0, 0.0, 0.0, 0.0
        self._by_tenant = Counter[str]()

    def add(self, tenant: str, served: float, candidate: float) -> None:
        """Add the losses of the served model and the candidate for an outcome."""
        judge = self._by_tenant[tenant]
        if 0 < self.judged - judge < judge:
            return
        self._by_tenant[tenant] += 1
        difference = min(max(served - candidate, -MAX_DIFFERENCE), MAX_DIFFERENCE)
        self.judged += 1
        self._served += served
        old_mean, self.mean = self.mean, self.mean + (difference - self.mean) / self.judged
        self._squares += (difference - old_mean) * (difference - self.mean)

    @property
    def better(self) -> bool:
        """Whether the candidate is better beyond chance."""
        error = math.sqrt(self._squares / max(self.judged - 1, 1) / max(self.judged, 1))
        return self.judged >= MIN_JUDGED and self.mean > CONFIDENCE * error

    @property
    def gain(self) -> float:
        """Return the share of the served model's loss saved by the candidate."""
        return self.mean * self.judged / self._served if self._served else 0.0


class PromotedModel:
    """A LengthModel of the served model, and of a candidate while it is judged. A single thread calls it."""

    def __init__(self, served: LengthModel, on_decision: Callable[[PromotionDecision], None]) -> None:
        """Serve a model. `on_decision`: called after a change, in the thread of `observe`."""
        self.served, self.scale, self._on_decision = served, served.scale, on_decision
        self.candidate: LengthModel | None = None
        self._judge = Judge()

    def offer(self, candidate: LengthModel) -> None:
        """Judge a model from now on. It replaces an earlier candidate."""
        candidate.scale = self.scale
        self.candidate, self._judge = candidate, Judge()

    @property
    def version(self) -> str:
        return self.served.version

    @property
    def learned(self) -> int:
        return self.served.learned

    @property
    def coverage(self) -> float | None:
        return self.served.coverage

    @property
    def adapters(self) -> int:
        return self.served.adapters

    def predict_batch(self, items: Sequence[PredictItem]) -> list[Prediction]:
        """Predict with the served model. While a candidate is judged, a prompt costs two predictions."""
        if self.candidate is not None:
            self.candidate.predict_batch(items)
        return self.served.predict_batch(items)

    def observe(self, outcome: Outcome) -> ObservationResult:
        result = self.served.observe(outcome)
        if self.candidate is not None:
            observed = self.candidate.observe(outcome)
            if result.loss is not None and observed.loss is not None:
                self._judge.add(outcome.namespace, result.loss, observed.loss)
                self._decide(self.candidate)
        return result

    def save(self) -> Arrays:
        """Copy the served model."""
        return self.served.save()

    def _decide(self, candidate: LengthModel) -> None:
        judge, served = self._judge, self.served
        if not judge.better and judge.judged < MAX_JUDGED:
            return
        names = candidate.version, served.version
        if judge.better:
            self.served, self.candidate = candidate, served
        else:
            self.candidate = None
        self._judge = Judge()
        result = "promoted" if judge.better else "dropped"
        self._on_decision(PromotionDecision(result, *names, judge.gain, judge.judged))

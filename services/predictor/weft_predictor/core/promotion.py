"""The model that serves and a candidate for its place, which takes it only by predicting better what neither had seen.

The candidate, which was mounted later, predicts every prompt and learns every outcome beside the served model. Each
outcome is scored against both before either learns it, so it is held out by construction. The candidate is promoted
once its mean loss is lower by more than chance (CONFIDENCE standard errors of the paired difference); after MAX_JUDGED
outcomes without that it is dropped. A promoted model's predecessor is the next candidate: what proves worse after its
promotion is rolled back by the same rule.

Loss: see `ObservationResult`. One outcome counts at most MAX_DIFFERENCE; a tenant that has given half of the judged
outcomes gives no more until others have.
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
CONFIDENCE = 3.0  # standard errors: looked at after every outcome, by chance alone about one in fifty is promoted
MAX_DIFFERENCE = 1.0  # log tokens


@dataclass(frozen=True, slots=True)
class PromotionDecision:
    """A decision on a candidate. `gain`: how much lower its loss is, of the served model's; `judged`: outcomes."""

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
        """Add the losses of one outcome."""
        judged = self._by_tenant[tenant]
        if 0 < self.judged - judged < judged:
            return
        self._by_tenant[tenant] += 1
        difference = min(max(served - candidate, -MAX_DIFFERENCE), MAX_DIFFERENCE)
        self.judged += 1
        self._served += served
        previous_mean, self.mean = self.mean, self.mean + (difference - self.mean) / self.judged
        self._squares += (difference - previous_mean) * (difference - self.mean)

    @property
    def better(self) -> bool:
        """Whether the candidate is better beyond chance."""
        error = math.sqrt(self._squares / max(self.judged - 1, 1) / max(self.judged, 1))
        return self.judged >= MIN_JUDGED and self.mean > CONFIDENCE * error

    @property
    def gain(self) -> float:
        """The share of the served model's loss that the candidate does not have."""
        return self.mean * self.judged / self._served if self._served else 0.0


class PromotedModel:
    """A LengthModel: the served one, and for as long as one is judged its candidate. One thread calls it."""

    def __init__(self, served: LengthModel, on_decision: Callable[[PromotionDecision], None]) -> None:
        """Serve a model. `on_decision`: called in the thread that observes, after the change."""
        self.served, self.scale, self._on_decision = served, served.scale, on_decision
        self.candidate: LengthModel | None = None
        self._judge = Judge()

    def offer(self, candidate: LengthModel) -> None:
        """Have a model judged; it replaces one that is being judged."""
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
        """Predict with the served model; while a candidate is judged, a prompt costs both."""
        if self.candidate is not None:
            self.candidate.predict_batch(items)
        return self.served.predict_batch(items)

    def observe(self, outcome: Outcome) -> ObservationResult:
        result = self.served.observe(outcome)
        if self.candidate is not None:
            candidate = self.candidate.observe(outcome)
            if result.loss is not None and candidate.loss is not None:
                self._judge.add(outcome.namespace, result.loss, candidate.loss)
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

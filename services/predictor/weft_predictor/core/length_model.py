"""The interface of a length model. Server, checkpoints and simulator use nothing else of a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from weft.domain.prediction import Prediction, PredictItem
from weft.domain.request import Outcome

Arrays = Mapping[str, NDArray[Any]]
Lesson = Literal["learned", "partial", "censored", "unknown", "duplicate"]
TARGET = 0.9  # share of real lengths covered by p90


@dataclass(frozen=True, slots=True)
class ObservationResult:
    """The change of a model by an outcome.

    learned: everything. partial: offset and calibration of its adapter; the prompt's features were gone. No change:
    censored (a lower bound far below usual lengths); unknown (neither features nor a recent prediction of this model);
    duplicate (the same request id before). `covered`: whether p90 held; None: no change. `loss`: the quantile losses of
    the model's earlier p50 and p90 for the prompt, in log tokens. None: the answer cannot be judged (cut off, or
    features gone).
    """

    lesson: Lesson
    covered: bool | None = None
    loss: float | None = None


class LengthModel(Protocol):
    """A model that predicts and learns. Pure: it has no clock and no thread; a single thread calls it.

    `scale` multiplies every prediction (experiments).
    """

    scale: float

    @property
    def version(self) -> str:
        """Return a text that changes with the model."""
        ...

    @property
    def learned(self) -> int:
        """Return how many outcomes changed the model."""
        ...

    @property
    def coverage(self) -> float | None:
        """Return the share of the latest 1,000 outcomes covered by p90; None before the first outcome."""
        ...

    @property
    def adapters(self) -> int:
        """Return the number of adapters, and of tenants' adapters, with a separate offset."""
        ...

    def predict_batch(self, items: Sequence[PredictItem]) -> list[Prediction]:
        """Predict each item, in order. The model keeps nothing of an item without a request id."""
        ...

    def observe(self, outcome: Outcome) -> ObservationResult:
        """Learn the outcome of a request."""
        ...

    def save(self) -> Arrays:
        """Copy the learned state of the model, for the checkpoint."""
        ...

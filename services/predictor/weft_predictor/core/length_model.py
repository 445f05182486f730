"""The interface of a length model: what server, checkpoints and simulator need of it, and all that they know of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from weft.domain.prediction import Prediction, PredictItem
from weft.domain.request import Outcome

Arrays = Mapping[str, NDArray[Any]]
Lesson = Literal["learned", "partial", "censored", "unknown", "duplicate"]
TARGET = 0.9  # of real lengths, which p90 covers


@dataclass(frozen=True, slots=True)
class ObservationResult:
    """The change that an outcome made.

    learned: everything. partial: offset and calibration of its adapter; the prompt's features were gone. Nothing:
    censored (a lower bound far below what is usual), unknown (neither features nor a prediction of this model, or one
    too long ago), duplicate (the same request id before). `covered`: whether p90 held; None: nothing. `loss`: the
    quantile losses of the p50 and p90 that the model had for the prompt before, in log tokens; None for an answer that
    cannot be judged (cut off, or features gone).
    """

    lesson: Lesson
    covered: bool | None = None
    loss: float | None = None


class LengthModel(Protocol):
    """A model that predicts and learns. Pure: no clock, no thread of its own; one thread calls it.

    `scale` multiplies every prediction (experiments).
    """

    scale: float

    @property
    def version(self) -> str:
        """A text that changes when the model does."""
        ...

    @property
    def learned(self) -> int:
        """The number of outcomes that changed the model."""
        ...

    @property
    def coverage(self) -> float | None:
        """The share of the latest 1,000 outcomes that p90 covered; None before the first."""
        ...

    @property
    def adapters(self) -> int:
        """The number of adapters, and adapters of a tenant, with an offset of their own."""
        ...

    def predict_batch(self, items: Sequence[PredictItem]) -> list[Prediction]:
        """Predict each item, in order. Of an item without a request id the model keeps nothing."""
        ...

    def observe(self, outcome: Outcome) -> ObservationResult:
        """Learn the outcome of a request."""
        ...

    def save(self) -> Arrays:
        """Copy everything that the model has learned; the checkpoint is made of it."""
        ...

"""What the server and the simulator need of a length model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from weft.domain.prediction import Prediction, PredictItem
from weft.domain.request import Outcome

Arrays = Mapping[str, NDArray[Any]]
Lesson = Literal["learned", "partial", "censored", "unknown", "duplicate"]
BUCKETS = 10  # S3, section 3: ten equal buckets over the maximum length


@dataclass(frozen=True, slots=True)
class ObservationResult:
    """What an outcome changed.

    learned: everything. partial: offset and calibration of its adapter; the prompt's features were gone.
    Nothing: censored (a lower bound far below what is usual), unknown (neither features nor a prediction of this
    model, or one too long ago), duplicate (the same request id before). `covered`: whether p90 held; None: nothing.
    """

    lesson: Lesson
    covered: bool | None = None


class LengthModel(Protocol):
    """Predicts and learns. Pure: no clock, no thread of its own; one thread calls it."""

    @property
    def version(self) -> str:
        """Changes when the model does."""
        ...

    @property
    def learned(self) -> int:
        """Outcomes that changed the model."""
        ...

    @property
    def coverage(self) -> float | None:
        """The share of the latest 1,000 outcomes that p90 covered; None before the first."""
        ...

    @property
    def adapters(self) -> int:
        """Adapters with an offset of their own."""
        ...

    def predict_batch(self, items: Sequence[PredictItem]) -> list[Prediction]:
        """One prediction for each item, in order. Of an item without a request id the model keeps nothing."""
        ...

    def observe(self, outcome: Outcome) -> ObservationResult:
        """Learn the outcome of a request."""
        ...

    def save(self) -> Arrays:
        """A copy of everything that the model has learned; the checkpoint is made of it."""
        ...


def bucket(tokens: int, max_context_tokens: int) -> int:
    """S3's class of a length: which tenth of the maximum it ends in, 0..9."""
    return min(tokens * BUCKETS // max_context_tokens, BUCKETS - 1)

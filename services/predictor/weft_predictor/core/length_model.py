"""What the server and the simulator need of a length model, and the values between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
BUCKETS = 10  # S3, section 3: ten equal buckets over the maximum length


@dataclass(frozen=True, slots=True)
class Query:
    """A prompt to predict. `adapter` is the served model name, the base's for the base.

    `request_id` is that of the request, or of its first choice; without one the model keeps nothing of it.
    """

    prompt_text: str
    adapter: str
    prompt_tokens: int = 0
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Output tokens: the median, the bound that covers 90 %, and S3's bucket (0..9) of the median."""

    p50_tokens: int
    p90_tokens: int
    bucket: int


@dataclass(frozen=True, slots=True)
class Observed:
    """The length of an answer. `censored`: it would have been at least `tokens` long (a limit, a client that left).

    `predicted_p50_tokens` and `model_version` are what the request was scheduled with; 0 is no prediction.
    """

    request_id: str
    adapter: str
    tokens: int
    censored: bool = False
    predicted_p50_tokens: float = 0.0
    model_version: str = ""


Lesson = Literal["learned", "partial", "censored", "unknown", "duplicate"]


@dataclass(frozen=True, slots=True)
class ObservationResult:
    """What an outcome changed.

    learned: everything. partial: offset and calibration of its adapter; the prompt's features were gone.
    Nothing: censored (a lower bound far below what is usual), unknown (neither features nor a prediction of this
    model), duplicate (the same request id before). `covered`: whether p90 held, where the model learned.
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

    def predict_batch(
        self, queries: Sequence[Query], *, max_context_tokens: int, scale: float = 1.0
    ) -> list[Predicted]:
        """One prediction for each query, in order. `scale` multiplies the lengths (experiments)."""
        ...

    def observe(self, outcome: Observed) -> ObservationResult:
        """Learn the outcome of a request."""
        ...

    def save(self) -> Arrays:
        """A copy of everything that the model has learned; the checkpoint is made of it."""
        ...


def bucket(tokens: int, max_context_tokens: int) -> int:
    """S3's class of a length: which tenth of the maximum it ends in, 0..9."""
    return min(tokens * BUCKETS // max_context_tokens, BUCKETS - 1)

"""The output tokens that a request reserves; `README.md` in this folder has the reasons."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from weft_scheduler.core.policy.reservation.output_lengths import OutputLengthStats


class ExpectedOutput(NamedTuple):
    """The length of an answer as expected when its request is submitted. 0: no prediction."""

    pool: str
    adapter: str
    max_tokens: int
    p90_tokens: int = 0
    bucket_tokens: int = 0


class ReservationPolicy(ABC):
    """The first reservation of a request. All pools share one object."""

    by_page: ClassVar[bool] = False  # nothing is reserved: a sequence grows by a page whenever it needs one
    pooled: ClassVar[bool] = False  # admission is by the expected use of a runner's sequences together
    leaves: ClassVar[bool] = False  # the sequence that outruns its reservation is preempted, not the latest arrival

    def __init__(self, lengths: OutputLengthStats) -> None:
        self._lengths = lengths

    @abstractmethod
    def initial_tokens(self, expected: ExpectedOutput) -> int:
        """Return the output tokens to reserve, 1 to `max_tokens`."""


class Maximum(ReservationPolicy):
    """All that the request may ever use (ORCA, section 4.2): no overruns, and the smallest batch."""

    def initial_tokens(self, expected: ExpectedOutput) -> int:
        return expected.max_tokens


class Constant(ReservationPolicy):
    """The running p90 of the pool's answers, for any prompt: the baseline of a predictor."""

    def initial_tokens(self, expected: ExpectedOutput) -> int:
        return min(self._lengths.of_pool(expected.pool), expected.max_tokens)


class Paged(ReservationPolicy):
    """Nothing ahead (Kwon et al., SOSP 2023): a page whenever one is needed; under pressure the latest arrival goes."""

    by_page: ClassVar[bool] = True

    def initial_tokens(self, expected: ExpectedOutput) -> int:
        del expected
        return 1


class Calibrated(ReservationPolicy):
    """The predictor's calibrated p90, or without a prediction the adapter's running p90."""

    def initial_tokens(self, expected: ExpectedOutput) -> int:
        tokens = expected.p90_tokens or self._lengths.of_adapter(expected.pool, expected.adapter)
        return min(tokens, expected.max_tokens)


class Pooled(Calibrated):
    """Nothing ahead on the runner; the scheduler admits by what all sequences are expected to use (`pooled.py`)."""

    by_page: ClassVar[bool] = True
    pooled: ClassVar[bool] = True


class BucketEdge(Calibrated):
    """The upper edge of the predicted bucket (S3, section 3.1); without one as `Calibrated`.

    A sequence that outruns it is preempted itself, and comes back with twice the reservation (S3, section 3.4).
    """

    leaves: ClassVar[bool] = True

    def initial_tokens(self, expected: ExpectedOutput) -> int:
        return min(expected.bucket_tokens, expected.max_tokens) or super().initial_tokens(expected)

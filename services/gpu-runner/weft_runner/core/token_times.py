"""When a sequence was admitted, computed and answered, and the times between two tokens: what latency metrics show.

The times between tokens are counted for all rows of a step at once. A batch that runs again has had a token for each
row in its last run, so that one subtraction serves all of them; only a batch of other rows is gone through.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from weft_runner.core.batch import Batch

if TYPE_CHECKING:
    from weft_runner.core.sequence import Sequence

# Seconds: vLLM's buckets (`vllm/v1/metrics/buckets.py`, 0.33), and three for models whose tokens take less than 10 ms.
GAP_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip


class GapCounts(NamedTuple):
    """A histogram of times between tokens: how many in each bucket of `GAP_BUCKETS` and above them; their sum."""

    counts: tuple[int, ...]
    sum_s: float


@dataclass(slots=True)
class SequenceTimes:
    """When a sequence was here for the first time, each as far as it came to that; `token_at`: its latest token.

    `joined_at`: its adapter was there, if it had to wait for it. `first_token_at`: of those that were computed here;
    `token_at`: behind that one, up to the batch that runs again.
    """

    admitted_at: float
    joined_at: float | None = None
    scheduled_at: float | None = None
    first_token_at: float | None = None
    token_at: float = 0.0

    def note_joined(self, now: float) -> None:
        self.joined_at = now


@dataclass(slots=True)
class _LastRun:
    """The last batch: each sampling row had a token at `at`."""

    batch: Batch
    at: float
    n_tokens: int


class TokenTimes:
    """One owner: the request pool."""

    def __init__(self) -> None:
        self._counts = [0] * (len(GAP_BUCKETS) + 1)
        self._sum_s = 0.0
        self._last: _LastRun | None = None

    @property
    def gaps(self) -> GapCounts:
        """Since start."""
        return GapCounts(tuple(self._counts), self._sum_s)

    def note_scheduled(self, sequences: "Iterable[Sequence]", now: float) -> None:
        """Record that sequences are in a batch with different rows than the previous batch."""
        for sequence in sequences:
            if sequence.times.scheduled_at is None:
                sequence.times.scheduled_at = now

    def count_run(self, batch: Batch, sequences: "Mapping[str, Sequence]", now: float) -> "list[Sequence]":
        """Record a complete batch. Return the sequences with their first token here.

        One that extends another has the same rows.
        """
        last, number = self._last, batch.number or batch.extends
        if last is not None and number and number in (last.batch.number, last.batch.extends):
            gap_s, last.at = now - last.at, now
            self._counts[bisect_left(GAP_BUCKETS, gap_s)] += last.n_tokens  # at every iteration: no call of `_count`
            self._sum_s += gap_s * last.n_tokens
            return []
        if last is not None:
            self._settle(last, sequences)
        first: list[Sequence] = []
        sampled = [sequences[row.key] for row in batch.rows if row.samples]
        for sequence in sampled:
            times = sequence.times
            if times.first_token_at is None:
                times.first_token_at = now
                first.append(sequence)
            else:
                self._count(now - times.token_at, 1)
            times.token_at = now
        self._last = _LastRun(batch, now, len(sampled))
        return first

    def _settle(self, last: _LastRun, sequences: "Mapping[str, Sequence]") -> None:
        for row in last.batch.rows:
            sequence = sequences.get(row.key)
            if row.samples and sequence is not None and sequence.times.first_token_at is not None:
                sequence.times.token_at = last.at

    def _count(self, gap_s: float, n_tokens: int) -> None:
        self._counts[bisect_left(GAP_BUCKETS, gap_s)] += n_tokens
        self._sum_s += gap_s * n_tokens

"""Batches -> steps. The step of a batch that runs on unchanged is kept, and only its tokens and positions advance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft_kernels.plan import Segment, SegmentPlan
from weft_runner.core.batch import Row, adapter_segments
from weft_runner.core.request_pool import RequestPool
from weft_runner.core.sampling import SampledToken
from weft_runner.core.sequence import Sequence as PoolSequence
from weft_runner.model.sampling import SamplingArgs
from weft_runner.model.step import StepInput, StepRow

NOT_FINITE = "the model's output is not finite"
NOT_ALLOWED = "the model's output is not finite, or impossible for every token that the request allows"


@dataclass(frozen=True, slots=True, eq=False)
class BuiltStep:
    """Rows of a batch, their sequences, and the step that runs them; `sampled`: those that get a token, in order."""

    rows: tuple[Row, ...]
    sequences: tuple[PoolSequence, ...]
    step: StepInput
    sampled: tuple[PoolSequence, ...]

    def draws(self) -> list[SamplingArgs]:
        """How the rows that get a token sample it."""
        return [SamplingArgs(s.start.sampling, len(s.tokens), s.adjustments, s.mask) for s in self.sampled]

    def by_key(self, found: Sequence[SampledToken | None]) -> tuple[dict[str, SampledToken], dict[str, str]]:
        """What rows sampled, and why those that have no token failed."""
        sampled = dict(zip((s.key for s in self.sampled), found, strict=True))
        tokens = {key: token for key, token in sampled.items() if token is not None}
        if len(tokens) == len(sampled):
            return tokens, {}
        return tokens, {s.key: _why(s) for s in self.sampled if s.key not in tokens}


def _why(sequence: PoolSequence) -> str:
    """A sequence has no token."""
    return NOT_FINITE if sequence.mask is None else sequence.mask.fault or NOT_ALLOWED


class StepBuilder:
    """Builds the steps of one engine. `ranks`: the width of the adapter in each slot that is in use."""

    def __init__(self, pool: RequestPool, ranks: Mapping[int, int]) -> None:
        self._pool, self._ranks = pool, ranks
        self._kept: BuiltStep | None = None

    def build(self, rows: tuple[Row, ...], sequences: tuple[PoolSequence, ...], *, keep: bool) -> BuiltStep:
        """The step of these rows. `keep`: they are decode rows, and may run again next time as they are."""
        kept = self._kept
        if kept is not None and kept.rows is rows:
            kept.step.advance([s.tokens[-1] for s in kept.sequences], [s.in_kv for s in kept.sequences])
            return kept
        built = self._build(rows, sequences)
        self._kept = built if keep else None
        return built

    def advance_unseen(self, built: BuiltStep) -> bool:
        """Its step advances by a position, before the tokens are known. False: it was not kept, and waits for them."""
        if self._kept is not built:
            return False
        built.step.advance_unseen()
        return True

    def _build(self, rows: tuple[Row, ...], sequences: tuple[PoolSequence, ...]) -> BuiltStep:
        tokens: list[int] = []
        step_rows: list[StepRow] = []
        for row, sequence in zip(rows, sequences, strict=True):
            start = len(tokens)
            tokens.extend(sequence.tokens[sequence.in_kv : sequence.in_kv + row.n_tokens])
            pages = tuple(self._pool.pages.pages_of(row.key))
            step_rows.append(StepRow(start, len(tokens), sequence.in_kv, pages, row.samples))
        step = StepInput(tokens, tuple(step_rows), self._plan(rows, len(tokens)))
        sampled = tuple(s for row, s in zip(rows, sequences, strict=True) if row.samples)
        return BuiltStep(rows, sequences, step, sampled)

    def _plan(self, rows: tuple[Row, ...], n_tokens: int) -> SegmentPlan:
        adapters, ranks = self._pool.adapters, self._ranks
        segments = [(s.start, s.end, adapters.slot_of(s.adapter)) for s in adapter_segments(rows)]
        return SegmentPlan(n_tokens, tuple(Segment(start, end, slot, ranks[slot]) for start, end, slot in segments))

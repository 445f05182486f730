"""Batches -> steps. The step of a batch that runs on unchanged is kept, and only its tokens and positions move on."""

from collections.abc import Mapping
from dataclasses import dataclass

from weft_kernels.plan import Segment, SegmentPlan
from weft_runner.core.iteration import Row
from weft_runner.core.request_pool import RequestPool
from weft_runner.core.segments import adapter_segments
from weft_runner.core.sequence import Sequence
from weft_runner.model.step import Step, StepRow


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Rows of a batch, their sequences, and the step that runs them; `sampled`: those that get a token, in order."""

    rows: tuple[Row, ...]
    sequences: tuple[Sequence, ...]
    step: Step
    sampled: tuple[Sequence, ...]


class Steps:
    """Makes the steps of one engine. `ranks`: the width of the adapter in each slot that is in use."""

    def __init__(self, pool: RequestPool, ranks: Mapping[int, int]) -> None:
        self._pool, self._ranks = pool, ranks
        self._kept: Prepared | None = None

    def prepare(self, rows: tuple[Row, ...], *, keep: bool) -> Prepared:
        """The step of these rows. `keep`: they are decode rows, and may run again next time as they are."""
        kept = self._kept
        if kept is not None and kept.rows is rows:
            kept.step.advance([s.tokens[-1] for s in kept.sequences], [s.in_kv for s in kept.sequences])
            return kept
        prepared = self._build(rows)
        self._kept = prepared if keep else None
        return prepared

    def ahead(self, prepared: Prepared) -> bool:
        """Its step moves on by a position, before the tokens are known. False: it was not kept, and waits for them."""
        if self._kept is not prepared:
            return False
        prepared.step.advance_unseen()
        return True

    def _build(self, rows: tuple[Row, ...]) -> Prepared:
        sequences = tuple(map(self._pool.row_sequence, rows))
        tokens: list[int] = []
        step_rows: list[StepRow] = []
        for row, sequence in zip(rows, sequences, strict=True):
            start = len(tokens)
            tokens.extend(sequence.tokens[sequence.in_kv : sequence.in_kv + row.n_tokens])
            pages = tuple(self._pool.pages.pages_of(row.key))
            step_rows.append(StepRow(start, len(tokens), sequence.in_kv, pages, row.samples))
        step = Step(tokens, tuple(step_rows), self._plan(rows, len(tokens)))
        sampled = tuple(s for row, s in zip(rows, sequences, strict=True) if row.samples)
        return Prepared(rows, sequences, step, sampled)

    def _plan(self, rows: tuple[Row, ...], n_tokens: int) -> SegmentPlan:
        slots, ranks = self._pool.adapters, self._ranks
        segments = [(s.start, s.end, slots.slot_of(s.adapter)) for s in adapter_segments(rows)]
        return SegmentPlan(n_tokens, tuple(Segment(start, end, slot, ranks[slot]) for start, end, slot in segments))

"""Consolidation by migration (Punica, section 5.3); this folder's `README.md` has the rules and the reasons."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft_scheduler.core.policy.placement.runner_index import RunnerShape

MODES = ("autoscaled", "always", "never")
MAX_CONSOLIDATIONS = 2  # migrations of one request by consolidation
MAX_SOURCES = 4  # runners that one period tries to empty; it empties one
GAIN_FACTOR = 4.0  # runner-seconds that one of recomputation has to save: its streams pause, and it slows a full batch


class RunningSequence(NamedTuple):
    """A sequence of a runner considered for emptying."""

    request_id: str
    adapter: str  # "": the base
    rank: int
    max_tokens: int  # prompt and answer at most
    context_tokens: int  # prompt and answer so far: what a migration computes again
    footprint_tokens: int  # prompt and answer so far, and what is reserved beyond
    remaining_tokens: float  # as expected
    movable: bool  # it may be migrated once more


@dataclass(frozen=True, slots=True)
class ConsolidationRunner:
    """A runner of the pool, as the policy sees it. `accepts`: something may be placed on it."""

    uuid: str
    shape: RunnerShape
    accepts: bool
    working_set: int
    good_sequences: int  # the batch that it runs well
    packed_sequences: int  # the batch that placement fills before a lightly loaded runner
    free_tokens: int
    total_tokens: int
    page_tokens: int
    busy_adapters: frozenset[str]  # adapters in its slots
    slots: int
    step_s: float  # an iteration of its present batch; 0: not measured
    prefill_tokens_per_s: float  # 0: not measured

    @property
    def lightly_loaded(self) -> bool:
        """Return whether the runner is at most half full, of sequences and of memory, and not idle."""
        is_lightly_loaded = bool(self.working_set) and 2 * self.working_set <= self.good_sequences
        return is_lightly_loaded and 2 * self.free_tokens >= self.total_tokens


def select_sources(runners: Iterable[ConsolidationRunner]) -> list[ConsolidationRunner]:
    """Return the lightly loaded runners to consider: runners closed to new requests first, then the least loaded."""
    lightly_loaded = [runner for runner in runners if runner.lightly_loaded]
    lightly_loaded.sort(key=lambda runner: (runner.accepts, runner.working_set, runner.uuid))
    return lightly_loaded[:MAX_SOURCES]


def select_leaving(
    source: ConsolidationRunner,
    sequences: Sequence[RunningSequence],
    runners: Iterable[ConsolidationRunner],
    period_s: float,
) -> list[RunningSequence]:
    """Return the sequences that outlast the period, if all fit on `runners` and the move is worth their recompute."""
    if not source.step_s or not source.prefill_tokens_per_s:
        return []
    ends_s = {sequence.request_id: sequence.remaining_tokens * source.step_s for sequence in sequences}
    leaving = [sequence for sequence in sequences if ends_s[sequence.request_id] > period_s]
    if not leaving or not all(sequence.movable for sequence in leaving):
        return []
    saved_s = max(ends_s.values()) - max((ends_s[s.request_id] for s in sequences if s not in leaving), default=0.0)
    computed_s = sum(sequence.context_tokens for sequence in leaving) / source.prefill_tokens_per_s
    if saved_s < GAIN_FACTOR * computed_s:
        return []
    destinations = [r for r in runners if r.accepts and (_order(r) > _order(source) or not source.accepts)]
    spare = [_SpareCapacity(runner) for runner in sorted(destinations, key=_order, reverse=True)]
    for sequence in sorted(leaving, key=lambda s: (-s.footprint_tokens, s.request_id)):
        if not any(target.take(sequence, source.shape.numerics_class) for target in spare):
            return []
    return leaving


def _order(runner: ConsolidationRunner) -> tuple[int, str]:
    """Return a key in placement's order of preference: what leaves a runner is not placed there again."""
    return runner.working_set, runner.uuid


class _SpareCapacity:
    """Room that a runner has before placement prefers the source, while a plan fills it."""

    def __init__(self, runner: ConsolidationRunner) -> None:
        self._runner = runner
        self._sequences = runner.packed_sequences - runner.working_set
        self._free_pages = runner.free_tokens // runner.page_tokens
        self._adapters = {*runner.busy_adapters}

    def take(self, sequence: RunningSequence, numerics_class: str) -> bool:
        """Count a sequence here. False if it does not fit."""
        runner, adapter = self._runner, sequence.adapter
        pages = -(-sequence.footprint_tokens // runner.page_tokens)
        slot = not adapter or adapter in self._adapters or len(self._adapters) < runner.slots
        fits = runner.shape.fits(sequence.rank, sequence.max_tokens, numerics_class)
        if not (fits and slot and self._sequences > 0 and pages <= self._free_pages):
            return False
        self._sequences -= 1
        self._free_pages -= pages
        if adapter:
            self._adapters.add(adapter)
        return True

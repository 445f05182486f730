"""Batches -> steps. The step of a batch that runs on unchanged is kept, and only its tokens and positions advance."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, zip_longest
from typing import NamedTuple

from weft.domain.request import Sampling, TokenLogprob
from weft_kernels.plan import Segment, SegmentPlan
from weft_runner.core.batch import Batch, Row, adapter_segments
from weft_runner.core.events import StepResults
from weft_runner.core.request_pool import RequestPool
from weft_runner.core.sampling import SampledToken
from weft_runner.core.sequence import Sequence as PoolSequence
from weft_runner.model.sampling import SamplingArgs
from weft_runner.model.step import StepInput, StepRow

UNREAD = SamplingArgs(Sampling(), 0)  # of a row whose token nobody wants
NOT_FINITE = "the model's output is not finite"
NOT_ALLOWED = "the model's output is not finite, or impossible for every token that the request allows"


# At every iteration: their own constructors are Python functions.
_all_well, _draw = partial(tuple.__new__, StepResults), partial(tuple.__new__, SamplingArgs)


class Ahead(NamedTuple):
    """The tokens of a sequence fed by a step in flight, and its row among the samples."""

    n_tokens: int
    sampled: int | None


NOT_AHEAD = Ahead(0, None)


@dataclass(frozen=True, slots=True, eq=False)
class BuiltStep:
    """A batch, the sequences of its rows, and their step. `sampled`: the sequences with a token, in order."""

    batch: Batch
    sequences: tuple[PoolSequence, ...]
    step: StepInput
    sampled: tuple[PoolSequence, ...]
    scores: bool  # some rows have several rows of logits: for log probabilities of their prompt, or to check guesses
    unseen: frozenset[PoolSequence] = frozenset()  # those with a token of the step in flight, not known as it was built

    @property
    def waits(self) -> bool:
        """Whether some rows sample with tokens that are still unknown."""
        return any(not s.is_steady(1) for s in self.unseen)

    def draws(self) -> list[SamplingArgs]:
        """What is sampled from each row of the step's logits, as it is launched."""
        unseen = self.unseen
        if not self.scores:
            return [
                SamplingArgs(s.start.sampling, len(s.tokens) + (s in unseen), s.adjustments, s.mask)
                for s in self.sampled
            ]
        draws: list[SamplingArgs] = []
        for of_batch, row, s in zip(self.batch.rows, self.step.rows, self.sequences, strict=True):
            if of_batch.drafted:
                at, n_steady = len(s.tokens), row.scored if s.is_steady(row.scored) else 0
                sampling, shifts, mask = s.start.sampling, s.adjustments, s.mask
                draws += [_draw((sampling, place, shifts, mask, None)) for place in range(at, at + 1 + n_steady)]
                draws += [UNREAD] * (row.scored - n_steady)
                continue
            here = range(row.position + 1, row.position + 1 + row.scored)
            draws += [SamplingArgs(s.start.sampling, at, given=s.tokens[at]) for at in here]
            if row.samples:
                draws.append(SamplingArgs(s.start.sampling, len(s.tokens) + (s in unseen), s.adjustments, s.mask))
        return draws

    def guessed(self) -> list["Guessed"]:
        """The rows with guesses to check one after another, since each depends on the earlier guesses."""
        guesses, at = list[Guessed](), 0
        for of_batch, row, s in zip(self.batch.rows, self.step.rows, self.sequences, strict=True):
            if of_batch.drafted and not s.is_steady(row.scored):
                guesses.append(Guessed(s, of_batch.drafted, at))
            at += row.scored + row.samples
        return guesses

    def late_draws(self, runs: Callable[[PoolSequence], bool]) -> list[SamplingArgs]:
        """Return `draws` once every token is known. Sequences without `runs` have left: they wait for no mask."""
        draws, sampled = replace(self, unseen=frozenset()).draws(), iter(self.sampled)
        return [draw if draw.given is not None or runs(next(sampled)) else UNREAD for draw in draws]

    def positions(self) -> dict[PoolSequence, Ahead]:
        """Say how far each of its sequences is once it is done."""
        draws, drawn = dict[PoolSequence, Ahead](), 0
        for row, of_step, sequence in zip(self.batch.rows, self.step.rows, self.sequences, strict=True):
            drawn += of_step.scored
            draws[sequence] = Ahead(row.n_tokens, drawn if row.samples else None)
            drawn += row.samples
        return draws

    def by_key(self, results: Sequence[SampledToken | None]) -> StepResults:
        """The sampled tokens of rows, and the failures of rows without a token."""
        if self.scores:
            return self._scored(iter(results))
        tokens = {s.key: token for s, token in zip(self.sampled, results, strict=True) if token is not None}
        if len(tokens) == len(self.sampled):
            return _all_well((tokens, {}, {}, (), 1, {}))
        unsampled = [s for s in self.sampled if s.key not in tokens]
        late = tuple(s.key for s in unsampled if _is_late(s))
        return StepResults(tokens, {s.key: _sampling_reason(s) for s in unsampled if not _is_late(s)}, late=late)

    def _scored(self, results: Iterator[SampledToken | None]) -> StepResults:
        tokens: dict[str, SampledToken] = {}
        failures: dict[str, str] = {}
        prompts: dict[str, list[TokenLogprob]] = {}
        late: list[str] = []
        checked: dict[str, list[SampledToken]] = {}
        for of_batch, row, sequence in zip(self.batch.rows, self.step.rows, self.sequences, strict=True):
            if of_batch.drafted:
                if accepted := _checked(of_batch.drafted, [*islice(results, row.scored + 1)]):
                    checked[sequence.key] = accepted
                elif _is_late(sequence):
                    late.append(sequence.key)
                else:
                    failures[sequence.key] = _sampling_reason(sequence)
                continue
            scored, sampled = [*islice(results, row.scored)], [*islice(results, int(row.samples))]
            logprobs = [one.logprob for one in scored if one is not None and one.logprob is not None]
            if None in sampled and _is_late(sequence):
                late.append(sequence.key)
                continue
            if len(logprobs) < row.scored or None in sampled:
                failures[sequence.key] = NOT_FINITE if len(logprobs) < row.scored else _sampling_reason(sequence)
                continue
            if logprobs:
                prompts[sequence.key] = logprobs
            tokens.update((sequence.key, token) for token in sampled if token is not None)
        return StepResults(tokens, failures, prompts, tuple(late), checked=checked)


class Guessed(NamedTuple):
    """A row with guesses, and the row of logits that checks its first guess."""

    sequence: PoolSequence
    drafted: tuple[int, ...]
    first: int

    def is_right(self, number: int, results: Sequence[SampledToken | None]) -> bool:
        """Return whether the guess with this number exists and equals the sample at its place."""
        token = results[self.first + number] if number < len(self.drafted) else None
        return token is not None and token.token == self.drafted[number]


def _checked(drafted: tuple[int, ...], results: list[SampledToken | None]) -> list[SampledToken]:
    """Return the right guesses and the token after them, or nothing if no token was sampled.

    What is missing behind the first is found again by the next step, or fails there.
    """
    accepted: list[SampledToken] = []
    for token, guess in zip_longest(results, drafted):
        if token is None:
            break
        accepted.append(token)
        if token.token != guess:
            break
    return accepted


def _is_late(sequence: PoolSequence) -> bool:
    return sequence.mask is not None and sequence.mask.late


def _sampling_reason(sequence: PoolSequence) -> str:
    """A sequence has no token."""
    return NOT_FINITE if sequence.mask is None else sequence.mask.fault or NOT_ALLOWED


class StepBuilder:
    """Builds the steps of one engine. `ranks`: the width of the adapter in each slot that is in use."""

    def __init__(self, pool: RequestPool, ranks: Mapping[int, int]) -> None:
        self._pool, self._ranks = pool, ranks
        self._last_built: BuiltStep | None = None

    def build(
        self, batch: Batch, sequences: tuple[PoolSequence, ...], *, keep: bool, previous: BuiltStep | None = None
    ) -> BuiltStep:
        """The step of that batch. `keep`: it has decode rows, and may run again next time as it is.

        `previous`: the step in flight, from whose tokens, which the device alone knows, sequences of both go on.
        """
        last_built = self._last_built
        if keep and last_built is not None and last_built.batch.number == batch.number:
            last_built.step.advance(
                [s.tokens[-1] for s in last_built.sequences], [s.in_kv for s in last_built.sequences]
            )
            if last_built.unseen:
                last_built = self._last_built = replace(last_built, unseen=frozenset())
            return last_built
        built = self._build(batch, sequences, {} if previous is None else previous.positions())
        if not batch.guesses:  # else the batch that it extends may run again
            self._last_built = built if keep else None
        return built

    def advance_speculatively(self, built: BuiltStep) -> BuiltStep | None:
        """Advance the kept step by a position, before the tokens are known. None: it was not kept."""
        if self._last_built is None or self._last_built.batch.number != built.batch.number:
            return None
        built.step.advance_speculatively()
        if len(built.unseen) < len(built.sampled):
            built = self._last_built = replace(built, unseen=frozenset(built.sampled))
        return built

    def _build(
        self, batch: Batch, sequences: tuple[PoolSequence, ...], undecided: Mapping[PoolSequence, Ahead]
    ) -> BuiltStep:
        tokens: list[int] = []
        step_rows: list[StepRow] = []
        slots: dict[int, int] = {}
        unseen: list[PoolSequence] = []
        for row, sequence in zip(batch.rows, sequences, strict=True):
            fed, number = undecided.get(sequence, NOT_AHEAD)
            start, in_kv = len(tokens), sequence.in_kv + fed
            if number is not None:
                slots[start] = number
                unseen.append(sequence)
                tokens.append(0)
            else:
                tokens.extend(sequence.tokens[in_kv : in_kv + row.n_tokens])
            tokens.extend(row.drafted)
            pages = tuple(self._pool.pages.pages_of(row.key))
            guesses, pools = len(row.drafted), row.samples and sequence.start.sampling.pooling
            scored = guesses or sequence.scored(row.n_tokens, fed)
            step_rows.append(
                StepRow(start, len(tokens), in_kv, pages, row.samples, scored, pools, guesses, sequence.long)
            )
        step = StepInput(tokens, tuple(step_rows), self._plan(batch.rows, len(tokens)), slots)
        sampled = tuple(s for row, s in zip(batch.rows, sequences, strict=True) if row.samples)
        return BuiltStep(batch, sequences, step, sampled, any(row.scored for row in step_rows), frozenset(unseen))

    def _plan(self, rows: tuple[Row, ...], n_tokens: int) -> SegmentPlan:
        adapters, ranks = self._pool.adapters, self._ranks
        segments = [(s.start, s.end, adapters.slot_of(s.adapter)) for s in adapter_segments(rows)]
        return SegmentPlan(n_tokens, tuple(Segment(start, end, slot, ranks[slot]) for start, end, slot in segments))

"""What runs next, and what is remembered for that: step times, the batch that runs on unchanged.

Prompts run in the order of the pool's queue policy, chunk by chunk: under fcfs no later request has run more iterations
than an earlier one that could run (ORCA, section 4.2). `StepTimeEstimator` says how large a chunk may be beside running
rows.

Rows and prompts of batch requests join interactive ones only as far as the step is expected to end within the token
time (`_beside_interactive`); the others keep their KV and pause.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count
from math import inf, isfinite

from weft.domain.request import Priority
from weft_runner.core.batch import Batch, Batching, BatchLimits, Candidate, form_batch
from weft_runner.core.drafts.drafter import Drafter, Search
from weft_runner.core.sequence import Sequence as PoolSequence
from weft_runner.core.step_time_model import Lateness, StepModel, StepTimeEstimator

TOKEN_TIMES = 2.0  # steps of one row: the token time beside batch rows in a pool that states none


class BatchScheduler:
    """One owner: the request pool.

    While no sequence joins, leaves, pauses or grows, the batch of decode rows is the same one, by its number, from one
    iteration to the next: what is derived from it (its order, segments, page table) is derived once.
    """

    def __init__(self, limits: BatchLimits, model: StepModel, search: Search | None = None) -> None:
        """`search`: of drafts; None: nothing is drafted."""
        self._limits, self.step_time, self.lateness = limits, StepTimeEstimator(model), Lateness()
        self.drafter = Drafter(search)
        self.reusable_batch: Batch | None = None
        self._numbers = count(1)
        self.keys = 0  # tokens in KV of the decode rows that were chosen last
        self._steps = 0
        self._together: frozenset[str] = frozenset()  # of request-level batching: those of the present batch
        self._turns: dict[str, int] = {}  # of batch rows that decode: when each ran last beside interactive ones
        self._turn = count(1)
        self.departures = 0  # of sequences: rows of theirs in steps in flight do not count
        self.held_rows = 0  # batch rows that could have run and did not, of all iterations

    def schedule(
        self, prefilling: Sequence[Candidate], decoding: Sequence[Candidate], keys: int, steps: Callable[[], int]
    ) -> Batch:
        """Choose the next batch; both inputs are in order of service.

        `keys`: tokens in KV of the decoding ones. `steps`: iterations, this one included, before one of them needs a
        page, or 0 if the batch must not run again as it is; asked only when no prompt waits.
        """
        batch = [candidate for candidate in (*prefilling, *decoding) if candidate.priority is Priority.BATCH]
        if batch and self._limits.batching is Batching.MIXED:
            if len(batch) < len(prefilling) + len(decoding):
                return self._beside_interactive(prefilling, decoding)
            return self._schedule(prefilling, decoding, keys, steps, inf)  # nobody waits for a token
        return self._schedule(prefilling, decoding, keys, steps, self._limits.prompt_time_ms)

    def _schedule(
        self, prefilling: Sequence[Candidate], decoding: Sequence[Candidate], keys: int, steps: Callable[[], int],
        token_time_ms: float,
    ) -> Batch:  # fmt: skip
        if self._limits.batching is not Batching.MIXED:
            prefilling, decoding = self._separate_batches(prefilling, decoding)
            keys *= bool(decoding)
        self.keys = keys
        if not prefilling:
            batch = form_batch((), decoding, self._limits, number=next(self._numbers))
            self._steps = steps() if len(batch.rows) == len(decoding) else 0
            self.reusable_batch = batch if self._steps > 1 else None
            return batch
        max_tokens = self._limits.prompt_tokens_beside(len(decoding))
        tokens = self.step_time.prompt_tokens(len(decoding), keys, token_time_ms, max_tokens)
        return form_batch(prefilling, decoding, self._limits, prompt_tokens=tokens, number=next(self._numbers))

    @property
    def token_time_ms(self) -> float:
        """The target time of a step with interactive and batch rows: the pool's objective, or twice the time of a step
        with one row.
        """
        stated = self._limits.token_time_ms
        return stated if isfinite(stated) else TOKEN_TIMES * self.step_time.step_ms(1, 0, 0)

    def _beside_interactive(self, prefilling: Sequence[Candidate], decoding: Sequence[Candidate]) -> Batch:
        """Schedule interactive rows and prompts without regard to batch rows, then add the batch rows within the token
        time.

        Batch rows take turns: those that ran longest ago come first. While all of them fit, a batch prompt goes before
        them, for it becomes another row; while not all of them do, another row would gain nothing.
        """
        limits, times, target_ms = self._limits, self.step_time, self.token_time_ms
        target_ms -= self.lateness.ms(target_ms)
        prompts, rows = _with_priority(prefilling, Priority.INTERACTIVE), _with_priority(decoding, Priority.INTERACTIVE)
        alone = self._schedule(prompts, rows, sum(row.keys for row in rows), lambda: 0, limits.prompt_time_ms)
        keys, prompt_tokens = self.keys, alone.prompt_tokens

        def fits(n_rows: int, in_kv: int) -> bool:
            n_rows += len(rows)
            step_ms = times.step_ms(n_rows, keys + in_kv, prompt_tokens)
            return step_ms <= target_ms and n_rows + prompt_tokens <= limits.max_batch_tokens

        waiting, batch_prompts = _with_priority(decoding, Priority.BATCH), _with_priority(prefilling, Priority.BATCH)
        fed = prompt_tokens == sum(prompt.pending for prompt in prompts)
        if batch_prompts and fed and fits(len(waiting), sum(row.keys for row in waiting)):
            max_tokens = limits.prompt_tokens_beside(len(rows)) - prompt_tokens
            prompt_tokens += times.tokens_within(target_ms, len(rows), keys, prompt_tokens, max_tokens)
        self._turns = {row.key: self._turns.get(row.key, 0) for row in waiting}
        joining, in_kv = list[Candidate](), 0
        for row in sorted(waiting, key=lambda row: self._turns[row.key]):
            if fits(len(joining) + 1, in_kv + row.keys):
                joining.append(row)
                in_kv += row.keys
        self._turns.update((row.key, next(self._turn)) for row in joining)
        self.keys = keys + in_kv
        self.held_rows += len(waiting) - len(joining)
        number = next(self._numbers)
        return form_batch(
            [*prompts, *batch_prompts], [*rows, *joining], limits, prompt_tokens=prompt_tokens, number=number
        )

    def draft(
        self,
        batch: Batch,
        sequences: Mapping[str, PoolSequence],
        max_guesses: Callable[[PoolSequence], int],
        now: float,
    ) -> Batch:
        """Give decode rows of a batch the worthwhile guesses (`Drafter.extend`). Such a batch runs once."""
        step_ms = self.step_time.step_ms(len(batch.rows) - batch.n_prefills, self.keys, batch.prompt_tokens)
        worth = partial(self.guesses_worth, batch)
        return self.drafter.extend(batch, sequences, max_guesses, worth, step_ms, now)

    def guesses_worth(self, batch: Batch, gains: Sequence[float]) -> int:
        """Return the number of guesses to check in addition to the rows of a batch. `gains`: the expected tokens of
        each guess.

        `gains`: the largest first. As many as make the tokens that the step is expected to sample, of the time that it
        is expected to take, the most; within the token time, and the tokens of a step.
        """
        times, rows = self.step_time, len(batch.rows) - batch.n_prefills
        alone_ms = times.step_ms(rows, self.keys, batch.prompt_tokens)
        tokens = float(sum(row.samples for row in batch.rows))
        best, most_per_ms = 0, tokens / alone_ms
        for n_guesses, gain in enumerate(gains[: max(0, self._limits.max_batch_tokens - batch.n_tokens)], 1):
            tokens += gain
            step_ms = alone_ms + times.guesses_ms(rows, n_guesses)
            if step_ms > self._limits.token_time_ms:
                break
            if tokens / step_ms > most_per_ms:
                best, most_per_ms = n_guesses, tokens / step_ms
        return best

    def _separate_batches(
        self, prefilling: Sequence[Candidate], decoding: Sequence[Candidate]
    ) -> tuple[Sequence[Candidate], Sequence[Candidate]]:
        """Separate prompts and tokens by the pool's batching mechanism."""
        if self._limits.batching is Batching.REQUEST:
            here = frozenset(candidate.key for candidate in (*prefilling, *decoding))
            self._together = self._together & here or here
            prefilling = [candidate for candidate in prefilling if candidate.key in self._together]
        return prefilling, () if prefilling else decoding

    def limit(self, limits: BatchLimits) -> None:
        """Set the limits from the next batch on."""
        self._limits = limits
        self.invalidate()

    def lasts(self, batch: Batch, steps: int) -> bool:
        """Say whether a batch can run as it is for `steps` iterations, the present one included."""
        reusable = self.reusable_batch
        return reusable is not None and reusable.number == batch.number and self._steps >= steps

    def invalidate(self) -> None:
        """Choose the next batch anew: a sequence joined, left, paused or grew."""
        self.reusable_batch = None

    def count_departure(self) -> None:
        """Count a sequence that has left, or is computed no more."""
        self.departures += 1
        self.reusable_batch = None

    def count_run(self, batch: Batch, accepted: Collection[int] = ()) -> None:
        """Count a completed batch: each decode row has one key more, and one free place less in its pages.

        `accepted`: guesses that rows of a batch that extends it have more.
        """
        if (reusable := self.reusable_batch) is not None and reusable.number in (batch.number, batch.extends):
            self.keys += len(batch.rows) + sum(accepted)
            self._steps -= 1 + max(accepted, default=0)
            if self._steps <= 0:
                self.reusable_batch = None

    def learn(self, batch: Batch, measured_ms: float, keys: int | None = None, *, awaited: bool = True) -> None:
        """Learn from the measured time of a batch. `keys`: the keys at its choice, if later batches were chosen since.

        `awaited`: it had an interactive row. What other steps take says nothing of how late a token is.
        """
        keys = self.keys if keys is None else keys
        rows = len(batch.rows) - batch.n_prefills
        expected_ms = self.step_time.learn(rows, keys, batch.prompt_tokens, measured_ms, batch.guesses)
        if awaited:
            self.lateness.add((expected_ms, measured_ms))


def _with_priority(candidates: Sequence[Candidate], priority: Priority) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.priority is priority]

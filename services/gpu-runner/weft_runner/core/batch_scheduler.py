"""What runs next, and what is remembered for that: overtaken prompts, step times, the batch that runs on unchanged.

Of the prompts that wait the one with the least left goes first, chunk by chunk, so that a short one passes a long one
that has begun (shortest remaining time first: the least mean wait, Schrage 1968). The eldest is passed a bounded number
of times in a row. `StepTimeEstimator` says how large a chunk may be beside running rows.
"""

from collections.abc import Callable, Sequence

from weft_runner.core.batch import Batch, BatchLimits, Candidate, form_batch
from weft_runner.core.step_time_model import StepModel, StepTimeEstimator


class PrefillAging:
    """How many times in a row the eldest prompt was passed. One owner.

    Every (age + 1)th iteration that works on prompts belongs to the eldest, who thus comes to an end, and then to the
    next one: with E tokens left in those admitted before it, a prompt of n tokens is through after at most
    (age + 1) x (chunks of E and n) such iterations, whatever comes behind it. Age 0: first come, first served.
    """

    def __init__(self, age: int) -> None:
        self._age, self._eldest, self.passed = age, "", 0

    def order(self, prefilling: Sequence[Candidate]) -> Sequence[Candidate]:
        """In order of admission -> in order of service: the least left first, equals as they were admitted."""
        if not self._age or len(prefilling) < 2:
            return prefilling
        head = 1 if self.passed >= self._age and prefilling[0].key == self._eldest else 0
        return [*prefilling[:head], *sorted(prefilling[head:], key=lambda candidate: candidate.pending)]

    def note(self, eldest: str, batch: Batch) -> None:
        """An iteration that works on prompts was chosen: did it pass the eldest?"""
        if eldest != self._eldest:
            self._eldest, self.passed = eldest, 0
        served = any(row.key == eldest for row in batch.rows[: batch.n_prefills])
        self.passed = 0 if served else self.passed + 1


class BatchScheduler:
    """One owner: the request pool.

    While no sequence joins, leaves, pauses or grows, the batch of decode rows is the same object from one iteration to
    the next: what is derived from it (its order, segments, page table) is derived once.
    """

    def __init__(self, limits: BatchLimits, model: StepModel) -> None:
        self._limits, self.step_time, self._aging = limits, StepTimeEstimator(model), PrefillAging(limits.prefill_age)
        self.standing: Batch | None = None
        self.keys = 0  # tokens in KV of the decode rows that were chosen last
        self._steps = 0

    def schedule(
        self, prefilling: Sequence[Candidate], decoding: Sequence[Candidate], keys: int, steps: Callable[[], int]
    ) -> Batch:
        """The next batch; both inputs are in order of admission.

        `keys`: tokens in KV of the decoding ones. `steps`: iterations, this one included, before one of them needs a
        page, or 0 where the batch must not run again as it is; asked only when no prompt waits.
        """
        self.keys = keys
        if not prefilling:
            batch = form_batch((), decoding, self._limits)
            self._steps = steps() if len(batch.rows) == len(decoding) else 0
            self.standing = batch if self._steps > 1 else None
            return batch
        most = self._limits.max_batch_tokens - len(decoding)
        tokens = self.step_time.prompt_tokens(len(decoding), keys, self._limits.token_time_ms, most)
        batch = form_batch(self._aging.order(prefilling), decoding, self._limits, prompt_tokens=tokens)
        if batch.n_prefills:
            self._aging.note(prefilling[0].key, batch)
        return batch

    def lasts(self, batch: Batch, steps: int) -> bool:
        """That batch can run as it is for so many iterations, the present one included."""
        return batch is self.standing and self._steps >= steps

    def changed(self) -> None:
        """Somebody joined, left, paused or grew: the next batch is chosen anew."""
        self.standing = None

    def ran(self, batch: Batch) -> None:
        """That batch has run: each of its decode rows has one key more, and one place less in its pages."""
        if batch is self.standing:
            self.keys += len(batch.rows)
            self._steps -= 1
            if not self._steps:
                self.standing = None

    def timed(self, batch: Batch, measured_ms: float, keys: int | None = None) -> None:
        """How long that batch took. `keys`: those when it was chosen, if others have been chosen since."""
        keys = self.keys if keys is None else keys
        self.step_time.learn(len(batch.rows) - batch.n_prefills, keys, batch.prompt_tokens, measured_ms)

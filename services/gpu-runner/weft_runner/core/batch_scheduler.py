"""What runs next, and what is remembered for that: step times, the batch that runs on unchanged.

Prompts run in the order of the pool's queue policy, chunk by chunk: under fcfs no later request has run more iterations
than an earlier one that could run (ORCA, section 4.2). `StepTimeEstimator` says how large a chunk may be beside running
rows.
"""

from collections.abc import Callable, Sequence

from weft_runner.core.batch import Batch, Batching, BatchLimits, Candidate, form_batch
from weft_runner.core.step_time_model import StepModel, StepTimeEstimator


class BatchScheduler:
    """One owner: the request pool.

    While no sequence joins, leaves, pauses or grows, the batch of decode rows is the same object from one iteration to
    the next: what is derived from it (its order, segments, page table) is derived once.
    """

    def __init__(self, limits: BatchLimits, model: StepModel) -> None:
        self._limits, self.step_time = limits, StepTimeEstimator(model)
        self.standing: Batch | None = None
        self.keys = 0  # tokens in KV of the decode rows that were chosen last
        self._steps = 0
        self._together: frozenset[str] = frozenset()  # of request-level batching: those of the present batch

    def schedule(
        self, prefilling: Sequence[Candidate], decoding: Sequence[Candidate], keys: int, steps: Callable[[], int]
    ) -> Batch:
        """The next batch; both inputs are in order of service.

        `keys`: tokens in KV of the decoding ones. `steps`: iterations, this one included, before one of them needs a
        page, or 0 where the batch must not run again as it is; asked only when no prompt waits.
        """
        if self._limits.batching is not Batching.MIXED:
            prefilling, decoding = self._apart(prefilling, decoding)
            keys *= bool(decoding)
        self.keys = keys
        if not prefilling:
            batch = form_batch((), decoding, self._limits)
            self._steps = steps() if len(batch.rows) == len(decoding) else 0
            self.standing = batch if self._steps > 1 else None
            return batch
        most = self._limits.max_batch_tokens - len(decoding)
        tokens = self.step_time.prompt_tokens(len(decoding), keys, self._limits.token_time_ms, most)
        return form_batch(prefilling, decoding, self._limits, prompt_tokens=tokens)

    def _apart(
        self, prefilling: Sequence[Candidate], decoding: Sequence[Candidate]
    ) -> tuple[Sequence[Candidate], Sequence[Candidate]]:
        """What the pool's batching mechanism lets run together."""
        if self._limits.batching is Batching.REQUEST:
            here = frozenset(candidate.key for candidate in (*prefilling, *decoding))
            self._together = self._together & here or here
            prefilling = [candidate for candidate in prefilling if candidate.key in self._together]
        return prefilling, () if prefilling else decoding

    def limit(self, limits: BatchLimits) -> None:
        """From the next batch on."""
        self._limits = limits
        self.changed()

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

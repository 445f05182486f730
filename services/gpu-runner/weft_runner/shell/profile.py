"""The self-profile: steps of the real executor on pages without an owner, for about a second.

Batches 1, 2, 4, ... up to the limit; a prompt's first chunks; and one batch with longer contexts. Each time is the
least of a few: it is what the machine can do, and `core.step_time_model` learns what it does. What there is no time
for is left out: a large model is timed at a few batches, at least one of each kind, and the rest follows from the
fitted line. Adapters are not part of it: which ones will run together is not known at start. Where drafts are checked,
half a second more goes to steps of one row with drafted tokens.
"""

import time
from collections.abc import Callable
from itertools import accumulate

from weft.domain.request import Sampling
from weft_kernels.plan import SegmentPlan
from weft_runner.core.admission import PoolLimits
from weft_runner.core.profile_model import DecodeTime, PrefillTime, Profile, make_profile
from weft_runner.core.step_time_model import GuessTimes
from weft_runner.model.executor import Executor
from weft_runner.model.operator_threads import wait_for_devices
from weft_runner.model.sampling import SamplingArgs
from weft_runner.model.step import StepInput, StepRow

BUDGET_S = 1.0
DECODE_SHARE = 0.5  # of the budget: the rest is for prompts and long contexts
REPEATS = 5
CONTEXT, LONG_CONTEXT, LONG_ROWS = 64, 1024, 8
CHUNKS = (32, 128, 512)
GUESSES_S, GUESSED_TOKENS = 0.5, (1, 2, 4, 9, 17, 33, 3, 5, 6, 7, 13, 25)  # of a step: what others lie between first
LOUD = 3.0  # times the last step's time: the most that the next larger one is expected to take

Clock = Callable[[], float]


def measure_profile(
    executor: Executor, limits: PoolLimits, clock: Clock = time.perf_counter, *, drafts: bool = False
) -> Profile:
    """Time the executor before it serves. Pages are left as they were found: empty. `drafts`: it will check some."""
    bench = _Bench(executor, limits, clock, drafts=drafts)
    try:
        return bench.profile()
    finally:
        executor.clear_pages(sorted(bench.touched))


class _Bench:
    """Steps of scratch rows, and their times."""

    def __init__(self, executor: Executor, limits: PoolLimits, clock: Clock, *, drafts: bool) -> None:
        self._executor, self._limits, self._clock, self._drafts = executor, limits, clock, drafts
        self._can = executor.can
        self._end = 0.0  # of the part of the budget that is being spent
        self.touched: set[int] = set()

    def profile(self) -> Profile:
        limits, began = self._limits, self._clock()
        self._run_ms(self._decode_step(1, self._context(CONTEXT)))  # the first one pages weights in
        self._end = began + DECODE_SHARE * BUDGET_S
        decode = self._decode_times()
        self._end = began + BUDGET_S
        prefill, longer = self._prefill_times(), self._longer(decode)
        self._end = self._clock() + GUESSES_S
        guess_times = self._guess_times() if self._drafts else ()
        return make_profile(
            decode, prefill, longer, max_sequences=limits.max_sequences, token_time_ms=limits.batch.prompt_time_ms,
            batches=1 if self._can.pipelined is None else self._can.pipelined.depth, guess_times=guess_times,
        )  # fmt: skip

    def _decode_times(self) -> list[DecodeTime]:
        context, times = self._context(CONTEXT), list[DecodeTime]()
        for rows in batches(self._limits.max_sequences):
            if times and not self._allows(LOUD * times[-1].ms):
                break
            times.append(DecodeTime(rows, rows * context, self._best_ms(self._decode_step(rows, context))))
        return times

    def _prefill_times(self) -> list[PrefillTime]:
        times: list[PrefillTime] = []
        for tokens in sorted({min(c, self._limits.batch.max_batch_tokens, self._context(c)) for c in CHUNKS}):
            expected_ms = times[-1].ms * tokens / times[-1].tokens if times else 0.0
            if times and not self._allows(expected_ms):
                break
            times.append(PrefillTime(tokens, self._best_ms(self._prefill_step(tokens))))
        return times

    def _longer(self, decode: list[DecodeTime]) -> DecodeTime | None:
        """The largest of the small batches again, with as long contexts as there are pages for."""
        last_short = [time for time in decode if time.rows <= LONG_ROWS][-1]
        rows, page_tokens = last_short.rows, self._limits.page_tokens
        context = self._context(min(LONG_CONTEXT, self._limits.total_pages // rows * page_tokens))
        if rows * context <= last_short.keys or not self._allows(last_short.ms * rows * context / last_short.keys):
            return None
        return DecodeTime(rows, rows * context, self._best_ms(self._decode_step(rows, context)))

    def _guess_times(self) -> GuessTimes:
        """Steps of one row with guesses, again and again. Noise only adds time: none takes longer than a larger one."""
        context, best = self._context(CONTEXT), dict[int, float]()
        max_tokens = min(self._limits.batch.max_batch_tokens, context)
        for tokens in [tokens for tokens in GUESSED_TOKENS if tokens <= max_tokens] * REPEATS:
            largest = max(best, default=1)
            if best and not self._allows(best.get(tokens, best[largest] * max(1.0, tokens / largest))):
                continue
            ms = self._run_ms(self._decode_step(1, context, tokens - 1))
            best[tokens] = min(ms, best.get(tokens, ms))
        falling = sorted(best, reverse=True)
        return tuple(zip(falling, accumulate((best[tokens] for tokens in falling), min), strict=True))[::-1]

    # ---- steps

    def _best_ms(self, step: StepInput) -> float:
        """The least of up to REPEATS runs, as long as there is time; one at least."""
        best_ms = self._run_ms(step)
        for _ in range(REPEATS - 1):
            if not self._allows(best_ms):
                break
            best_ms = min(best_ms, self._run_ms(step))
        return best_ms

    def _allows(self, ms: float) -> bool:
        """There is time for that."""
        return self._clock() + ms / 1e3 <= self._end

    def _run_ms(self, step: StepInput) -> float:
        began = self._clock()
        can, draws = self._can, [SamplingArgs(Sampling(), row.context) for row in step.rows]
        if can.pipelined is not None:  # its `run` returns before it has run
            can.pipelined.launch(step, draws).result()
        elif can.follows is not None:
            self._executor.sample(self._executor.run(step), draws)
        else:
            self._executor.run(step)  # guesses are sampled for some microseconds each
            wait_for_devices()  # as above, of a model that is split over GPUs
        return max(self._clock() - began, 1e-9) * 1e3

    def _decode_step(self, rows: int, context: int, guesses: int = 0) -> StepInput:
        n_pages, tokens_each = self._pages_for(context), 1 + guesses
        made = [
            StepRow(
                i * tokens_each,
                (i + 1) * tokens_each,
                context - tokens_each,
                self._pages(i * n_pages, n_pages),
                True,
                guesses,
                guesses=guesses,
            )
            for i in range(rows)
        ]
        return StepInput(self._tokens(rows * tokens_each), tuple(made), SegmentPlan(rows * tokens_each, ()))

    def _prefill_step(self, tokens: int) -> StepInput:
        row = StepRow(0, tokens, 0, self._pages(0, self._pages_for(tokens)), samples=True)
        return StepInput(self._tokens(tokens), (row,), SegmentPlan(tokens, ()))

    def _tokens(self, count: int) -> tuple[int, ...]:
        """Return different tokens, so that embeddings are not one cached row."""
        return tuple(i * 7919 % self._limits.vocab_size for i in range(count))

    def _pages(self, first: int, count: int) -> tuple[int, ...]:
        """Return pages for a row; where there are too few, rows share them: what they compute is of no interest."""
        pages = tuple((first + i) % self._limits.total_pages for i in range(count))
        self.touched.update(pages)
        return pages

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._limits.page_tokens)

    def _context(self, tokens: int) -> int:
        return min(tokens, self._limits.max_context_tokens)


def batches(max_rows: int) -> list[int]:
    """1, 2, 4, 8, ... and `max_rows`."""
    return [*(1 << i for i in range(max_rows.bit_length()) if 1 << i < max_rows), max_rows]

"""KV that goes to host memory and back while a batch decodes: how fast, and what steps pay for it.

Rows of the base decode. The runner's own copies move the pages of 512 tokens out and in again, one copy every few
steps; steps with a copy beside them are compared with the others of their round. Speed stands beside that of one thread
which copies as many bytes while nothing else runs.
"""

import time
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

import numpy as np

from weft_bench.cpu_context import Context
from weft_bench.cpu_decode import PROMPT_TOKENS, base
from weft_bench.cpu_engine import PAGE_TOKENS, Sizes, Subject
from weft_bench.cpu_prefix import prefix_case
from weft_runner.core import DropSwap, SwapDone, SwapFailed, SwapIn, SwapOut
from weft_runner.shell.kv_swapper import KvSwapper
from weft_stage.lines import Line, percentile
from weft_stage.playing import Played

ROWS, TOKENS = 8, 512
EVERY = 4  # beats from the begin of one copy to that of the next, where it has ended by then
GIB = float(1 << 30)


class Copies:
    """One sequence's pages, out and in and out again: pages that no sequence of the engine has."""

    def __init__(self, subject: Subject) -> None:
        memory = subject.engine.executor.kv_memory
        assert memory is not None, "an executor that swaps nothing"
        total, n_pages = subject.built.limits.total_pages, TOKENS // PAGE_TOKENS
        self._pages = tuple(range(total - n_pages, total))
        self.n_bytes = n_pages * memory.page_bytes
        self._swapper = KvSwapper(memory, self._ended, subject.engine.copies)
        self.spans: list[tuple[float, float]] = []
        self.seconds: dict[bool, list[float]] = {True: [], False: []}  # out, in
        self._out, self._begun, self._beats = False, 0.0, 0
        self._under_way = False

    def flow(self) -> None:
        """Called before every beat."""
        self._beats += 1
        if self._under_way or self._beats % EVERY:
            return
        self._out, self._under_way, self._begun = not self._out, True, time.perf_counter()
        if self._out:
            self._swapper.execute(DropSwap((), self._pages))
            self._swapper.execute(SwapOut(1, self._pages, self._pages))
        else:
            self._swapper.execute(SwapIn(1, self._pages, self._pages))

    def forget(self) -> None:
        """What was measured so far was to touch the memory."""
        self.seconds = {True: [], False: []}

    def close(self) -> None:
        self._swapper.close()

    def _ended(self, report: SwapDone | SwapFailed) -> None:
        """From the copying thread."""
        assert isinstance(report, SwapDone), report
        ended = time.perf_counter()
        self.seconds[self._out].append(ended - self._begun)
        self.spans.append((self._begun, ended))
        self._under_way = False


def swap_case(context: Context) -> Iterator[Line]:
    """Decode steps with and without a copy beside them; then what the prefix cache has of its copies."""
    yield from _beside_steps(context)
    yield from prefix_case(context)


def _beside_steps(context: Context) -> Iterator[Line]:
    tokens, repetitions = context.options.amounts.tokens, context.options.amounts.repetitions
    sizes = Sizes(rows=ROWS, slots=1, context_tokens=PROMPT_TOKENS + tokens, prefills=ROWS)
    quiet: list[float] = []
    beside: list[float] = []
    dearer: list[float] = []  # by round
    label = f"{context.model.name}: swap"
    kv_bytes = 2.0 * 2 * context.model.shape.layers * context.model.shape.kv * TOKENS
    with context.subject(sizes, adapter_bytes=kv_bytes) as subject, context.bar(label, repetitions + 1) as advanced:
        copies = Copies(subject)
        memcpy = _memcpy_s(copies.n_bytes)
        for number in range(repetitions + 1):
            asks = context.model.asks(subject, base(ROWS), PROMPT_TOKENS, tokens)
            steps = _steps(subject.play(asks, between=copies.flow), copies.spans)
            without = [seconds for seconds, copied in steps if not copied]
            with_one = [seconds for seconds, copied in steps if copied]
            if number and without and with_one:
                quiet, beside = quiet + without, beside + with_one
                dearer.append(median(with_one) / median(without))
            elif not number:
                copies.forget()
            advanced(1)
        copies.close()
        reporter, case = context.on(subject), f"batch {ROWS}, base"
        for name, seconds in (("no copy beside it", quiet), ("a copy beside it", beside)):
            for percent in (50, 99):
                yield reporter.line(case, f"decode step p{percent}, {name}", percentile(seconds, percent) * 1e3, "ms")
        yield reporter.line(case, "decode step p50, a copy beside it / none", median(dearer), "x", target="<= 1.1")
        for out, name in ((True, "out"), (False, "in")):
            took, best = median(copies.seconds[out]), median(memcpy)
            rate = copies.n_bytes / GIB / took
            yield reporter.line(
                case, f"{TOKENS} tokens of KV {name}", rate, "GiB/s", baseline=copies.n_bytes / GIB / best
            )
            yield reporter.line(case, f"{TOKENS} tokens of KV {name} / memcpy", best / took, "share", target=">= 0.5")


def _steps(played: Played, spans: list[tuple[float, float]]) -> list[tuple[float, bool]]:
    """Seconds of each step in which every row decoded, and whether a copy was under way in it."""
    beats = [beat for beat in played.beats if not beat.prefills and beat.rows == ROWS]
    ends = [beats[0].began, *(beat.ended for beat in beats)]
    return [(end - began, any(a < end and b > began for a, b in spans)) for began, end in pairwise(ends)]


def _memcpy_s(n_bytes: int, times: int = 15) -> list[float]:
    """One thread, memory that was touched before."""
    source, target, found = np.ones(n_bytes, np.uint8), np.zeros(n_bytes, np.uint8), list[float]()
    for _ in range(times):
        began = time.perf_counter()
        np.copyto(target, source)
        found.append(time.perf_counter() - began)
    return found

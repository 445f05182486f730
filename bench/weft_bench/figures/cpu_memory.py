"""KV in memory: attention over long contexts in bf16 and int4, KV to host memory and back, prefixes from there."""

import random
import time
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

import numpy as np

from weft_bench.cpu_shapes import prompts
from weft_bench.drive.cpu import Bench
from weft_bench.drive.engine import PAGE_TOKENS, PROMPT_TOKENS, Sizes, Subject, base
from weft_kernels.cpu.errors import NativeUnavailable
from weft_kernels.cpu.library import load
from weft_kernels.cpu.threads import cpu_quota
from weft_runner.core import DropSwap, SwapDone, SwapFailed, SwapIn, SwapOut
from weft_runner.model import open_checkpoint, read_spec
from weft_runner.model.cpu.executor import CpuExecutor
from weft_runner.shell.kv_swapper import KvSwapper
from weft_stage.cpu_models import base_model, cache_dir, files
from weft_stage.errors import EngineRefused
from weft_stage.gpu_models import StepOf, step_of
from weft_stage.lines import Line, percentile
from weft_stage.playing import Ask

WRITTEN_TOKENS = 512  # of a prompt whose KV fills all pages
KINDS = {
    "bf16 KV": ("auto", 0.0), "int4 KV": ("int4", 0.0), "bf16 KV, best tenth": ("auto", 0.1),
    "int4 KV, best tenth": ("int4", 0.1),
}  # fmt: skip
MIN_TOKENS = 32  # of an answer beside which a copy begins
MAX_PLAYS = 20  # until steps were seen with and without a copy beside them
ROWS, SWAPPED_TOKENS, EVERY, GIB = 8, 512, 4, float(1 << 30)  # a copy begins every fourth beat, at most
PREFIX_TOKENS, TAIL_TOKENS, PREFIX_ROWS = 1024, 16, 2
COMPUTED, DEVICE, HOST = "computed", "read on the device", "read from host memory"


def kv(bench: Bench) -> Iterator[Line]:
    """Measure attention of decode steps by context, instruction level and KV.

    It is a step at that context less a step at a context of a page. Its bound is the KV bytes that it reads.
    """
    rows, contexts = bench.amounts.rows, bench.amounts.kv_contexts
    try:
        levels = load().levels
    except NativeUnavailable as error:
        bench.run.say(f"skipped: {bench.model.name}, kv: {error}")
        return
    for level in levels:
        plain: dict[int, float] = {}
        for name, (dtype, share) in KINDS.items():
            executor, pages = _written(bench, level, dtype, share, rows, max(contexts))
            for tokens in contexts:
                seconds = _attention_s(executor, pages, tokens, bench.amounts.repetitions)
                n_bytes = (1 + (share or 1)) / 2 * rows * tokens / PAGE_TOKENS * executor.page_bytes
                bound_s = n_bytes / bench.machine.rates(n_bytes).bytes_per_s
                case = f"{bench.model.name}{bench.label}, {rows} rows at {tokens:,} ({name}, {level})"
                line = bench.run.origin().line
                yield line(
                    case, "attention", 1e3 * seconds, "ms", baseline=1e3 * bound_s, bound_fraction=bound_s / seconds
                )
                before = plain.setdefault(tokens, seconds)
                if before != seconds:
                    yield line(case, "attention of all keys in bf16 / this", before / seconds, "x")


def _written(
    bench: Bench, level: str, dtype: str, share: float, rows: int, longest: int
) -> tuple[CpuExecutor, list[list[int]]]:
    """Make an executor whose pages are all written, with a short prompt's KV. Returns the pages of each row, too."""
    paths = files(base_model(bench.options.models or cache_dir(), bench.model.name, bench.model.shape))
    spec, count = read_spec(paths["config.json"]), rows * (longest // PAGE_TOKENS)
    executor = CpuExecutor(
        load(level), open_checkpoint(paths, spec), kv_dtype=dtype, top_share=share,
        threads=bench.options.threads or cpu_quota(), pages=count, page_tokens=PAGE_TOKENS, slots=1,
    )  # fmt: skip
    rng = random.Random(bench.options.seed)
    ids = rng.sample(range(count), count)
    pages = [ids[row::rows] for row in range(rows)]
    prompt = [rng.randrange(spec.vocab_size) for _ in range(min(WRITTEN_TOKENS, longest))]
    executor.run(step_of([StepOf(prompt, 0, pages[0], None)], PAGE_TOKENS))
    memory, written = executor.kv_memory, len(prompt) // PAGE_TOKENS
    hosts = [memory.host_page() for _ in range(written)]
    memory.copy_out(pages[0][:written], hosts, None)
    rest = [page for row in pages for page in row]
    for begin in range(0, len(rest), written):
        part = rest[begin : begin + written]
        memory.copy_in(part, hosts[: len(part)], None)
    return executor, pages


def _attention_s(executor: CpuExecutor, pages: list[list[int]], tokens: int, repetitions: int) -> float:
    def step_s(context: int) -> float:
        step = step_of([StepOf([1], context - 1, row, None) for row in pages], PAGE_TOKENS)
        begun = time.perf_counter()
        executor.run(step)
        return time.perf_counter() - begun

    long, short = (min(step_s(context) for _ in range(repetitions)) for context in (tokens, PAGE_TOKENS))
    return long - short


class Copies:
    """Moves one sequence's pages out and in again, with the runner's own copies. No sequence of the engine has them."""

    def __init__(self, subject: Subject) -> None:
        memory = subject.engine.executor.kv_memory
        assert memory is not None, "an executor that swaps nothing"
        total, n_pages = subject.built.limits.total_pages, SWAPPED_TOKENS // PAGE_TOKENS
        self._pages = tuple(range(total - n_pages, total))
        self.n_bytes = n_pages * memory.page_bytes
        self.swapper = KvSwapper(memory, self._ended, subject.engine.copies)
        self.spans: list[tuple[float, float]] = []
        self.seconds: dict[bool, list[float]] = {True: [], False: []}  # out, in
        self._out, self._begun, self._beats, self._copying = False, 0.0, 0, False

    def flow(self) -> None:
        """Begin the next copy: called before every beat."""
        self._beats += 1
        if self._copying or self._beats % EVERY:
            return
        self._out, self._copying, self._begun = not self._out, True, time.perf_counter()
        if self._out:
            self.swapper.execute(DropSwap((), self._pages))
            self.swapper.execute(SwapOut(1, self._pages, self._pages))
        else:
            self.swapper.execute(SwapIn(1, self._pages, self._pages))

    def _ended(self, report: SwapDone | SwapFailed) -> None:
        """Note the end of a copy. Called from the copying thread."""
        assert isinstance(report, SwapDone), report
        ended = time.perf_counter()
        self.seconds[self._out].append(ended - self._begun)
        self.spans.append((self._begun, ended))
        self._copying = False


def swap(bench: Bench) -> Iterator[Line]:
    """Measure decode steps with and without a copy of KV beside them, the copies, and the prefix cache's copies."""
    tokens, repetitions = max(MIN_TOKENS, bench.amounts.tokens), bench.amounts.repetitions
    sizes = Sizes(rows=ROWS, slots=1, context_tokens=PROMPT_TOKENS + tokens, prefills=ROWS)
    kv_bytes = 4.0 * bench.model.shape.layers * bench.model.shape.kv * SWAPPED_TOKENS
    names = {False: "no copy beside it", True: "a copy beside it"}
    steps: dict[bool, list[float]] = {False: [], True: []}
    ratios: list[float] = []
    with bench.subject(sizes, adapter_bytes=kv_bytes) as subject:
        copies = Copies(subject)
        copy_s = _memcpy_s(copies.n_bytes)
        for number in range(repetitions + 1):
            round_s: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(MAX_PLAYS):
                played = subject.play(bench.model.asks(subject, base(ROWS), PROMPT_TOKENS, tokens), between=copies.flow)
                beats = [beat for beat in played.beats if not beat.prefills and beat.rows == ROWS]
                for begin, end in pairwise([beats[0].began, *(beat.ended for beat in beats)]):
                    round_s[any(a < end and b > begin for a, b in copies.spans)].append(end - begin)
                if all(round_s.values()) and all(copies.seconds.values()):
                    break
            else:
                raise EngineRefused(f"{MAX_PLAYS} runs had no step with, or no step without, a copy beside it")
            if not number:  # the first round touches the memory
                copies.seconds = {True: [], False: []}
                continue
            steps = {copying: steps[copying] + seconds for copying, seconds in round_s.items()}
            ratios.append(median(round_s[True]) / median(round_s[False]))
        copies.swapper.close()
        reporter, case = bench.on(subject), f"batch {ROWS}, base"
        for copying, seconds in steps.items():
            for p in (50, 99):
                yield reporter.line(case, f"decode step p{p}, {names[copying]}", percentile(seconds, p) * 1e3, "ms")
        yield reporter.line(case, "decode step p50, a copy beside it / none", median(ratios), "x", target="<= 1.1")
        for out, name in ((True, "out"), (False, "in")):
            took_s, of_kv = median(copies.seconds[out]), copies.n_bytes / GIB
            metric = f"{SWAPPED_TOKENS} tokens of KV {name}"
            yield reporter.line(case, metric, of_kv / took_s, "GiB/s", baseline=of_kv / copy_s)
            yield reporter.line(case, f"{metric} / memcpy", copy_s / took_s, "share", target=">= 0.5")
    yield from _prefix(bench)


def _memcpy_s(n_bytes: int, times: int = 15) -> float:
    """Return the median seconds of a copy by one thread between memory that was touched before."""
    source, target, seconds = np.ones(n_bytes, np.uint8), np.zeros(n_bytes, np.uint8), list[float]()
    for _ in range(times):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _prefix(bench: Bench) -> Iterator[Line]:
    """Measure the first token of the same prompt: computed, from pages on the device, from host memory."""
    sizes = Sizes(rows=PREFIX_ROWS, slots=1, context_tokens=PREFIX_TOKENS + 2 * TAIL_TOKENS)
    rng, vocab = bench.model.rng, bench.model.shape.vocab
    ttft_s: dict[str, list[float]] = {COMPUTED: [], DEVICE: [], HOST: []}
    with bench.subject(sizes, adapter_bytes=0.0) as subject:
        reuse = subject.engine.runner.pool.reuse
        for number in range(bench.amounts.repetitions + 1):
            (prefix,) = prompts(rng, 1, PREFIX_TOKENS, vocab)
            for way, read in ((COMPUTED, (0, 0)), (DEVICE, (PREFIX_TOKENS, 0)), (HOST, (PREFIX_TOKENS, PREFIX_TOKENS))):
                if way is HOST:
                    _evict(bench, subject)
                (tail,) = prompts(rng, 1, TAIL_TOKENS, vocab)
                before = reuse.tokens, reuse.host_tokens
                (life,) = subject.play([Ask("", [*prefix, *tail], 2, f"round {number}")]).lives
                assert (reuse.tokens - before[0], reuse.host_tokens - before[1]) == read, way
                ttft_s[way] += [life.ttft_s] if number else []
        reporter, case = bench.on(subject), f"a prompt of {PREFIX_TOKENS} tokens and {TAIL_TOKENS}"
        ms = {way: median(seconds) * 1e3 for way, seconds in ttft_s.items()}
        for way, value in ms.items():
            yield reporter.line(case, f"first token, prefix {way}", value, "ms", baseline=ms[COMPUTED])
        metric, ratio = "first token, from host memory / computed", ms[HOST] / ms[COMPUTED]
        yield reporter.line(case, metric, ratio, "x", target="<= 0.25")


def _evict(bench: Bench, subject: Subject) -> None:
    """Play requests that leave few pages free, so that the prefix is copied out, then requests that take all pages."""
    tokens = subject.built.limits.total_pages // PREFIX_ROWS * PAGE_TOKENS
    for rows in (1, PREFIX_ROWS):
        made = prompts(bench.model.rng, rows, tokens - TAIL_TOKENS, bench.model.shape.vocab)
        subject.play([Ask("", prompt, TAIL_TOKENS) for prompt in made])

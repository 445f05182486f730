"""Decode attention over long contexts: KV in bf16 and in int4, all keys and the best tenth, on each instruction level.

One token of each row. The time of attention is a step's at that context less one's at a context of a page; its bound is
the KV bytes that it reads (of values those of the keys that are kept) at the read bandwidth. KV is that of a short
prompt, again and again, in pages that lie anywhere in a memory of all rows' contexts.
"""

import random
import time
from collections.abc import Iterator, Sequence

from weft_bench.cpu_context import Context
from weft_bench.cpu_engine import PAGE_TOKENS
from weft_kernels.cpu.errors import NativeUnavailable
from weft_kernels.cpu.library import load
from weft_kernels.cpu.threads import cpu_quota
from weft_runner.model import NativeKvMemory, open_checkpoint, read_spec
from weft_runner.model.cpu.executor import CpuExecutor
from weft_stage.cpu_models import base_model, files
from weft_stage.gpu_models import StepOf, step_of
from weft_stage.lines import Line

PROMPT_TOKENS = 512
# (kv_dtype, top_share); the first is the baseline.
KINDS = {
    "bf16 KV": ("auto", 0.0), "int4 KV": ("int4", 0.0), "bf16 KV, best tenth": ("auto", 0.1),
    "int4 KV, best tenth": ("int4", 0.1),
}  # fmt: skip


def kv_case(context: Context) -> Iterator[Line]:
    """Measure attention of decode steps by context, level and KV."""
    options, model = context.options, context.model
    rows, contexts = options.amounts.rows, options.amounts.kv_contexts
    try:
        levels = load().levels
    except NativeUnavailable as error:
        context.said(f"skipped: {model.name}, kv: {error}")
        return
    with context.bar(f"{model.name}: kv", len(levels) * len(KINDS)) as advanced:
        for level in levels:
            plain: dict[int, float] = {}
            for called, kind in KINDS.items():
                subject = _Attention(context, level, kind, rows, max(contexts))
                for tokens in contexts:
                    seconds = subject.seconds(tokens, options.amounts.repetitions)
                    n_bytes = subject.kv_bytes(tokens)
                    bound_s = n_bytes / context.machine.rates(n_bytes).bytes_per_s
                    case = f"{model.name}{options.label}, {rows} rows at {tokens:,} ({called}, {level})"
                    yield context.origin.line(
                        case, "attention", 1e3 * seconds, "ms", baseline=1e3 * bound_s, bound_fraction=bound_s / seconds
                    )
                    before = plain.setdefault(tokens, seconds)
                    if kind != ("auto", 0.0):
                        yield context.origin.line(case, "attention of all keys in bf16 / this", before / seconds, "x")
                advanced(1)


class _Attention:
    """An executor at one level whose pages are all written."""

    def __init__(self, context: Context, level: str, kind: tuple[str, float], rows: int, longest: int) -> None:
        found = files(base_model(context.options.folder, context.model.name, context.model.shape))
        spec, pages = read_spec(found["config.json"]), rows * (longest // PAGE_TOKENS)
        self._executor = CpuExecutor(
            load(level), open_checkpoint(found, spec), kv_dtype=kind[0], top_share=kind[1],
            threads=context.options.threads or cpu_quota(), pages=pages, page_tokens=PAGE_TOKENS, slots=1,
        )  # fmt: skip
        self._read = (1 + (kind[1] or 1)) / 2
        drawn = random.Random(context.options.seed)
        ids = drawn.sample(range(pages), pages)
        self._own = [ids[row::rows] for row in range(rows)]
        prompt = [drawn.randrange(spec.vocab_size) for _ in range(min(PROMPT_TOKENS, longest))]
        self._executor.run(step_of([StepOf(prompt, 0, self._own[0], None)], PAGE_TOKENS))
        _repeat(self._executor.kv_memory, self._own, len(prompt) // PAGE_TOKENS)

    def kv_bytes(self, tokens: int) -> float:
        """Return the bytes that attention reads in a step at this context."""
        return self._read * len(self._own) * tokens / PAGE_TOKENS * self._executor.page_bytes

    def seconds(self, tokens: int, repetitions: int) -> float:
        """Measure a step's attention at this context: the best of `repetitions` steps."""
        long, short = (min(self._step_s(n) for _ in range(repetitions)) for n in (tokens, PAGE_TOKENS))
        return long - short

    def _step_s(self, tokens: int) -> float:
        step = step_of([StepOf([1], tokens - 1, own, None) for own in self._own], PAGE_TOKENS)
        begun = time.perf_counter()
        self._executor.run(step)
        return time.perf_counter() - begun


def _repeat(memory: NativeKvMemory, own: Sequence[Sequence[int]], written: int) -> None:
    """Copy the first pages of the first row, as many as are written, to all others."""
    hosts = [memory.host_page() for _ in range(written)]
    memory.copy_out(own[0][:written], hosts, None)
    rest = [page for row in own for page in row]
    for begin in range(0, len(rest), written):
        pages = rest[begin : begin + written]
        memory.copy_in(pages, hosts[: len(pages)], None)

"""Decode attention over long contexts: KV in bf16 and in int4, on each instruction level that this machine has.

One token of each row. The time of attention is a step's at that context less one's at a context of a page; its bound is
the KV bytes of the context at the read bandwidth. KV is that of a short prompt, again and again, in pages that lie
anywhere in a memory of all rows' contexts.
"""

import random
import time
from collections.abc import Iterator, Sequence

from weft_bench.cpu_context import Context
from weft_bench.cpu_engine import PAGE_TOKENS
from weft_bench.cpu_models import base_model, files
from weft_bench.gpu_models import StepOf, step_of
from weft_bench.lines import Line
from weft_kernels.cpu.errors import NativeUnavailable
from weft_kernels.cpu.library import load
from weft_kernels.cpu.threads import cpu_quota
from weft_runner.model.checkpoint import open_checkpoint, read_spec
from weft_runner.model.cpu.executor import CpuExecutor
from weft_runner.model.kv_memory import NativeKvMemory

PROMPT_TOKENS = 512
KINDS = {"bf16": "auto", "int4": "int4"}


def kv_case(context: Context) -> Iterator[Line]:
    """Attention of decode steps by context, level and KV."""
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
            for called, kv_dtype in KINDS.items():
                subject = _Attention(context, level, kv_dtype, rows, max(contexts))
                for tokens in contexts:
                    seconds = subject.seconds(tokens, options.amounts.repetitions)
                    n_bytes = subject.kv_bytes(tokens)
                    bound_s = n_bytes / context.machine.rates(n_bytes).bytes_per_s
                    case = f"{model.name}{options.label}, {rows} rows at {tokens:,} ({called} KV, {level})"
                    yield context.origin.line(
                        case, "attention", 1e3 * seconds, "ms", baseline=1e3 * bound_s, bound_fraction=bound_s / seconds
                    )
                    before = plain.setdefault(tokens, seconds)
                    if called != "bf16":
                        yield context.origin.line(case, f"bf16 attention / {called} attention", before / seconds, "x")
                advanced(1)


class _Attention:
    """An executor at one level whose pages are all written."""

    def __init__(self, context: Context, level: str, kv_dtype: str, rows: int, longest: int) -> None:
        found = files(base_model(context.options.folder, context.model.name, context.model.shape))
        spec, pages = read_spec(found["config.json"]), rows * (longest // PAGE_TOKENS)
        self._executor = CpuExecutor(
            load(level), open_checkpoint(found, spec), kv_dtype=kv_dtype,
            threads=context.options.threads or cpu_quota(), pages=pages, page_tokens=PAGE_TOKENS, slots=1,
        )  # fmt: skip
        drawn = random.Random(context.options.seed)
        ids = drawn.sample(range(pages), pages)
        self._own = [ids[row::rows] for row in range(rows)]
        prompt = [drawn.randrange(spec.vocab_size) for _ in range(min(PROMPT_TOKENS, longest))]
        self._executor.run(step_of([StepOf(prompt, 0, self._own[0], None)], PAGE_TOKENS))
        _repeat(self._executor.kv_memory, self._own, len(prompt) // PAGE_TOKENS)

    def kv_bytes(self, tokens: int) -> float:
        """That attention reads in a step."""
        return len(self._own) * tokens / PAGE_TOKENS * self._executor.page_bytes

    def seconds(self, tokens: int, repetitions: int) -> float:
        """Of a step's attention at this context, by the best of so many steps."""
        long, short = (min(self._step_s(n) for _ in range(repetitions)) for n in (tokens, PAGE_TOKENS))
        return long - short

    def _step_s(self, tokens: int) -> float:
        step = step_of([StepOf([1], tokens - 1, own, None) for own in self._own], PAGE_TOKENS)
        begun = time.perf_counter()
        self._executor.run(step)
        return time.perf_counter() - begun


def _repeat(memory: NativeKvMemory, own: Sequence[Sequence[int]], written: int) -> None:
    """The first pages of the first row, as many as are written, to all others."""
    hosts = [memory.host_page() for _ in range(written)]
    memory.copy_out(own[0][:written], hosts, None)
    rest = [page for row in own for page in row]
    for begin in range(0, len(rest), written):
        pages = rest[begin : begin + written]
        memory.copy_in(pages, hosts[: len(pages)], None)

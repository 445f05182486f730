"""The cases of `weft bench cpu` that time steps: decode, prefill, retention, batch1, int8, int4, and the whole run."""

from collections.abc import Iterator
from statistics import median

from weft_bench.cpu_context import Context, Reporter
from weft_bench.cpu_decode import PROMPT_TOKENS, Batch, alternating, base, decode, load_all, paired, prefill_s, whole_s
from weft_bench.cpu_engine import Sizes
from weft_bench.cpu_shapes import BASE, DISTINCT, IDENTICAL, MIXED_RANKS, POPULARITIES, UNIFORM
from weft_bench.roofline import prefill_work, retention_bound
from weft_stage.lines import Line

RETAINED = (IDENTICAL, UNIFORM, DISTINCT)
PREFILL_ADAPTER = Batch(1, IDENTICAL)
WITHIN_10_PERCENT = "<= 1.1"


def decode_case(context: Context) -> Iterator[Line]:
    """Decode steps of every batch size and popularity, and of mixed ranks."""
    for rows in context.options.amounts.batches:
        kinds = [base(rows), *(Batch(rows, popularity) for popularity in POPULARITIES if rows > 1)]
        kinds.append(Batch(rows, DISTINCT, MIXED_RANKS) if rows > 1 else Batch(rows, IDENTICAL))
        reporter, steps = _decoded(context, kinds, "decode")
        for kind in kinds:
            yield from _decode_lines(reporter, kind, steps)


def retention_case(context: Context) -> Iterator[Line]:
    """What decoding with adapters keeps of its own base rate, beside the most it could keep."""
    rows = context.options.amounts.rows
    kinds = [base(rows), *(Batch(rows, popularity) for popularity in RETAINED)]
    reporter, steps = _decoded(context, kinds, "retention")
    base_s = median(steps[kinds[0]])
    for kind in kinds[1:]:
        adapters = kind.adapters_work(context.model.shape)
        rates = context.machine.rates(reporter.decode_work(kind, _context_tokens(context)).n_bytes)
        bound, kept = retention_bound(base_s, adapters, rates), paired(steps[kinds[0]], steps[kind])
        yield reporter.line(kind.name, "kept of the base's rate", kept, "share", baseline=bound)
        target = ">= 0.95" if context.model.name == "m135" and kind.rows == 16 else None
        yield reporter.line(kind.name, "kept of what the bound allows", kept / bound, "share", target=target)


def batch1_case(context: Context) -> Iterator[Line]:
    """One row: the base reads its weights at what share of the machine's bandwidth?"""
    kinds = [base(1), Batch(1, IDENTICAL)]
    reporter, steps = _decoded(context, kinds, "batch 1")
    for kind in kinds:
        work, step_s = reporter.decode_work(kind, _context_tokens(context)), median(steps[kind])
        share = work.n_bytes / step_s / context.machine.rates(work.n_bytes).bytes_per_s
        target = ">= 0.8" if context.model.name == "mid" and kind.popularity == BASE else None
        yield reporter.line(kind.name, "share of the read bandwidth", share, "share", target=target)


def prefill_case(context: Context) -> Iterator[Line]:
    """One prompt with and without an adapter."""
    lengths, model = context.options.amounts.prefills, context.model
    sizes = Sizes(rows=1, slots=1, context_tokens=max(lengths) + 1, batch_tokens=max(lengths), prefills=1)
    repetitions = context.options.amounts.repetitions
    with context.subject(sizes) as subject, context.bar(f"{model.name}: prefill", len(lengths)) as advanced:
        reporter = context.on(subject)
        load_all(model, subject, [PREFILL_ADAPTER])
        for length in lengths:
            kinds = [base(1), PREFILL_ADAPTER]
            runs = alternating(kinds, repetitions, lambda kind, n=length: prefill_s(model, subject, kind, n))
            yield from _prefill_lines(reporter, length, runs)
            advanced(1)


TARGETS = {("mid", "int8", 1): ">= 1.7", ("mid", "int4", 1): ">= 2.8", ("mid", "int4", 16): ">= 1.5"}


def narrow_case(context: Context, dtype: str) -> Iterator[Line]:
    """Weights of fewer bits (`dtype`: int8, int4) against bf16, alternating: one row, and rows with an adapter each."""
    tokens, model, amounts = context.options.amounts.tokens, context.model, context.options.amounts
    kinds = [base(1), Batch(amounts.rows, DISTINCT)]
    sizes = Sizes(rows=amounts.rows, slots=amounts.rows, context_tokens=PROMPT_TOKENS + tokens)
    with context.subject(sizes, "bf16") as bf16, context.subject(sizes, dtype) as narrow:
        reporter = context.on(narrow, dtype)
        if reporter.dtype != dtype:
            context.said(f"skipped: {model.name}, {dtype}: the reference executor computes in fp32")
            return
        subjects = {"bf16": bf16, dtype: narrow}
        for subject in subjects.values():
            load_all(model, subject, kinds)
        with context.bar(f"{model.name}: {dtype}", len(kinds)) as advanced:
            for kind in kinds:
                steps = alternating(
                    list(subjects),
                    amounts.repetitions,
                    lambda one, kind=kind: decode(model, subjects[one], kind, PROMPT_TOKENS, tokens).step_s,
                )
                advanced(1)
                work = reporter.decode_work(kind, _context_tokens(context))
                yield reporter.step(kind.name, "decode step", median(steps[dtype]), work)
                target = TARGETS.get((model.name, dtype, kind.rows))
                faster = paired(steps["bf16"], steps[dtype])
                yield reporter.line(kind.name, f"bf16 step / {dtype} step", faster, "x", target=target)


def whole_case(context: Context) -> Iterator[Line]:
    """16 prompts of 64 tokens, 64 tokens each, prefill included: as whoever asks sees it."""
    tokens, rows, model = context.options.amounts.tokens, context.options.amounts.rows, context.model
    kinds = [base(rows), *(Batch(rows, popularity) for popularity in RETAINED)]
    sizes = Sizes(rows=rows, slots=rows, context_tokens=PROMPT_TOKENS + tokens)
    with context.subject(sizes) as subject, context.bar(f"{model.name}: whole run", 1) as advanced:
        load_all(model, subject, kinds)
        runs = alternating(
            kinds,
            context.options.amounts.repetitions,
            lambda kind: whole_s(model, subject, kind, PROMPT_TOKENS, tokens),
        )
        advanced(1)
        for kind in kinds:
            rate = rows * tokens / median(runs[kind])
            base_rate = rows * tokens / median(runs[kinds[0]]) if kind is not kinds[0] else None
            yield context.on(subject).line(kind.name, "whole run", rate, "tokens/s", baseline=base_rate)


def _decoded(context: Context, kinds: list[Batch], label: str) -> tuple[Reporter, dict[Batch, list[float]]]:
    """Mean step seconds of each kind, in rounds."""
    tokens, rows = context.options.amounts.tokens, kinds[0].rows
    sizes = Sizes(rows=rows, slots=2 * rows, context_tokens=PROMPT_TOKENS + tokens, prefills=rows)
    adapter_bytes = sum(kind.adapters_work(context.model.shape).n_bytes for kind in kinds)
    rounds = (context.options.amounts.repetitions + 1) * len(kinds)
    with (
        context.subject(sizes, adapter_bytes=adapter_bytes) as subject,
        context.bar(f"{context.model.name}: {label}, batch {rows}", rounds) as advanced,
    ):

        def step_s(kind: Batch) -> float:
            advanced(1)
            return decode(context.model, subject, kind, PROMPT_TOKENS, tokens).step_s

        load_all(context.model, subject, kinds)
        return context.on(subject), alternating(kinds, context.options.amounts.repetitions, step_s)


def _decode_lines(reporter: Reporter, kind: Batch, steps: dict[Batch, list[float]]) -> Iterator[Line]:
    step_s, base_s = median(steps[kind]), median(steps[base(kind.rows)])
    yield reporter.step(kind.name, "decode step", step_s, reporter.decode_work(kind, _context_tokens(reporter.context)))
    own_base = None if kind.popularity == BASE else kind.rows / base_s
    yield reporter.line(kind.name, "decode", kind.rows / step_s, "tokens/s", baseline=own_base)


def _prefill_lines(reporter: Reporter, length: int, runs: dict[Batch, list[float]]) -> Iterator[Line]:
    shape, (plain, adapted) = reporter.context.model.shape, runs
    for kind, name in ((plain, "base"), (adapted, "one adapter")):
        work = prefill_work(shape, length, 1, reporter.weight_bytes) + kind.adapters_work(shape, length)
        yield reporter.step(f"prompt of {length}, {name}", "prefill", median(runs[kind]), work)
    target = WITHIN_10_PERCENT if length == 512 else None
    ratio = paired(runs[adapted], runs[plain])
    yield reporter.line(f"prompt of {length}", "one adapter / base", ratio, "x", target=target)


def _context_tokens(context: Context) -> float:
    """The mean context of the timed steps."""
    return PROMPT_TOKENS + context.options.amounts.tokens / 2

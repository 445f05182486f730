"""The CPU engine alone: steps of every batch and popularity, prompts, and whole runs, beside the machine's bounds."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

from weft_bench.cases import Cpu
from weft_bench.cpu_machine import Machine, meter
from weft_bench.cpu_shapes import BASE, DISTINCT, IDENTICAL, MIXED_RANKS, POPULARITIES, SHAPES, UNIFORM
from weft_bench.drive.cpu import Bench, Reporter
from weft_bench.drive.engine import (
    PROMPT_TOKENS,
    WEIGHT_BYTES,
    Batch,
    Model,
    Sizes,
    alternating,
    base,
    decode,
    load_all,
    paired,
    prefill_s,
)
from weft_bench.figures.cpu_adapters import loading, slots
from weft_bench.roofline import prefill_work, retention_bound
from weft_bench.run import Run
from weft_kernels.cpu.threads import cpu_quota
from weft_stage.cpu_models import cache_dir
from weft_stage.lines import Line

RETAINED = (IDENTICAL, UNIFORM, DISTINCT)
BRISK = ("tiny", "m135")  # the other shapes would take hours
ONLY = {"loading": BRISK, "slots": BRISK}  # shapes of a case
NARROW_TARGETS = {("mid", "int8", 1): ">= 1.7", ("mid", "int4", 1): ">= 2.8", ("mid", "int4", 16): ">= 1.5"}


def figures(options: Cpu, run: Run) -> Iterator[Line]:
    """Measure the machine, then every case of every shape."""
    machine = Machine.measured(meter(options.threads or cpu_quota()))
    yield from machine.lines(run.origin("safetensors"))
    for name in options.shapes:
        model = Model(name, SHAPES[name], options.models or cache_dir(), random.Random(options.seed))
        bench = Bench(options, run, model, machine)
        for case in options.cases:
            if name in ONLY.get(case, (name,)) or len(options.shapes) == 1:
                yield from CASES[case](bench)
            else:
                run.say(f"skipped: {name}, {case}: it runs for {' and '.join(ONLY[case])}, or for a single shape")


def decode_steps(bench: Bench) -> Iterator[Line]:
    """Measure decode steps of every batch size and popularity, and of mixed ranks."""
    for rows in bench.amounts.batches:
        kinds = [base(rows), *(Batch(rows, popularity) for popularity in POPULARITIES if rows > 1)]
        kinds.append(Batch(rows, DISTINCT, MIXED_RANKS) if rows > 1 else Batch(rows, IDENTICAL))
        reporter, steps = _decoded(bench, kinds, "decode")
        base_s = median(steps[kinds[0]])
        for kind in kinds:
            step_s, of_base = median(steps[kind]), None if kind.popularity == BASE else rows / base_s
            yield reporter.step(kind.name, "decode step", step_s, reporter.decode_work(kind))
            yield reporter.line(kind.name, "decode", rows / step_s, "tokens/s", baseline=of_base)


def retention(bench: Bench) -> Iterator[Line]:
    """Measure what decoding with adapters keeps of the base's rate, beside the most that it could keep."""
    rows = bench.amounts.rows
    kinds = [base(rows), *(Batch(rows, popularity) for popularity in RETAINED)]
    reporter, steps = _decoded(bench, kinds, "retention")
    base_s = median(steps[kinds[0]])
    for kind in kinds[1:]:
        rates = bench.machine.rates(reporter.decode_work(kind).n_bytes)
        bound = retention_bound(base_s, kind.adapters_work(bench.model.shape), rates)
        kept = paired(steps[kinds[0]], steps[kind])
        yield reporter.line(kind.name, "kept of the base's rate", kept, "share", baseline=bound)
        target = ">= 0.95" if bench.model.name == "m135" and rows == 16 else None
        yield reporter.line(kind.name, "kept of what the bound allows", kept / bound, "share", target=target)


def batch1(bench: Bench) -> Iterator[Line]:
    """Measure the share of the machine's bandwidth at which a step of one row reads."""
    kinds = [base(1), Batch(1, IDENTICAL)]
    reporter, steps = _decoded(bench, kinds, "batch 1")
    for kind in kinds:
        n_bytes = reporter.decode_work(kind).n_bytes
        share = n_bytes / median(steps[kind]) / bench.machine.rates(n_bytes).bytes_per_s
        target = ">= 0.8" if bench.model.name == "mid" and kind.popularity == BASE else None
        yield reporter.line(kind.name, "share of the read bandwidth", share, "share", target=target)


def prefill(bench: Bench) -> Iterator[Line]:
    """Measure one prompt with and without an adapter."""
    lengths, model = bench.amounts.prefills, bench.model
    plain, adapted = base(1), Batch(1, IDENTICAL)
    sizes = Sizes(rows=1, slots=1, context_tokens=max(lengths) + 1, batch_tokens=max(lengths), prefills=1)
    with bench.subject(sizes) as subject, bench.progress("prefill", len(lengths)) as advance:
        reporter = bench.on(subject)
        load_all(model, subject, [adapted])
        for length in lengths:
            runs = alternating(
                [plain, adapted], bench.amounts.repetitions, lambda kind, n=length: prefill_s(model, subject, kind, n)
            )
            case, weight_bytes = f"prompt of {length}", WEIGHT_BYTES[reporter.dtype]
            for kind, name in ((plain, "base"), (adapted, "one adapter")):
                work = prefill_work(model.shape, length, 1, weight_bytes) + kind.adapters_work(model.shape, length)
                yield reporter.step(f"{case}, {name}", "prefill", median(runs[kind]), work)
            target = "<= 1.1" if length == 512 else None
            yield reporter.line(case, "one adapter / base", paired(runs[adapted], runs[plain]), "x", target=target)
            advance(1)


def narrow(bench: Bench, dtype: str) -> Iterator[Line]:
    """Measure weights of fewer bits (`dtype`: int8, int4) against bf16, in turn, for one row and for distinct rows."""
    tokens, model, rows = bench.amounts.tokens, bench.model, bench.amounts.rows
    kinds = [base(1), Batch(rows, DISTINCT)]
    sizes = Sizes(rows=rows, slots=rows, context_tokens=PROMPT_TOKENS + tokens)
    with bench.subject(sizes, "bf16") as wide, bench.subject(sizes, dtype) as subject:
        reporter = bench.on(subject, dtype)
        if reporter.dtype != dtype:
            bench.run.say(f"skipped: {model.name}, {dtype}: the reference executor computes in fp32")
            return
        subjects = {"bf16": wide, dtype: subject}
        for each in subjects.values():
            load_all(model, each, kinds)
        for kind in kinds:
            steps = alternating(
                list(subjects), bench.amounts.repetitions,
                lambda name, kind=kind: decode(model, subjects[name], kind, tokens).step_s,
            )  # fmt: skip
            yield reporter.step(kind.name, "decode step", median(steps[dtype]), reporter.decode_work(kind))
            target = NARROW_TARGETS.get((model.name, dtype, kind.rows))
            faster = paired(steps["bf16"], steps[dtype])
            yield reporter.line(kind.name, f"bf16 step / {dtype} step", faster, "x", target=target)


def whole(bench: Bench) -> Iterator[Line]:
    """Measure the rate of a batch from its first prompt to its last token, prefill included."""
    tokens, rows, model = bench.amounts.tokens, bench.amounts.rows, bench.model
    kinds = [base(rows), *(Batch(rows, popularity) for popularity in RETAINED)]
    sizes = Sizes(rows=rows, slots=rows, context_tokens=PROMPT_TOKENS + tokens)
    with bench.subject(sizes) as subject:
        load_all(model, subject, kinds)
        runs = alternating(
            kinds, bench.amounts.repetitions,
            lambda kind: subject.play(model.asks(subject, kind, PROMPT_TOKENS, tokens)).wall_s,
        )  # fmt: skip
        rates = {kind: rows * tokens / median(seconds) for kind, seconds in runs.items()}
        for kind in kinds:
            of_base = None if kind.popularity == BASE else rates[kinds[0]]
            yield bench.on(subject).line(kind.name, "whole run", rates[kind], "tokens/s", baseline=of_base)


def _decoded(bench: Bench, kinds: Sequence[Batch], case: str) -> tuple[Reporter, dict[Batch, list[float]]]:
    """Return the mean step seconds of each kind, in rounds."""
    tokens, rows, repetitions = bench.amounts.tokens, kinds[0].rows, bench.amounts.repetitions
    sizes = Sizes(rows=rows, slots=2 * rows, context_tokens=PROMPT_TOKENS + tokens, prefills=rows)
    adapter_bytes = sum(kind.adapters_work(bench.model.shape).n_bytes for kind in kinds)
    with (
        bench.subject(sizes, adapter_bytes=adapter_bytes) as subject,
        bench.progress(f"{case}, batch {rows}", (repetitions + 1) * len(kinds)) as advance,
    ):

        def step_s(kind: Batch) -> float:
            advance(1)
            return decode(bench.model, subject, kind, tokens).step_s

        load_all(bench.model, subject, kinds)
        return bench.on(subject), alternating(kinds, repetitions, step_s)


CASES: dict[str, Callable[[Bench], Iterator[Line]]] = {
    "decode": decode_steps,
    "retention": retention,
    "batch1": batch1,
    "prefill": prefill,
    "whole": whole,
    "int8": partial(narrow, dtype="int8"),
    "int4": partial(narrow, dtype="int4"),
    "loading": loading,
    "slots": slots,
}

"""The engine on a GPU: kernels, steps, and requests through the engine, beside what the device was measured to give.

`make gpu-bench` measures, from a checkout, with a Python that has torch and Triton; `make gpu-check` first shows that
the results are right.

**Times** of decode steps and operators are those of CUDA events round replays of a captured graph, after a buffer of
more than twice the L2 was written and another read, so that caches hold nothing of the run and nothing that is still to
be written back; the median, and p99 of 100 runs. Steps with prompts, of which those of more than 1,024 tokens run
eagerly, are timed by the clock, until the device is done, beside how long the host launches for. Requests through the
engine, over HTTP, and those beside PEFT are by the clock, too. `kernels` are what CUPTI saw in one run: their sum, and
the costliest by name (with their launches).

**Right or wrong**: a whole model's logits beside transformers' in fp32, and how far transformers + PEFT in bf16 is from
those, with rope frequencies in fp32 as transformers has them.

**Bounds** (baseline of a time): bytes over the bandwidth that was measured here, the better of a copy (read + write)
and a plain read; for steps the larger of that and operations over a measured matrix product. Bytes: weights once, keys
and values of every context, each adapter of the step once at its true rank; of the operator alone also inputs once, and
outputs read and written. `beyond the launch floor` takes off what two dependent empty launches take in a graph; a
step's floor is what as many empty kernels take in a row.

**A model that does not fit** has the named GiB of the device for everything, the rest of its weights in pinned memory;
a pass is by the clock; its bound is the longer of the copied bytes at the rate of a copy alone and what it computes.

**Popularities** are Punica's: Identical (one adapter for all rows), Uniform (ceil(sqrt(rows)) of them), Skewed (each
1.5 times as popular as the next), Distinct (one a row); rank 16 on all seven projections. The adapter of every row is
compared with the one that was asked for: in the operator's chunk table (whose result is compared with plain matrices
before it is timed), in the step's plan, and, through the engine, in each step that ran.

**Models** have random weights in bf16, made on the device: 8B is Llama 3.1 8B's shape, 7B Llama 2 7B's. `added by
adapters` stands beside what the adapters' bytes add to the base's; `points` is the difference of the two. Many adapters
over few slots and text generation read each adapter from files in the page cache, pack it and copy it; a few files
stand for all.

Published by others: Punica on A100 (arXiv 2310.18547; tokens of prompt and output of 1,000 requests of a 7B, batch 32,
by a harness that decodes as one segment whatever the popularity; its operator by a wall clock round a sync), vLLM V0
on A100 (#11267, Llama 2 7B, ShareGPT, rank 8, requests/s with LoRA over those without), SGLang on H200 (35B MoE, one
adapter). Lines "under ncu" are one layer of a captured step, each kernel beside the time that the bytes which it read
take at the measured bandwidth (at the clocks that ncu sets). S3, Splitwise and FlexGen publish no figure of a model and
a GPU that are measured here: their mechanisms stand in `scheduling.md`, `phases.md` and `offload.md`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from weft_bench.cpu_shapes import BASE, DISTINCT, IDENTICAL, POPULARITIES
from weft_bench.gpu_amounts import PUNICA_TOKENS_S, SQUARE, STACKED, Amounts, Batch, punica_us
from weft_bench.lines import Line, newest, read
from weft_bench.render import page

DOCS = Path("docs/benchmarks")

BANDWIDTH, BEYOND_FLOOR = "of the bandwidth", "of the bandwidth, beyond the launch floor"
ADDED, BEYOND_BYTES = "added by adapters", "added beyond the bytes"
RATIO = "with adapters / base"
ERROR, ERROR_RATIO = "largest error of a row", "largest error of a row / transformers + PEFT's in bf16"
NO_CLIFF = "TTFT p50 / (warm TTFT p50 + one load p50)"
NO_CLIFF_99 = "TTFT without queueing p99 / (warm TTFT p99 + one load p99)"
OF_ENGINE = "of the engine alone"
ALL_TOKENS, KEPT = "prompt and output tokens", "kept of the base's rate"


class Wanted(NamedTuple):
    """A figure that answers one of a paper or an aim of ours. `target`: as lines have it."""

    case: str
    metric: str
    unit: str
    published: str = ""
    target: str | None = None


def wanted(amounts: Amounts) -> dict[str, list[Wanted]]:
    """Return the figures that are wanted, by the case of `make gpu-bench` that measures them."""
    operators, decode, crowds = list[Wanted](), list[Wanted](), list[Wanted]()
    for operator, batch in amounts.operators:
        if (published := punica_us(operator, batch)) is not None:
            operators.append(Wanted(operator.case(batch), "time p50", "us", f"Punica {published:g}"))
        for aimed, metric, target in OPERATOR_AIMS:
            if aimed == (operator, batch):
                operators.append(Wanted(operator.case(batch), metric, "share", target=target))
    for rows, context in amounts.decode:
        base = amounts.decode_name(Batch(rows, BASE), context)
        decode.append(Wanted(base, BANDWIDTH, "share", target=">= 0.85"))
        for kind in POPULARITIES:
            name = amounts.decode_name(Batch(rows, kind), context)
            decode.append(Wanted(name, BEYOND_BYTES, "points", target="<= 10"))
    prompts = [Wanted(amounts.prompt_name(amounts.prompts[0], 0), RATIO, "x", target="<= 1.05")]
    most = max(amounts.stream_counts)
    streams = [
        Wanted(amounts.streams_name(most, n), "output tokens, steady", "tokens/s", target=target)
        for n, target in zip(amounts.stream_adapters, (">= 13000", ">= 10500", ">= 9500"), strict=False)
    ]
    for count in amounts.stream_counts[1:2]:
        half_load = [amounts.streams_name(count, n) for n in amounts.stream_adapters]
        streams += [Wanted(name, "TTFT p50", "ms", target="<= 200") for name in half_load]
    for crowd in amounts.crowds:
        crowds += [Wanted(amounts.crowd_name(crowd), metric, "x", target="<= 1") for metric in (NO_CLIFF, NO_CLIFF_99)]
    published, target = f"Punica {PUNICA_TOKENS_S:,.0f}", f">= {PUNICA_TOKENS_S:g}"
    texts = [Wanted(amounts.text_name(kind), ALL_TOKENS, "tokens/s", published, target) for kind in POPULARITIES]
    texts.append(Wanted(amounts.text_name(IDENTICAL), KEPT, "share", "SGLang 0.83 to 0.89, vLLM V0 0.66"))
    return {
        "exact": [
            Wanted(f"{amounts.model}, {name}, beside fp32", ERROR_RATIO, "x", target="<= 1.5")
            for name in ("base", "adapter x", "adapter y", "adapter z")
        ],
        "steps": decode + prompts,
        "streams": streams,
        "stack": [
            Wanted(amounts.stack_name(most, n), OF_ENGINE, "share", target=">= 0.85")
            for n in (0, amounts.stack_adapters)
        ],
        "operator": operators,
        "slots": crowds,
        "textgen": texts,
        "peft": [
            Wanted(amounts.peer_name(kind), "whole run", "tokens/s", "PEFT, measured beside it")
            for kind in (BASE, IDENTICAL, DISTINCT)
        ],
    }


OPERATOR_AIMS = (
    ((SQUARE, Batch(64, DISTINCT)), BEYOND_FLOOR, ">= 0.6"),
    ((STACKED, Batch(256, DISTINCT)), BANDWIDTH, ">= 0.75"),
)
WANTED = [each for case in wanted(Amounts()).values() for each in case]
TARGETS = {(each.case, each.metric): each.target for each in WANTED if each.target is not None}


def raw_path(docs: Path) -> Path:
    return docs / "raw" / "gpu.jsonl"


def write_page(docs: Path) -> Path:
    """Write the page of what the raw file has, which may be nothing."""
    lines = read(raw_path(docs)) if raw_path(docs).exists() else []
    path = docs / "gpu.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page("gpu", f"{(__doc__ or '').strip()}\n\n{answers(lines)}", lines), encoding="utf-8")
    return path


def answers(lines: Iterable[Line]) -> str:
    """Render a row for each figure that is wanted, with the newest that was measured, on whichever machine."""
    found = {(line.case, line.metric): line for line in newest(lines) if line.value is not None}
    rows = ["| case | figure | published | aim | here |", "|---|---|---|---|---|"]
    for case, metric, unit, published, target in WANTED:
        line = found.get((case, metric))
        here = "not measured" if line is None else f"{line.value:.4g} {unit} ({line.machine})"
        rows.append(f"| {case} | {metric} [{unit}] | {published} | {target or ''} | {here} |")
    return "\n".join(rows)

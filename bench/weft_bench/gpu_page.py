"""The engine on a GPU: kernels, steps, and requests through the engine, beside what the device was measured to give.

`make gpu-bench` measures, from a checkout, with a Python that has torch and Triton; `make gpu-check` first shows that
the results are right. Where there is no GPU yet, every row is `not measured`.

**Times** are those of CUDA events round replays of a captured graph (prompts: round eager steps, which the engine does
not capture), after a buffer of more than twice the L2 was written and another read, so that caches hold nothing of the
run and nothing that is still to be written back; the median, and p99 of 100 runs or p90 of 20. Times of requests
through the engine, and those beside PEFT, are by the clock, as whoever asks sees them.

**Bounds** (baseline of a time): bytes over the bandwidth that was measured here, the better of a copy (read + write)
and a plain read; for steps the larger of that and operations over a measured matrix product. Bytes: weights once, keys
and values of every context, each adapter of the step once at its true rank; of the operator alone also inputs once, and
outputs read and written. `beyond the launch floor` takes off what two dependent empty launches take in a graph. A
step's floor is what as many empty kernels take in a row.

**Popularities** are Punica's: Identical (one adapter for all rows), Uniform (ceil(sqrt(rows)) of them), Skewed (each
1.5 times as popular as the next), Distinct (one a row). Rank 16 on all seven projections unless it says otherwise. The
adapter of every row is compared with the one that was asked for: in the chunk table of the operator (whose result is
compared with plain matrices before it is timed), in the step's plan, and, through the engine, in each step that ran.

**Models** have random weights, made on the device: 8B is Llama 3.1 8B's shape, 7B Llama 2 7B's, in bf16. `added by
adapters` stands beside what the adapters' bytes add to the base's; `points` is the difference of the two. Many adapters
over few slots and text generation read each adapter from files in the page cache, pack it and copy it; a few files
stand for all.

**int4** is the same model with the base's matrices in groups of 64 (`--dtype int4`), by kernels of ours: steps to be
read beside those of bf16, with bounds of 4.5 bits a weight.

**FlashInfer** stands beside our attention where `flashinfer-python` is installed: its kernels for prompts, which are
what `--attention flashinfer` uses, over the same pages, planned before the clock starts.

Published, not measured here: Punica on A100, 1,044 tokens/s (prompt and output; 7B, 1,000 requests, batch 32, the same
for all popularities, by a harness that decodes as one segment whatever they are), its operator 37 to 116 us by a wall
clock round a sync; SGLang keeps 83 to 89 % of its decode rate with one adapter (H200, 35B MoE).
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from weft_bench.gpu_plan import CASES, Plan
from weft_bench.lines import Line, read
from weft_bench.render import page

NAME = "gpu"
NOWHERE = "Not measured yet"
COMMAND = "make gpu-bench"


def raw_path(docs: Path) -> Path:
    return docs / "raw" / f"{NAME}.jsonl"


def write_page(docs: Path) -> Path:
    """The page of the raw lines there, with what nobody has measured so far."""
    raw, path = raw_path(docs), docs / f"{NAME}.md"
    lines = read(raw) if raw.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(NAME, __doc__ or "", [*lines, *unmeasured(Plan(), lines)]), encoding="utf-8")
    return path


def unmeasured(plan: Plan, lines: Iterable[Line]) -> list[Line]:
    """Rows of the plan that no line is about: on no machine."""
    told, day = {(line.case, line.metric) for line in lines}, datetime.now(UTC).isoformat(timespec="seconds")
    return [
        Line(
            row.case, row.metric, None, row.unit, target=row.target, command=COMMAND, machine=NOWHERE,
            versions="no GPU was there", date=day,
        )
        for case in CASES
        for row in plan.rows(case)
        if (row.case, row.metric) not in told
    ]  # fmt: skip

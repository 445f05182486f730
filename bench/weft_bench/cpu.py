"""`weft bench cpu`: the CPU engine alone, without wire and gateway, beside what this machine allows.

Random seeded Llamas (tiny: 4 layers of 256; small: 8 of 1024; m135: 30 of 576, 49,152 tokens; mid: 16 of 2048) with
PEFT adapters of rank 16 on all seven projections. Popularities are Punica's: Identical (one adapter for all rows),
Uniform (ceil(sqrt(rows)) of them), Skewed (each 1.5 times as popular as the next), Distinct (one a row). The adapter
of every row of every step is taken from the engine's books and compared with the one that was asked for, after the
clock has stopped.

A time stands beside its bound (baseline): the larger of bytes / read bandwidth and operations / peak, both measured
here with all the cores that the process may use, the bandwidth by reading a working set of the step's size again and
again (so that a small model's bound is its cache's). `of bound` is the share of it that is reached; a share above 1
means that the bandwidth was measured in a slower moment. `kept of the base's rate` stands beside base_ms / (base_ms +
adapter bytes / bandwidth + adapter FLOPs / peak). Decode steps are those in which every row decodes: prompts of 64
tokens, 64 tokens each. Rounds alternate the kinds; a figure is the median over the rounds, a ratio the median of the
rounds' ratios. Many adapters over few slots and text generation are single runs. Adapters are read from files that
the page cache holds: what a disk takes is not in these figures.

operator and layer are Punica's figures (section 7.1). The operator is y += scale (x A) B of one projection, a token a
row; the layer a decode step with adapters on all seven projections, every row with a full context of its own. The
baselines are torch's: a loop over adapters, and each row's adapter copied for one batched product (Gather-BMM), in bf16
and in fp32, of which the faster counts. 512 MB are read before each run: weights come from memory, as in a model.

masks are those of structured outputs: each row with a JSON schema, beside steps of the same rows without.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from weft_bench.cpu_cases import batch1_case, decode_case, narrow_case, prefill_case, retention_case, whole_case
from weft_bench.cpu_context import Bar, Context, Options
from weft_bench.cpu_decode import Model
from weft_bench.cpu_kv import kv_case
from weft_bench.cpu_layer import layer_case
from weft_bench.cpu_loading import loading_case
from weft_bench.cpu_machine import Machine, meter
from weft_bench.cpu_masks import masks_case
from weft_bench.cpu_operator import operator_case
from weft_bench.cpu_priority import priority_case
from weft_bench.cpu_shapes import SHAPES
from weft_bench.cpu_slots import slots_case
from weft_bench.cpu_swap import swap_case
from weft_bench.cpu_textgen import textgen_case
from weft_kernels.cpu.threads import cpu_quota
from weft_stage.lines import Line, Origin

CASES: dict[str, Callable[[Context], Iterator[Line]]] = {
    "decode": decode_case,
    "retention": retention_case,
    "batch1": batch1_case,
    "prefill": prefill_case,
    "whole": whole_case,
    "int8": partial(narrow_case, dtype="int8"),
    "int4": partial(narrow_case, dtype="int4"),
    "kv": kv_case,
    "loading": loading_case,
    "slots": slots_case,
    "swap": swap_case,
    "priority": priority_case,
    "textgen": textgen_case,
    "masks": masks_case,
    "operator": operator_case,
    "layer": layer_case,
}
BRISK = ("tiny", "m135")  # the other shapes would take hours
SERVING: dict[str, tuple[str, ...]] = {
    "kv": BRISK,
    "loading": BRISK,
    "slots": BRISK,
    "swap": BRISK,
    "priority": BRISK,
    "textgen": BRISK,
    "masks": BRISK,
    "operator": ("mid",),  # whatever the shape: once
    "layer": ("m135", "mid"),
}


def figures(
    options: Options, shapes: Sequence[str], cases: Sequence[str], origin: Origin, bar: Bar, said: Callable[[str], None]
) -> Iterator[Line]:
    """The machine's own figures, then every case of every shape."""
    machine = Machine.measured(meter(options.threads or cpu_quota()))
    yield from machine.lines(origin)
    for name in shapes:
        model = Model(name, SHAPES[name], options.folder, random.Random(options.seed))
        context = Context(options, model, origin, machine, bar, said)
        for case in cases:
            if name in SERVING.get(case, (name,)) or len(shapes) == 1:
                yield from CASES[case](context)
            else:
                said(f"skipped: {name}, {case}: it runs for {' and '.join(SERVING[case])}, or for one shape alone")

"""`weft bench offload`: a model larger than its memory, whose weights come from disk while layers compute (FlexGen).

**Cells.** A cell is a share of the weights' bytes that the engine has memory for, ring included (KV, adapters and what
steps work on come beside it), and a number of requests, all there at the start: prompts of 512 tokens, 32 tokens each.
The bound of a cell is the sum over its passes of the longer of two times: the bytes that do not stay, at the mean of
the rates at which this disk was read alone just before and just after the cell, past the page cache, and the pass's
work in memory: the weights' bytes at the measured bandwidth or the FLOPs of its tokens at the measured peak (of the
base; attention and adapters are left out). 100 % is the same engine with nothing on disk.

**Peers.** Each engine runs alone in a memory control group, page cache included, of a share of the weights' bytes and
512 MiB for interpreter and libraries; its files are not cached before. accelerate keeps what fits of the layers in
memory and reads the others from the checkpoint, adapters are PEFT's (`adapter_names`); llama.cpp maps its file (F16
beside bf16), and runs rows of different adapters one after the other, so that one row at a time is its best there. Each
has its best of several batches, a whole run of which counts, prompts included.

**Policies.** `plan`: what the search chooses for a budget (a share of the weights' bytes for everything), its block as
it ran beside the prediction, which rests on constants measured just before. `grid`: that policy among many others of
the search's grid, 32 + 8 tokens, 40 % of the weights; the best are measured again in turn. `schedule`: 32 sequences
through device batches of 4: row by row (each batch through all layers before the next), column by column (all of them
through each layer), zig-zag blocks between the two, and the same blocks with nothing read ahead; the baseline is the
program's own prediction. `ranks`: one pipeline rank with memory for 40 % of the weights beside two with as much each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from weft_bench import offload_cells, offload_peers, offload_plans, offload_ranks
from weft_bench.cpu_machine import Machine, meter
from weft_bench.offload_model import Bar, Context, OffloadModel, Options
from weft_stage.lines import Line, Origin

CASES: dict[str, Callable[[OffloadModel, Context], Iterator[Line]]] = {
    "cells": offload_cells.figures,
    "peers": offload_peers.figures,
    "plan": offload_plans.plan_figures,
    "grid": offload_plans.grid_figures,
    "schedule": offload_plans.schedule_figures,
    "ranks": offload_ranks.figures,
}


def figures(
    options: Options, cases: Sequence[str], shapes: Sequence[str], origin: Origin, bar: Bar,
    said: Callable[[str], None],
) -> Iterator[Line]:  # fmt: skip
    """The cases of every shape. Raises EngineRefused, WrongAdapter, NoGroup, PeerFailed."""
    machine = Machine.measured(meter(options.quota))
    yield from machine.lines(origin)
    context = Context(replace(origin, versions=f"{origin.versions}, seed {options.seed}"), bar, said)
    for name in shapes:
        model = OffloadModel(options, name, machine)
        for case in cases:
            yield from CASES[case](model, context)

"""Decode steps and a prompt of the same model with int4 weights, whose bytes bound a step of few rows.

A step's bytes are those of `gpu_decode` with 4.5 bits a weight; its time stands in the page beside that of bf16.
"""

import time

from weft_bench.cpu_shapes import ranks_of
from weft_bench.gpu_amounts import Batch
from weft_bench.gpu_context import Context
from weft_bench.gpu_decode import A_BATCH_S, Loaded, RowOf, assert_finite
from weft_bench.gpu_plan import BANDWIDTH, FEW_PERCENT, STARTED, int4_batches, int4_name, int4_prefill_name
from weft_bench.gpu_timing import MANY
from weft_bench.roofline import INT4_BYTES, adapter_work, decode_work, prefill_work
from weft_kernels.triton import int4


def measure(context: Context) -> None:
    """The batches of the plan at its shortest context, then the prompt."""
    amounts, started = context.amounts, time.perf_counter()
    length = amounts.contexts[0]
    loaded = Loaded.of(
        context.gpu, context.shape, amounts.most_rows, max(length + 1, amounts.prompt), graphs=True, pack=int4.pack
    )
    context.tell(f"{context.plan.shape} int4 decode", STARTED, time.perf_counter() - started)
    for batch in int4_batches(amounts):
        context.needs(A_BATCH_S, int4_name(context.plan, batch))
        _measure_batch(context, loaded, batch, length)
    context.needs(A_BATCH_S, int4_prefill_name(context.plan))
    _measure_prompt(context, loaded)


def _measure_batch(context: Context, loaded: Loaded, batch: Batch, length: int) -> None:
    step, name = loaded.decode(batch, length), int4_name(context.plan, batch)
    assert_finite(loaded, loaded.executor.run(step).clone())
    times = context.timer.eager(lambda: loaded.executor.run(step), runs=MANY)
    work = decode_work(context.shape, batch.rows, length, INT4_BYTES)
    work += adapter_work(context.shape, *ranks_of(batch.adapters, batch.ranks))
    context.tell_times(name, "step", times, bound_s=work.bound_s(context.machine.rates))
    context.tell(name, BANDWIDTH, work.n_bytes / times.median / context.machine.bytes_s)


def _measure_prompt(context: Context, loaded: Loaded) -> None:
    step = loaded.step([RowOf(context.amounts.prompt, 0, None)])
    times = context.timer.eager(lambda: loaded.executor.run(step))
    bound_s = prefill_work(context.shape, context.amounts.prompt, 1, INT4_BYTES).bound_s(context.machine.rates)
    context.tell_times(int4_prefill_name(context.plan), "base", times, FEW_PERCENT, bound_s=bound_s)

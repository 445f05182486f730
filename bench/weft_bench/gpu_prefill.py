"""A prompt with and without an adapter, and a prompt beside decode rows: eager steps, as the engine runs them."""

from collections.abc import Sequence

from weft_bench.gpu_context import Context
from weft_bench.gpu_decode import Loaded, RowOf
from weft_bench.gpu_page import RATIO
from weft_bench.gpu_timing import FEW_PERCENT
from weft_bench.roofline import prefill_work
from weft_runner.model.step import StepInput


def measure(context: Context) -> None:
    """The prompt alone, then beside decode rows of a different adapter each."""
    amounts = context.amounts
    rows = amounts.beside + 1
    loaded = Loaded.of(context.gpu, amounts.shape, rows, amounts.prompt, graphs=False)
    bound_s = prefill_work(amounts.shape, amounts.prompt).bound_s(context.machine.rates)
    _measure(context, loaded, amounts.prefill_name, 0, bound_s)
    _measure(context, loaded, amounts.mixed_name, amounts.beside, None)


def _measure(context: Context, loaded: Loaded, name: str, beside: int, bound_s: float | None) -> None:
    steps = {adapted: _step(loaded, context.amounts.prompt, beside, adapted=adapted) for adapted in (False, True)}
    times = {
        adapted: context.timer.eager(lambda step=step: loaded.executor.run(step)) for adapted, step in steps.items()
    }
    context.report_times(name, "base", "ms", times[False], FEW_PERCENT, bound_s=bound_s)
    context.report_times(name, "with adapters", "ms", times[True], FEW_PERCENT)
    context.report(name, RATIO, times[True].median / times[False].median, "x")
    context.report(name, "the LoRA part", (times[True].median - times[False].median) * 1e3, "ms")


def _step(loaded: Loaded, prompt: int, beside: int, *, adapted: bool) -> StepInput:
    """A prompt from its start, then rows in decode, each with an adapter of its own, or all of the base."""
    slots: Sequence[int | None] = range(beside + 1) if adapted else [None] * (beside + 1)
    return loaded.step([RowOf(prompt, 0, slots[0]), *(RowOf(1, prompt // 2, slot) for slot in slots[1:])])

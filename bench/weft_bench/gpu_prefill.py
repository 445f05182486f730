"""A prompt with and without an adapter, and a prompt beside decode rows: eager steps, as the engine runs them."""

from collections.abc import Sequence

from weft_bench.gpu_context import Context
from weft_bench.gpu_decode import Loaded, RowOf
from weft_bench.gpu_plan import ADAPTED, FEW_PERCENT, LORA_PART, RATIO, mixed_name, prefill_name
from weft_bench.roofline import prefill_work
from weft_runner.model.step import StepInput

A_CASE_S = 10.0


def measure(context: Context) -> None:
    """The prompt alone, then beside decode rows of a different adapter each."""
    amounts = context.amounts
    context.needs(2 * A_CASE_S, "weights and two cases")
    rows = amounts.beside + 1
    loaded = Loaded.of(context.gpu, context.shape, rows, amounts.prompt, graphs=False)
    bound_s = prefill_work(context.shape, amounts.prompt).bound_s(context.machine.rates)
    _measure(context, loaded, prefill_name(context.plan), 0, bound_s)
    _measure(context, loaded, mixed_name(context.plan), amounts.beside, None)


def _measure(context: Context, loaded: Loaded, name: str, beside: int, bound_s: float | None) -> None:
    context.needs(A_CASE_S, name)
    steps = {adapted: _step(loaded, context.amounts.prompt, beside, adapted=adapted) for adapted in (False, True)}
    times = {
        adapted: context.timer.eager(lambda step=step: loaded.executor.run(step)) for adapted, step in steps.items()
    }
    context.tell_times(name, "base", times[False], FEW_PERCENT, bound_s=bound_s)
    context.tell_times(name, ADAPTED, times[True], FEW_PERCENT)
    context.tell(name, RATIO, times[True].median / times[False].median)
    context.tell(name, LORA_PART, (times[True].median - times[False].median) * 1e3)


def _step(loaded: Loaded, prompt: int, beside: int, *, adapted: bool) -> StepInput:
    """A prompt from its start, then rows in decode, each with an adapter of its own, or all of the base."""
    slots: Sequence[int | None] = range(beside + 1) if adapted else [None] * (beside + 1)
    return loaded.step([RowOf(prompt, 0, slots[0]), *(RowOf(1, prompt // 2, slot) for slot in slots[1:])])

"""Which figures `gpu-bench` is after: their names, units and aims, before anything is measured. Pure.

A case may tell figures of its plan alone (`Plan.row` refuses others). So a page can show what was not measured, and a
case that breaks off leaves no row unmentioned. Aims are those of the project's goals for a GPU, each beside its row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from weft_bench.cpu_shapes import BASE, DISTINCT, IDENTICAL, SKEWED, UNIFORM
from weft_bench.gpu_amounts import (
    PUNICA_TOKENS_S,
    SQUARE,
    USUAL,
    USUAL_TEXT,
    Amounts,
    Batch,
    Operator,
    attention_cases,
    decode_batches,
    has_baselines,
    is_raw,
    operator_batches,
    punica_us,
)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure to come."""

    case: str
    metric: str
    unit: str
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """All rows to come. `shape` is the model of most cases, `text_shape` that of text generation."""

    amounts: Amounts = field(default_factory=Amounts)
    shape: str = USUAL
    text_shape: str = USUAL_TEXT

    def rows(self, case: str) -> list[Row]:
        """Of one case, in the order in which they are shown."""
        return list(CASES[case](self))

    def row(self, case: str, name: str, metric: str) -> Row:
        """The planned row of that name. Raises KeyError: no case tells what it did not announce."""
        for row in self.rows(case):
            if (row.case, row.metric) == (name, metric):
                return row
        raise KeyError(f"{case} has no row {name!r}, {metric!r}")

    def aim(self, target: str) -> str | None:
        """Aims are about one shape."""
        return target if self.shape == USUAL else None


# ---- the LoRA operator


BANDWIDTH, BEYOND_FLOOR = "of the bandwidth", "of the bandwidth, beyond the launch floor"
LOOP, GATHER, PUNICA = "a loop over adapters / ours", "gather and batched product / ours", "Punica on A100 / ours"


def _operator(plan: Plan) -> Iterator[Row]:
    for operator in plan.amounts.operators:
        for batch in operator_batches(operator, plan.amounts):
            yield from _operator_rows(operator, batch)


def _operator_rows(operator: Operator, batch: Batch) -> Iterator[Row]:
    case = operator.case(batch)
    yield from _times(case, "time", "us")
    if is_raw(operator, batch):
        yield Row(case, BANDWIDTH, "share", ">= 0.75")
    aimed = operator == SQUARE and batch == Batch(64, DISTINCT)
    yield Row(case, BEYOND_FLOOR, "share", ">= 0.6" if aimed else None)
    if has_baselines(batch):
        yield Row(case, LOOP, "x")
        yield Row(case, GATHER, "x")
    if punica_us(operator, batch) is not None:
        yield Row(case, PUNICA, "x")


# ---- attention


def attention_name(rows: int, context: int, group: int) -> str:
    return f"attention, {rows} rows, context {context}, GQA {group}"


def _attention(plan: Plan) -> Iterator[Row]:
    for case in (attention_name(*found) for found in attention_cases(plan.amounts)):
        yield from _times(case, "time", "us")
        yield Row(case, "keys and values", "GB/s")


LIBRARY, LIBRARY_RATIO = "FlashInfer p50", "FlashInfer / ours"


def prompt_name(plan: Plan, group: int) -> str:
    return f"attention, a prompt of {plan.amounts.prompt} tokens, GQA {group}"


def _flashinfer(plan: Plan) -> Iterator[Row]:
    prompts = [prompt_name(plan, group) for group in plan.amounts.groups]
    for case in (*(attention_name(*found) for found in attention_cases(plan.amounts)), *prompts):
        if case in prompts:
            yield Row(case, "time p50", "us")
        yield Row(case, LIBRARY, "us")
        yield Row(case, LIBRARY_RATIO, "x")


# ---- decode and prefill


def decode_name(plan: Plan, batch: Batch, context: int) -> str:
    return f"{plan.shape} decode, batch {batch.rows}, context {context}, {batch.popularity}"


AIMED_ROWS = 32
FLOOR, STARTED = "launch floor: as many empty kernels", "weights and graphs made"
ADDED, BEYOND_BYTES = "added by adapters", "added beyond the bytes"


def _decode(plan: Plan) -> Iterator[Row]:
    amounts = plan.amounts
    yield Row(f"{plan.shape} decode", STARTED, "s")
    yield Row(f"{plan.shape} decode, base", FLOOR, "ms")
    yield Row(f"{plan.shape} decode, adapters", FLOOR, "ms")
    for context in amounts.contexts:
        for rows in amounts.batches:
            for batch in decode_batches(rows):
                yield from _decode_rows(plan, decode_name(plan, batch, context), batch)


def _decode_rows(plan: Plan, case: str, batch: Batch) -> Iterator[Row]:
    aimed = batch.rows == AIMED_ROWS
    yield from _times(case, "step", "ms")
    if batch.popularity == BASE:
        yield Row(case, BANDWIDTH, "share", plan.aim(">= 0.85") if aimed else None)
    else:
        yield Row(case, ADDED, "%")
        yield Row(case, BEYOND_BYTES, "points", plan.aim("<= 10") if aimed else None)


def int4_name(plan: Plan, batch: Batch) -> str:
    return f"{plan.shape} int4 decode, batch {batch.rows}, context {plan.amounts.contexts[0]}, {batch.popularity}"


def int4_prefill_name(plan: Plan) -> str:
    return f"{plan.shape} int4 prefill of {plan.amounts.prompt} tokens"


def int4_batches(amounts: Amounts) -> list[Batch]:
    """The base by rows; an adapter a row at the most."""
    return [*(Batch(rows, BASE) for rows in amounts.batches), Batch(amounts.most_rows, DISTINCT)]


def _int4(plan: Plan) -> Iterator[Row]:
    yield Row(f"{plan.shape} int4 decode", STARTED, "s")
    for batch in int4_batches(plan.amounts):
        case = int4_name(plan, batch)
        yield from _times(case, "step", "ms")
        yield Row(case, BANDWIDTH, "share")
    yield from _times(int4_prefill_name(plan), "base", "ms", FEW_PERCENT)


def prefill_name(plan: Plan) -> str:
    return f"{plan.shape} prefill of {plan.amounts.prompt} tokens"


def mixed_name(plan: Plan) -> str:
    return f"{plan.shape} step of {plan.amounts.prompt} prompt tokens and {plan.amounts.beside} rows"


FEW_PERCENT = 90  # of what runs some twenty times
ADAPTED, RATIO, LORA_PART = "with adapters", "with adapters / base", "the LoRA part"


def _prefill(plan: Plan) -> Iterator[Row]:
    for case, target in ((prefill_name(plan), plan.aim("<= 1.05")), (mixed_name(plan), None)):
        yield from _times(case, "base", "ms", FEW_PERCENT)
        yield from _times(case, ADAPTED, "ms", FEW_PERCENT)
        yield Row(case, RATIO, "x", target)
        yield Row(case, LORA_PART, "ms")


# ---- through the engine


def crowd_name(plan: Plan, crowd: int) -> str:
    return f"{plan.shape}, {crowd} adapters over {plan.amounts.slots} slots, popularity 1/i"


def warm_name(plan: Plan, crowd: int) -> str:
    return f"{plan.shape}, {plan.amounts.slots} adapters over {plan.amounts.slots} slots, beside {crowd}"


TTFT, QUEUE, LOAD, REST = "TTFT", "TTFT: queueing for slot and loader", "TTFT: load", "TTFT: prefill and batch"
NO_CLIFF = "TTFT p50 / (warm TTFT p50 + one load p50)"
NO_CLIFF_99 = "TTFT without queueing p99 / (warm TTFT p99 + one load p99)"


def _slots(plan: Plan) -> Iterator[Row]:
    for crowd in plan.amounts.crowds:
        yield from (Row(warm_name(plan, crowd), f"{TTFT} p{percent}", "ms") for percent in (50, 99))
        case = crowd_name(plan, crowd)
        yield Row(case, "hit rate", "share")
        yield Row(case, "adapters loaded", "")
        yield Row(case, "one load p50", "ms")
        for metric in (TTFT, QUEUE, LOAD, REST):
            yield from (Row(case, f"{metric} p{percent}", "ms") for percent in (50, 99))
        yield Row(case, NO_CLIFF, "x", plan.aim("<= 1"))
        yield Row(case, NO_CLIFF_99, "x", plan.aim("<= 1"))


def text_name(plan: Plan, popularity: str) -> str:
    return f"{plan.text_shape}, text generation, {plan.amounts.texts} requests, {popularity}"


OUTPUT, ALL_TOKENS, KEPT = "output tokens", "prompt and output tokens", "kept of the base's rate"
TEXT_ORDER = (BASE, DISTINCT, IDENTICAL, UNIFORM, SKEWED)  # what is told first is there when time runs out


def _textgen(plan: Plan) -> Iterator[Row]:
    for popularity in TEXT_ORDER:
        case = text_name(plan, popularity)
        yield Row(case, OUTPUT, "tokens/s")
        aimed = popularity != BASE and plan.text_shape == USUAL_TEXT
        yield Row(case, ALL_TOKENS, "tokens/s", f">= {PUNICA_TOKENS_S:g}" if aimed else None)
        yield from (Row(case, metric, "") for metric in ("rows of a step", "adapters of a step", "adapters loaded"))
        yield Row(case, "TTFT p99, from a place in the batch", "ms")
        if popularity != BASE:
            yield Row(case, KEPT, "share")


def peer_name(plan: Plan, popularity: str) -> str:
    return f"{plan.shape}, {plan.amounts.peer_rows} rows beside transformers + PEFT (baseline), {popularity}"


PEER_KINDS = (BASE, IDENTICAL, DISTINCT)


def _peft(plan: Plan) -> Iterator[Row]:
    for popularity in PEER_KINDS:
        case = peer_name(plan, popularity)
        yield Row(case, "prefill", "ms")
        yield Row(case, "decode step", "ms")
        yield Row(case, "whole run", "tokens/s")


def _times(case: str, what: str, unit: str, percent: int = 99) -> Iterator[Row]:
    """The median, and how far it goes up."""
    yield Row(case, f"{what} p50", unit)
    yield Row(case, f"{what} p{percent}", unit)


# What matters most comes first: a run ends when its time does.
CASES: dict[str, Callable[[Plan], Iterator[Row]]] = {
    "decode": _decode,
    "operator": _operator,
    "prefill": _prefill,
    "attention": _attention,
    "slots": _slots,
    "textgen": _textgen,
    "peft": _peft,
    "flashinfer": _flashinfer,
    "int4": _int4,
}

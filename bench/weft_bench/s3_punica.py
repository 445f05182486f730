"""Punica's text generation, simulated

1,000 requests that are all there at the start, 32 at a time, first come first served, each popularity of Punica's
section 7: Distinct (an adapter a request), Uniform, Skewed, Identical. Adapters of rank 16 on all projections are
loaded on demand (2 ms over PCIe 4). Step times are a roofline as for the paper's settings, and for 7B also those that
Punica states (11 ms for one sequence, 13 ms for 32 short ones, 34 ms for 32 of 2,048 tokens). Lengths are those of
ShareGPT, scaled to 101 tokens an answer as in Punica and to 223 a prompt. Baselines are Punica's tokens/s. The live
counterpart is `weft bench cpu --cases textgen`.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from weft_bench.cpu_shapes import POPULARITIES, RANK, adapter_of_row
from weft_bench.data import rows
from weft_bench.roofline import lora_bytes
from weft_bench.s3 import Context
from weft_bench.s3_hardware import LLAMA2_70B, LLAMA_7B, LLAMA_13B, PAGE_TOKENS, Machine
from weft_sim.executor_model import StepTimes
from weft_sim.simulate import PoolDescription, simulate
from weft_sim.traces import TraceArrival
from weft_stage.lines import Line
from weft_stage.shapes import Shape

REQUESTS, QUICK_REQUESTS = 1_000, 100
BATCH = 32
PROMPT_TOKENS, OUTPUT_TOKENS = 223, 101  # means
LOAD_MS = 2.0
STATED_7B = StepTimes(11 - 2 / 31, 2 / 31, 0.0, (34 - 13) / (BATCH * (2_048 - 512)))


@dataclass(frozen=True, slots=True)
class Setting:
    """`paper`: Punica's tokens/s; `times`: other ones than the machine's roofline."""

    name: str
    machine: Machine
    paper: float
    times: StepTimes | None = None


def _machine(machine: Machine, shape: Shape) -> Machine:
    return replace(machine, lora_bytes=lora_bytes(shape, RANK))


A100_7B = _machine(Machine(LLAMA_7B), Shape(4_096, 32, 32, 32, 11_008, 32_000))
SETTINGS = (
    Setting("7B", A100_7B, 1_044.0),
    Setting(
        "7B, Punica's step times", A100_7B, 1_044.0,
        replace(STATED_7B, prompt_token_ms=A100_7B.times.prompt_token_ms, adapter_ms=A100_7B.times.adapter_ms),
    ),
    Setting("13B", _machine(Machine(LLAMA_13B), Shape(5_120, 40, 40, 40, 13_824, 32_000)), 693.0),
    Setting("70B, 8 GPUs", _machine(Machine(LLAMA2_70B, tensor=8), Shape(8_192, 80, 64, 8, 28_672, 32_000)), 443.5),
)  # fmt: skip


def run(context: Context) -> Iterator[Line]:
    """Every setting under every popularity."""
    chance = random.Random(context.seed)
    found = [
        (int(row["num_prefill_tokens"]), int(row["num_decode_tokens"]))
        for row in rows(context.file("sharegpt_8k_lengths.csv.gz"))
    ]
    drawn = chance.sample(found, QUICK_REQUESTS if context.quick else REQUESTS)
    prompt, output = (sum(each) / len(drawn) for each in zip(*drawn, strict=True))
    lengths = [
        (max(1, round(p * PROMPT_TOKENS / prompt)), max(1, round(o * OUTPUT_TOKENS / output))) for p, o in drawn
    ]  # fmt: skip
    cells = list[tuple[Setting, str, list[TraceArrival]]]()
    for setting in SETTINGS:
        for popularity in POPULARITIES:
            numbers = adapter_of_row(popularity, len(lengths))
            chance.shuffle(numbers)
            pairs = zip(lengths, numbers, strict=True)
            arrivals = [TraceArrival(0.0, p, o, number or 0) for (p, o), number in pairs]
            cells.append((setting, popularity, arrivals))
    with ProcessPoolExecutor(context.jobs) as pool, context.bar("punica", len(cells)) as advanced:
        for (setting, popularity, _), rate in zip(cells, pool.map(rate_of, cells), strict=True):
            case = f"punica, A100, {setting.name}, {popularity}"
            yield context.origin.line(case, "output tokens", rate, "tokens/s", baseline=setting.paper)
            advanced(1)


def rate_of(cell: tuple[Setting, str, list[TraceArrival]]) -> float:
    """Tokens a second, the thin batches at the end included."""
    setting, _, arrivals = cell
    machine = setting.machine
    pool = PoolDescription(
        page_tokens=PAGE_TOKENS, total_pages=machine.kv_pages, max_sequences=BATCH, best_batch=BATCH,
        max_batch_tokens=2_048, adapters=len(arrivals), slots=2 * BATCH, rank=RANK, load_ms=LOAD_MS, cpu=False,
    )  # fmt: skip
    deployment = machine.deployment(pool)
    if setting.times is not None:
        runners = tuple(replace(plan, times=setting.times) for plan in deployment.runners)
        deployment = replace(deployment, runners=runners)
    return simulate(pool, arrivals, deployment=deployment).figures.tokens_per_s

"""`weft bench offload --cases plan,grid,schedule`: policies as the search finds them, and as they run."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from weft_bench.cpu_decode import Batch
from weft_bench.cpu_engine import PAGE_TOKENS
from weft_bench.cpu_machine import GIGA
from weft_bench.cpu_shapes import BASE, RANK
from weft_bench.offload_model import MIN_BOUND_SHARE, Context, OffloadModel, executor_of
from weft_runner.errors import NoPolicyFits
from weft_runner.model import read_spec
from weft_runner.model.cpu.machine_rates import measure_rates
from weft_runner.model.tiers.budget import formats_of
from weft_runner.offload import (
    PASSES,
    BlockWork,
    Budgets,
    Case,
    MachineRates,
    OffloadPlan,
    PolicySearch,
    Supports,
    cases,
    plan_from,
    round_case,
    solve_ranks,
)
from weft_stage.lines import Line
from weft_stage.playing import Played

DEVICE_BATCH_TOKENS = 512
MAX_BLOCK = 32
MAX_ERROR = 0.15
GRID_SHARE, GRID_PROMPT, GRID_TOKENS, GRID_BLOCK = 0.4, 32, 8, 64
GRID_AGAIN, GRID_BEST = 3, 10  # rounds in which the best are measured again, in turn, and how many these are
MIN_BEST_SHARE = 0.95
SCHEDULE_SEQUENCES, SCHEDULE_BATCH, SCHEDULE_TOKENS = 32, 4, 8


@dataclass(frozen=True, slots=True)
class Ran:
    """A plan as it ran: its sequences, and how fast weights came from the disk."""

    played: Played
    disk: float  # bytes a second, while at least one read was under way; 0: nothing was read
    kv_bytes: int  # read from the disk

    @property
    def tokens_per_s(self) -> float:
        return self.played.tokens / self.played.wall_s

    @property
    def decode_s(self) -> float:
        """The mean pass without prompts."""
        found = [beat.ended - beat.began for beat in self.played.beats if not beat.prefills]
        return sum(found) / max(1, len(found))


# ---- the chosen policy and its prediction


def plan_figures(model: OffloadModel, context: Context) -> Iterator[Line]:
    """Find the policy for each budget, and run its block. Raises EngineRefused, WrongAdapter."""
    weights = search_of(model, rates_of(model), 1, BASE).sizes.weights
    for share in model.options.shares:
        for popularity in model.options.popularities:
            search = search_of(model, rates_of(model), int(share * weights), popularity)
            case = f"{model.title}, a budget of {share:.0%} of the weights, {popularity}, chosen policy{model.lengths}"
            try:
                plan = solve_ranks({0: search})[0]
            except NoPolicyFits as error:
                context.said(f"{case}: {error}")
                continue
            with context.bar(case, 1) as advanced:
                ran = run_plan(model, plan, plan.policy.block, popularity)
                advanced(1)
            yield from _plan_lines(model, context, case, search, plan, ran)


def _plan_lines(
    model: OffloadModel, context: Context, case: str, search: PolicySearch, plan: OffloadPlan, ran: Ran
) -> Iterator[Line]:  # fmt: skip
    line, predicted, wall_s, usual = context.origin.line, plan.predicted, ran.played.wall_s, model.options.usual
    assumed = search.machine.disk_read
    passes = ran.played.beats
    read_bytes = plan.policy.weights.disk * search.sizes.weights * len(passes) + ran.kv_bytes
    bound_s = sum(model.bound_s(beat.tokens, beat.rows, read_bytes / len(passes) / assumed) for beat in passes)
    yield line(case, "sequences of a block", plan.policy.block, "")
    yield line(case, "weights on the disk", plan.policy.weights.disk, "")
    yield line(case, "KV on the disk", plan.policy.kv.disk, "")
    yield line(case, "output tokens", ran.tokens_per_s, "tokens/s", baseline=predicted.tokens_per_s)
    off = abs(wall_s / predicted.block_s - 1)
    yield line(case, "off its prediction", off, "", target=f"<= {MAX_ERROR}" if usual else None)
    yield line(case, "of the bound", bound_s / wall_s, "", target=f">= {MIN_BOUND_SHARE}" if usual else None)
    prompts_s = wall_s - ran.decode_s * (model.options.tokens - 1)
    yield line(case, "prompts", prompts_s * 1e3, "ms", baseline=predicted.prompt.pass_s * 1e3)
    yield line(case, "pass without prompts", ran.decode_s * 1e3, "ms", baseline=predicted.token.pass_s * 1e3)
    if ran.disk:
        yield line(case, "disk read while computing", ran.disk / GIGA, "GB/s", baseline=assumed / GIGA)


# ---- a grid of policies


def grid_figures(model: OffloadModel, context: Context) -> Iterator[Line]:
    """Run the chosen policy among many others, on short prompts and answers. Raises EngineRefused, NoPolicyFits."""
    options = replace(model.options, prompt_tokens=GRID_PROMPT, tokens=GRID_TOKENS, usual=False)
    model = OffloadModel(options, model.name, model.machine)
    rates = rates_of(model)
    device_bytes = int(GRID_SHARE * search_of(model, rates, 1, BASE).sizes.weights)
    search = search_of(model, rates, device_bytes, BASE, GRID_BLOCK)
    chosen, others = solve_ranks({0: search})[0], grid(search, options.grid, random.Random(options.seed))
    plans = {name_of(plan): plan for plan in (*others, chosen)}
    rate = dict[str, list[float]]()
    with context.bar(f"{model.name}: {len(plans)} policies", len(plans)) as advanced:
        for name, plan in plans.items():
            rate[name] = [run_plan(model, plan, plan.policy.block, BASE).tokens_per_s]
            advanced(1)
    best = sorted(rate, key=lambda name: -rate[name][0])[:GRID_BEST]
    again = list(dict.fromkeys([*best, name_of(chosen)]))
    with context.bar(f"{model.name}: the best of them again", GRID_AGAIN * len(again)) as advanced:
        for _ in range(GRID_AGAIN):
            for name in again:
                rate[name].append(run_plan(model, plans[name], plans[name].policy.block, BASE).tokens_per_s)
                advanced(1)
    yield from grid_lines(model, context, plans, rate, name_of(chosen), again)


def grid_lines(
    model: OffloadModel, context: Context, plans: Mapping[str, OffloadPlan], rate: Mapping[str, Sequence[float]],
    chosen: str, again: Sequence[str],
) -> Iterator[Line]:  # fmt: skip
    """Yield a grid's figures. `rate`: tokens/s by policy, first of all of them, then of those in `again` alone."""
    case = f"{model.title}, a grid of policies, {GRID_SHARE:.0%} of the weights{model.lengths}"
    line, middle = context.origin.line, {name: median(rate[name][1:]) for name in again}
    order = sorted(again, key=lambda name: -middle[name])
    yield line(case, "policies", len(plans), "")
    target = f">= {MIN_BEST_SHARE}" if len(plans) >= model.options.grid else None
    yield line(case, "chosen, of the best", middle[chosen] / middle[order[0]], "", target=target)
    place = 1 + sum(found[0] > rate[chosen][0] for found in rate.values())
    yield line(case, "chosen, its place", place, "")
    pairs = [(plans[name].predicted.tokens_per_s, found[0]) for name, found in rate.items()]
    yield line(case, "order of predictions and of measurements, correlation", rank_correlation(pairs), "")
    for number, name in enumerate(order, 1):
        mark = " (chosen)" if name == chosen else ""
        metric = f"{number}: {name}{mark}"
        yield line(case, metric, middle[name], "tokens/s", baseline=plans[name].predicted.tokens_per_s)


def grid(search: PolicySearch, count: int, rng: random.Random) -> list[OffloadPlan]:
    """Return `count` policies of the search's own grid that run differently, each rounded as well as it can be."""
    found = dict[str, OffloadPlan]()
    every = list(cases(search))
    rng.shuffle(every)
    for case in every:
        if len(found) == count:
            break
        if (rounded := round_case(case, search.tiers, search.supports)) is not None:
            plan = plan_from(case, search.tiers, rounded, rounded.prediction.block_s)
            found.setdefault(name_of(plan), plan)
    return list(found.values())


def name_of(plan: OffloadPlan) -> str:
    """Name a plan by what the executor does differently from other plans."""
    ahead = "" if plan.buffers > 1 else ", nothing read ahead"
    kv = f", {plan.policy.kv.disk:.0%} of KV on the disk" if plan.policy.kv.disk else ""
    return (
        f"block {plan.policy.block}, {plan.batch_tokens} tokens a device batch, prompts in {plan.prompt_passes}, "
        f"{plan.policy.weights.device:.0%} of the weights stay{kv}{ahead}"
    )


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Spearman's rank correlation, without ties."""
    n = len(pairs)
    places = [{i: place for place, i in enumerate(sorted(range(n), key=lambda i: pairs[i][at]))} for at in (0, 1)]
    apart = sum((places[0][i] - places[1][i]) ** 2 for i in range(n))
    return 1 - 6 * apart / (n * (n * n - 1)) if n > 1 else 1.0


# ---- schedules


def schedule_figures(model: OffloadModel, context: Context) -> Iterator[Line]:
    """Run zig-zag blocks beside row by row, column by column, and nothing read ahead. Raises EngineRefused."""
    options = replace(model.options, tokens=min(model.options.tokens, SCHEDULE_TOKENS), usual=False)
    model = OffloadModel(options, model.name, model.machine)
    rates = rates_of(model)
    weights = search_of(model, rates, 1, BASE).sizes.weights
    for share in options.shares:
        search = search_of(model, rates, int(share * weights), BASE)
        plans, tokens = schedules(search), dict[str, float]()
        case = f"{model.title}, a budget of {share:.0%} of the weights, {SCHEDULE_SEQUENCES} sequences{model.lengths}"
        with context.bar(case, len(plans)) as advanced:
            for name, plan in plans.items():
                if plan is not None:
                    tokens[name] = run_plan(model, plan, SCHEDULE_SEQUENCES, BASE).tokens_per_s
                advanced(1)
        for name, plan in plans.items():
            predicted = None if plan is None else plan.predicted.tokens_per_s
            yield context.origin.line(case, name, tokens.get(name), "tokens/s", baseline=predicted)
        zigzag = plans[ZIGZAG]
        for name, plan in plans.items():
            if zigzag is None or plan is None or name == ZIGZAG or plan == zigzag:
                continue
            said = zigzag.predicted.tokens_per_s / plan.predicted.tokens_per_s
            target = ">= 1" if said > 1 else None
            ratio = tokens[ZIGZAG] / tokens[name]
            yield context.origin.line(case, f"{ZIGZAG} against {name}", ratio, "x", baseline=said, target=target)


ZIGZAG, ROWS_FIRST, COLUMNS_FIRST, SERIAL = "zig-zag", "row by row", "column by column", "zig-zag, one after the other"


def schedules(search: PolicySearch) -> dict[str, OffloadPlan | None]:
    """Return the plans of the schedules in the same memory, with the same device batch; None: does not fit.

    Row by row: a device batch passes all layers before the next one does. Column by column: all sequences pass each
    layer. Zig-zag: the best block between the two. One after the other: the same block, and nothing is read ahead.
    """
    most, batch = SCHEDULE_SEQUENCES, SCHEDULE_BATCH
    blocks = [block for block in range(batch, most + 1, batch) if most % block == 0]
    found = [plan for block in blocks if (plan := fastest(search, block, batch)) is not None]
    zigzag = max(found, key=lambda plan: plan.predicted.tokens_per_s, default=None)
    serial = None if zigzag is None else fastest(search, zigzag.policy.block, batch, buffers=1)
    return {
        ZIGZAG: zigzag, ROWS_FIRST: fastest(search, batch, batch), COLUMNS_FIRST: fastest(search, most, batch),
        SERIAL: serial,
    }  # fmt: skip


def fastest(search: PolicySearch, block: int, batch: int, buffers: int = 2) -> OffloadPlan | None:
    """Return the fastest plan over the passes in which prompts may be computed; None where nothing fits."""
    best: OffloadPlan | None = None
    for passes in (passes for passes in PASSES if block % passes == 0):
        case = Case(
            search.sizes, search.machine, search.formats, search.work, block, batch, passes=passes, buffers=buffers
        )  # fmt: skip
        rounded = round_case(case, search.tiers, search.supports)
        if rounded is not None and (best is None or rounded.prediction.block_s < best.predicted.block_s):
            best = plan_from(case, search.tiers, rounded, rounded.prediction.block_s)
    return best


# ---- what all of them do


def rates_of(model: OffloadModel) -> MachineRates:
    """Measure this machine now, for some seconds."""
    spec = read_spec(model.base / "config.json")
    formats = formats_of(model.options.dtype, "auto")
    return measure_rates(model.packed, spec, [formats.weights], formats.kv, model.options.quota)


def search_of(
    model: OffloadModel, rates: MachineRates, device_bytes: int, popularity: str, most_block: int = MAX_BLOCK
) -> PolicySearch:  # fmt: skip
    """Return the search as it is asked: all that a runner may take is `device_bytes`."""
    options = model.options
    adapters = {"adapters": most_block, "adapter_rank": RANK} if popularity != BASE else {}
    work = BlockWork(
        options.prompt_tokens, options.tokens, batch_tokens=DEVICE_BATCH_TOKENS, page_tokens=PAGE_TOKENS, **adapters
    )  # fmt: skip
    spec = read_spec(model.base / "config.json")
    formats = formats_of(options.dtype, "auto")
    return PolicySearch(spec, rates, Budgets(max(1, device_bytes)), formats, work, Supports(), most_block)


def run_plan(model: OffloadModel, plan: OffloadPlan, sequences: int, popularity: str) -> Ran:
    """Run `sequences` sequences in blocks, after a short run."""
    options, block = model.options, plan.policy.block
    batch = Batch(block, popularity)
    with TemporaryDirectory(prefix="weft-plan-") as folder:
        path = Path(folder, "plan.json")
        path.write_text(json.dumps(asdict(plan)))
        # the plan says what stays: the budget is checked by its own account alone
        offload = replace(model.offload(2 * plan.budgets.device_bytes), plan=path)
        sizes = model.sizes(batch, offload)
        prompts = -(-block // plan.prompt_passes) * options.prompt_tokens
        with model.subject(replace(sizes, batch_tokens=prompts + block)) as subject:
            executor = executor_of(subject)
            model.play(subject, batch, warm=True)
            before, kv = replace(executor.figures.stream), executor.figures.kv.read_bytes
            played = model.play(subject, Batch(sequences, popularity), streams=block)
            after = executor.figures
    reading_s = after.stream.reading_s - before.reading_s
    read_bytes = after.stream.read_bytes - before.read_bytes
    return Ran(played, read_bytes / reading_s if reading_s else 0.0, after.kv.read_bytes - kv)

"""`weft plan offload`: the policy of an offload pool, what it should reach, and what would help most."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weft.api.template import amount
from weft.domain.model.config import ModelSpec, parse_model_config
from weft.domain.model.errors import Refused
from weft.domain.model.packed import int4_kv_group
from weft.domain.strict_json import JsonError, parse_object
from weft_cli.errors import BadInput, CommandError
from weft_cli.output import table
from weft_runner.errors import MachineInvalid, NoPolicyFits, OffloadError, RunnerError
from weft_runner.offload.costs import BlockWork
from weft_runner.offload.machine import MachineRates, machine_json, machine_of
from weft_runner.offload.plan import OffloadPlan, PassTime, plan_json
from weft_runner.offload.policy import MOST_BYTES, Budgets, Formats, MemoryTier, WeightsFormat
from weft_runner.offload.rounding import Supports
from weft_runner.offload.search import BLOCKS, PolicySearch
from weft_runner.offload.serving import MOST_BATCH_TOKENS, serving_limits
from weft_runner.offload.wire import solve

MACHINE_BYTES = 1 << 20
BATCH_TOKENS = 256  # of a device batch: the runner's --offload-batch-tokens
WIDTH = 40  # of a bar
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Change:
    """What would be different, and tokens a second with it; 0 where no policy fits."""

    what: str
    tokens_per_s: float


def search_of(manifest: Mapping[str, Any], model: str | None, rates: MachineRates, work: BlockWork) -> PolicySearch:
    """What a pool asks for. Raises BadInput."""
    asked = offload_of(manifest)
    scheduler = manifest["spec"].get("scheduler") or {}
    lora = manifest["spec"].get("lora") or {}
    cache = manifest["spec"].get("kvCache") or {}
    work = replace(
        work,
        batch_tokens=BATCH_TOKENS,
        page_tokens=cache.get("pageTokens", 16),
        pages=cache.get("pages", 0),
        adapter_rank=work.adapter_rank or lora.get("maxRank", 64),
    )
    budgets = Budgets(
        *(int(amount(asked[name])) if name in asked else default for name, default in
          (("deviceBytes", 0), ("hostBytes", 0), ("diskBytes", MOST_BYTES)))
    )  # fmt: skip
    sparse = asked.get("sparseAttention", "Off") == "TopK"
    formats = Formats(asked.get("weights", "bf16"), asked.get("kv", "bf16"), sparse_attention=sparse)
    spec = model_spec(manifest, model)
    if formats.weights not in rates.products:
        known = ", ".join(rates.products)
        raise BadInput(f"the machine's products have no {formats.weights}, but {known}", "measure it: --measure")
    return PolicySearch(
        spec, rates, budgets, formats, work, Supports(), scheduler.get("maxSequences", BLOCKS[-1]),
        most_tokens=scheduler.get("maxBatchTokens", MOST_BATCH_TOKENS),
    )  # fmt: skip


def offload_of(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """`spec.offload` of a pool that offloads. Raises BadInput."""
    asked = manifest["spec"].get("offload") or {}
    if asked.get("mode", "Off") != "Auto":
        raise BadInput("the pool does not offload", "spec.offload: {mode: Auto, deviceBytes: 4Gi, diskPath: /PATH}")
    return asked


def model_spec(manifest: Mapping[str, Any], model: str | None) -> ModelSpec:
    """Of `--model` (a config.json or its folder), or of the pool's own where that is a folder here. Raises BadInput."""
    uri = str(manifest["spec"]["model"]["uri"])
    path = Path(model) if model is not None else Path(uri.removeprefix("file:"))
    path = path / "config.json" if path.is_dir() else path
    try:
        return parse_model_config(path.read_bytes())
    except OSError as error:
        raise BadInput(f"no config.json of the model: {error}", "--model PATH of it or of its folder") from error
    except Refused as error:
        raise BadInput(f"{path}: {error}") from error


def read_rates(path: Path) -> MachineRates:
    """Raises BadInput."""
    try:
        return machine_of(parse_object(path.read_bytes(), max_bytes=MACHINE_BYTES))
    except (OSError, JsonError, MachineInvalid) as error:
        raise BadInput(f"--machine {path}: {error}", "--measure writes one with --save") from error


def measured_rates(manifest: Mapping[str, Any], model: str | None) -> MachineRates:
    """On this machine, at the pool's diskPath. Raises CommandError."""
    from weft_kernels.cpu.errors import NativeUnavailable
    from weft_runner.model.cpu.machine_rates import measure_rates

    asked, spec = offload_of(manifest), model_spec(manifest, model)
    others: tuple[WeightsFormat, ...] = ("bf16", "int4")
    formats = list[WeightsFormat](dict.fromkeys((asked.get("weights", "bf16"), *others)))
    try:
        return measure_rates(Path(asked["diskPath"]), spec, formats, asked.get("kv", "bf16"))
    except (RunnerError, NativeUnavailable) as error:
        raise CommandError(f"this machine was not measured: {error}") from error


def write_rates(rates: MachineRates, path: Path) -> None:
    """For `--machine`."""
    path.write_text(json.dumps(machine_json(rates), indent=1) + "\n", encoding="utf-8")


def find(search: PolicySearch) -> OffloadPlan:
    """Raises CommandError."""
    try:
        return solve(search)
    except NoPolicyFits as error:
        raise CommandError(f"no policy fits: {error}") from error
    except OffloadError as error:
        raise CommandError(str(error)) from error


def changes(search: PolicySearch) -> list[Change]:
    """Each alone, the best first."""
    budgets, rates, formats = search.budgets, search.machine, search.formats
    half = replace(budgets, device_bytes=budgets.device_bytes * 3 // 2)
    faster = replace(rates, disk_read=2 * rates.disk_read, disk_write=2 * rates.disk_write)
    tried = {
        "half as much device memory more": replace(search, budgets=half),
        "a disk twice as fast": replace(search, machine=faster),
        "twice the compute": replace(search, machine=_twice(rates)),
        "twice the sequences at a time": replace(search, most_block=2 * search.most_block),
    }
    if formats.kv != "int4" and int4_kv_group(search.spec.head_dim):
        tried["int4 KV"] = replace(search, formats=replace(formats, kv="int4"))
    if formats.weights != "int4" and "int4" in rates.products:
        tried["int4 weights"] = replace(search, formats=replace(formats, weights="int4"))
    found = [Change(what, _rate(changed)) for what, changed in tried.items()]
    return sorted(found, key=lambda change: -change.tokens_per_s)


def _twice(rates: MachineRates) -> MachineRates:
    products = {name: tuple((rows, s / 2) for rows, s in table) for name, table in rates.products.items()}
    flops = 2 * rates.attention_flops_per_s
    return replace(rates, products=products, attention=2 * rates.attention, attention_flops_per_s=flops)


def _rate(search: PolicySearch) -> float:
    try:
        return solve(search).predicted.tokens_per_s
    except NoPolicyFits:
        return 0.0


def pool_settings(search: PolicySearch, plan: OffloadPlan) -> dict[str, dict[str, int]]:
    """What the pool has to say so that its runners do this: blocks are sequences, and adapters are in KV pages too."""
    limits = serving_limits({0: (search, plan)})
    return {
        "kvCache": {"pages": limits.pages, "pageTokens": search.work.page_tokens},
        "scheduler": {"maxSequences": limits.sequences, "maxBatchTokens": limits.batch_tokens},
    }


def report(search: PolicySearch, plan: OffloadPlan, helping: list[Change]) -> list[str]:
    """Lines for people."""
    policy, predicted, work = plan.policy, plan.predicted, search.work
    weights = search.sizes.weights
    shares = [
        (name, *(f"{share:.0%}" for share in (of.device, of.host, of.disk)))
        for name, of in (("weights", policy.weights), ("activations", policy.activations), ("KV", policy.kv))
    ]
    disk_s = predicted.prompt.disk_read_s + (work.output - 1) * predicted.token.disk_read_s
    bound = "disk" if disk_s >= predicted.bound_s * (1 - 1e-9) else "compute"
    return [
        f"{_gib(weights)} of weights ({plan.formats.weights}), {_gib(plan.budgets.device_bytes)} of device memory",
        f"a block of {policy.block} sequences in device batches of {policy.batch}, prompts in {_passes(plan)}",
        "",
        *table(("SHARES", "DEVICE", "HOST", "DISK"), shares),
        "",
        *table(
            ("MEMORY", "WEIGHTS", "RING", "KV", "ACTIVATIONS", "ADAPTERS", "WORKSPACE", "ALL", "BUDGET"), _used(plan)
        ),
        "",
        *_bars(f"prompts, {work.prompt} tokens each", predicted.prompt),
        *_bars("a pass without prompts", predicted.token),
        "",
        f"a block of {work.prompt} + {work.output} tokens each: {_time(predicted.block_s)}, "
        f"{predicted.tokens_per_s:.3g} tokens/s",
        f"the linear program's bound: {_time(plan.relaxed_s)}; the {bound}'s alone: {_time(predicted.bound_s)} "
        f"({predicted.bound_s / predicted.block_s:.0%} reached)",
        f"one request alone: a token each {_time(predicted.token_1_s)}",
        *_sparse(search, plan),
        "",
        "for the pool's spec:",
        *(f"  {name}: {_flow(values)}" for name, values in pool_settings(search, plan).items()),
        "",
        *table(("WHAT WOULD HELP", "TOKENS/S", "GAIN"), [_helps(one, predicted.tokens_per_s) for one in helping]),
    ]


def as_json(search: PolicySearch, plan: OffloadPlan, helping: list[Change]) -> dict[str, Any]:
    """Everything that the report is made of."""
    return {
        "plan": plan_json(plan),
        "machine": machine_json(search.machine),
        "work": asdict(search.work),
        "weightsBytes": search.sizes.weights,
        "pool": pool_settings(search, plan),
        "helps": [asdict(one) for one in helping],
    }


def _sparse(search: PolicySearch, plan: OffloadPlan) -> list[str]:
    """Where it is asked for and does not pay."""
    machine = search.machine
    if not search.formats.sparse_attention or plan.formats.sparse_attention:
        return []
    if not machine.sparse_attention:
        return ["sparse attention is off: it was not measured on this machine (--measure)"]
    times = machine.attention / machine.sparse_attention
    return [f"sparse attention is off: it takes {times:.2f} times as long as attention to all keys"]


def _used(plan: OffloadPlan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for tier in MemoryTier:
        used, budget = plan.usage[tier], plan.budgets.of(tier)
        if used.total or tier is MemoryTier.DEVICE:
            parts = (used.weights, used.ring, used.kv, used.activations, used.adapters, used.workspace, used.total)
            most = "-" if budget >= MOST_BYTES else _gib(budget)
            rows.append((str(tier), *(_gib(size) if size else "-" for size in parts), most))
    return rows


def _bars(what: str, time: PassTime) -> list[str]:
    """A bar for each stream, as long as its part of the pass."""
    lines = [f"{what}: {_time(time.pass_s)}"]
    for name, seconds in time.streams.items():
        if seconds > 0:
            bar = "█" * max(1, round(WIDTH * seconds / time.pass_s))
            lines.append(f"  {name:<15}{bar:<{WIDTH}}  {_time(seconds)}")
    return lines


def _helps(one: Change, now: float) -> tuple[str, str, str]:
    if not one.tokens_per_s:
        return one.what, "-", "does not fit"
    return one.what, f"{one.tokens_per_s:.3g}", f"{one.tokens_per_s / now - 1:+.0%}"


def _flow(values: Mapping[str, int]) -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in values.items()) + "}"


def _passes(plan: OffloadPlan) -> str:
    return "one pass" if plan.prompt_passes == 1 else f"{plan.prompt_passes} passes"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.1f} MiB"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"

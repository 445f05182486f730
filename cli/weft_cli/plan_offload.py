"""The command `weft plan offload`: the policy of an offload pool's runners, and what would help most."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from weft.api.servingpool import PAGE_TOKENS
from weft.api.template import GPU, amount
from weft.domain.model.config import parse_model_config
from weft.domain.model.errors import Refused
from weft.domain.model.packed import int4_kv_group
from weft.domain.model.spec import ModelSpec
from weft.domain.strict_json import JsonError, parse_object
from weft_cli.errors import BadInput, CommandError
from weft_runner.errors import ExecutorUnavailable, MachineInvalid, NoPolicyFits, OffloadError, RunnerError
from weft_runner.offload import (
    MAX_TIER_BYTES,
    Budgets,
    Formats,
    MachineRates,
    OffloadPlan,
    PolicySearch,
    RunnerRequest,
    Sequences,
    WeightsFormat,
    machine_of,
    measured_gpu,
    pipeline_time,
    solve_each,
    stage_searches,
)

MACHINE_BYTES = 1 << 20
PARTS = ("advanced", "lora", "parallelism")  # of the spec, that a policy depends on
EXECUTOR = "the pool has GPUs where spec.template.resources.limits has nvidia.com/gpu; docs/offload.md has the rule"
Searches = Mapping[int, PolicySearch]  # by stage
Plans = Mapping[int, OffloadPlan]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the pool or the machine, and tokens a second with it; 0 if no policy fits."""

    subject: str
    tokens_per_s: float


def searches_of(
    manifest: Mapping[str, Any], model: str | None, rates: MachineRates, sequences: Sequences
) -> dict[int, PolicySearch]:
    """Make what a runner of the pool searches for each of its stages, on hosts that are all alike. Raises BadInput."""
    request, spec = request_of(manifest, sequences), model_spec(manifest, model)
    if request.formats.weights not in rates.products:
        products = ", ".join(rates.products)
        raise BadInput(
            f"the machine's products have no {request.formats.weights}, but {products}", "measure it: --measure"
        )
    if rates.one_memory != (request.formats.executor == "cpu"):
        ours, theirs = ("CPUs", "a GPU") if rates.one_memory else ("a GPU", "CPUs")
        raise BadInput(f"the machine's rates are those of {ours}, and the pool's runners compute on {theirs}", EXECUTOR)
    try:
        return stage_searches(spec, dict.fromkeys(range(request.stages), rates), request)
    except ExecutorUnavailable as error:
        raise BadInput(str(error)) from error


def request_of(manifest: Mapping[str, Any], sequences: Sequences) -> RunnerRequest:
    """Make the request of a runner as the operator starts it. One rank on CPUs is planned with all of its budgets."""
    spec, offload = manifest["spec"], offload_of(manifest)
    advanced, lora, parallelism = (spec.get(name) or {} for name in PARTS)
    executor, stages = executor_of(manifest), parallelism.get("pipeline", 1)
    disk = int(amount(offload["diskBytes"])) if "diskBytes" in offload else MAX_TIER_BYTES
    weights, kv = offload.get("weights", "bf16"), offload.get("kv", "bf16")
    return RunnerRequest(
        Budgets(int(amount(offload["deviceBytes"])), int(amount(offload.get("hostBytes") or 0)), disk),
        Formats(weights, kv, sparse_attention=_sparse(manifest), executor=executor),
        sequences,
        stages=stages,
        hosts=parallelism.get("podsPerRunner", 1),
        max_adapters=advanced.get("maxAdapters") or 0,
        max_rank=lora.get("maxRank", 64),
        max_sequences=advanced.get("maxSequences") or 0,
        max_batch_tokens=advanced.get("maxBatchTokens") or 0,
        kv_pages=advanced.get("kvPages") or 0,
        page_tokens=PAGE_TOKENS,
        reserve=executor == "cuda" or stages > 1,
    )


def executor_of(manifest: Mapping[str, Any]) -> Literal["cpu", "cuda"]:
    """Return the executor of a runner: a GPU if its template limits one, unless only the cpu executor has a format."""
    template, offload = manifest["spec"].get("template") or {}, offload_of(manifest)
    limits = (template.get("resources") or {}).get("limits") or {}
    only_cpu = offload.get("kv") == "int4" or offload.get("weights") == "int8" or _sparse(manifest)
    return "cuda" if GPU in limits and not only_cpu else "cpu"


def _sparse(manifest: Mapping[str, Any]) -> bool:
    return (manifest["spec"].get("advanced") or {}).get("sparseAttention", "Off") == "TopK"


def offload_of(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `spec.memory.offload` of an offload pool. Raises BadInput."""
    if offload := (manifest["spec"].get("memory") or {}).get("offload"):
        return offload
    raise BadInput("the pool does not offload", "spec.memory.offload: {deviceBytes: 4Gi, diskPath: /PATH}")


def model_spec(manifest: Mapping[str, Any], model: str | None) -> ModelSpec:
    """Read the model of `--model` (a config.json or its folder), or of the pool's folder here. Raises BadInput."""
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
    """Read the rates of a machine. Raises BadInput."""
    try:
        return machine_of(parse_object(path.read_bytes(), max_bytes=MACHINE_BYTES))
    except (OSError, JsonError, MachineInvalid) as error:
        raise BadInput(f"--machine {path}: {error}", "--measure writes one with --save") from error


def measured_rates(manifest: Mapping[str, Any], model: str | None) -> MachineRates:
    """Measure this machine at the pool's diskPath, with its GPU if the pool's runners use one. Raises CommandError."""
    from weft_kernels.cpu.errors import NativeUnavailable
    from weft_runner.model.cpu.machine_rates import measure_rates

    offload, spec = offload_of(manifest), model_spec(manifest, model)
    others: tuple[WeightsFormat, ...] = ("bf16", "int4")
    formats = list[WeightsFormat](dict.fromkeys((offload.get("weights", "bf16"), *others)))
    path, max_bytes = Path(offload["diskPath"]), int(amount(offload["deviceBytes"])) // 4
    try:
        if executor_of(manifest) == "cuda":
            return measured_gpu(path, spec, formats, max_bytes)
        return measure_rates(path, spec, formats, offload.get("kv", "bf16"))
    except (RunnerError, NativeUnavailable) as error:
        raise CommandError(f"this machine was not measured: {error}") from error


def write_rates(rates: MachineRates, path: Path) -> None:
    """Write the rates to a file for `--machine`."""
    path.write_text(json.dumps(asdict(rates), indent=1) + "\n", encoding="utf-8")


def find(searches: Searches) -> tuple[dict[int, OffloadPlan], list[Change]]:
    """Find the plans, and the gain of each single change, the best first. Raises CommandError."""
    changed = dict(_changes(searches))
    try:
        plans, *alternatives = solve_each([searches, *changed.values()])
    except OffloadError as error:
        raise CommandError(str(error)) from error
    if isinstance(plans, NoPolicyFits):
        raise CommandError(f"no policy fits: {plans}") from plans
    helping = [
        Change(subject, _rate(changed[subject], alternative))
        for subject, alternative in zip(changed, alternatives, strict=True)
    ]
    return plans, sorted(helping, key=lambda change: -change.tokens_per_s)


def _rate(searches: Searches, plans: Plans | NoPolicyFits) -> float:
    if isinstance(plans, NoPolicyFits):
        return 0.0
    return pipeline_time([plans[stage] for stage in sorted(plans)], hosts_of(searches)).tokens_per_s


def hosts_of(searches: Searches) -> int:
    """The number of hosts of a runner."""
    return searches[0].work.in_flight


def _changes(searches: Searches) -> Iterator[tuple[str, Searches]]:
    """Yield the changes to try, each for all stages."""
    rates, formats, spec = searches[0].machine, searches[0].formats, searches[0].spec
    yield (
        "half as much device memory more",
        {
            stage: replace(search, budgets=replace(search.budgets, device_bytes=search.budgets.device_bytes * 3 // 2))
            for stage, search in searches.items()
        },
    )
    if not rates.one_memory:
        yield (
            "half as much host memory more",
            {
                stage: replace(search, budgets=replace(search.budgets, host_bytes=search.budgets.host_bytes * 3 // 2))
                for stage, search in searches.items()
            },
        )
        copies = replace(rates, to_device=2 * rates.to_device, to_host=2 * rates.to_host)
        yield "copies twice as fast", _change_each(searches, machine=copies)
    disk = replace(rates, disk_read=2 * rates.disk_read, disk_write=2 * rates.disk_write)
    yield "a disk twice as fast", _change_each(searches, machine=disk)
    yield "twice the compute", _change_each(searches, machine=_twice(rates))
    yield "twice the sequences at a time", _change_each(searches, most_block=2 * searches[0].most_block)
    if formats.executor == "cpu" and formats.kv != "int4" and int4_kv_group(spec.head_dim):
        yield "int4 KV", _change_each(searches, formats=replace(formats, kv="int4"))
    if formats.weights != "int4" and "int4" in rates.products:
        yield "int4 weights", _change_each(searches, formats=replace(formats, weights="int4"))


def _change_each(searches: Searches, **changed: Any) -> Searches:
    return {stage: replace(search, **changed) for stage, search in searches.items()}


def _twice(rates: MachineRates) -> MachineRates:
    products = {name: tuple((rows, s / 2) for rows, s in table) for name, table in rates.products.items()}
    flops = 2 * rates.attention_flops_per_s
    return replace(rates, products=products, attention=2 * rates.attention, attention_flops_per_s=flops)

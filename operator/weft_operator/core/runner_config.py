"""Configurations of a pool's runners, in a pod as on this machine. Pure."""

from weft.api.servingpool import Offload
from weft.api.template import amount
from weft_operator.core.resources import Group, PoolObject
from weft_operator.core.state import RunnerConfig

TOP_SHARE = "0.1"  # of the keys, with sparseAttention TopK (FlexGen, section 5)

Flags = dict[str, str | int | float]


def make_runner_config(pool: PoolObject, base_digest: str, group: Group | None = None) -> RunnerConfig:
    """Make the start configuration of each runner of a pool, or of a group."""
    spec, phase = pool.spec, group.phase if group is not None else "Any"
    flags = tuple(_flags(pool, base_digest, phase).items())
    return RunnerConfig(pool.meta.ref, base_digest, flags, spec.memory, spec.model_cache, phase)


def _flags(pool: PoolObject, base_digest: str, phase: str) -> Flags:
    """Make the flags of a runner. An open setting has no flag, or 0: its runner chooses."""
    spec, sizes, split = pool.spec, pool.spec.advanced, pool.spec.parallelism
    flags: Flags = {
        "pool": str(pool.meta.ref),
        "model-name": pool.model_name,
        "base-digest": base_digest,
        "kv-pages": sizes.kv_pages or 0,
    }
    if spec.memory.fraction is not None:
        flags["kv-memory-fraction"] = spec.memory.fraction
    flags["max-sequences"] = sizes.max_sequences or 0
    if sizes.max_adapters is not None:
        flags["max-adapters"] = sizes.max_adapters
    flags["max-rank"] = spec.lora.max_rank
    flags["max-batch-tokens"] = sizes.max_batch_tokens or 0
    flags["token-time-ms"] = spec.slo.token_time_ms if spec.slo else 0
    for flag, parts in (("tensor-parallel", split.tensor), ("pipeline-parallel", split.pipeline)):
        if parts > 1:
            flags[flag] = parts
    if sizes.speculation == "Off":
        flags["speculation"] = "off"
    if phase != "Any":
        flags["role"] = phase.lower()
    offload = spec.memory.offload
    return flags if offload is None else flags | _offload_flags(offload, sparse=sizes.sparse_attention == "TopK")


def _offload_flags(offload: Offload, *, sparse: bool) -> Flags:
    flags: Flags = {"dtype": offload.weights}
    if offload.kv != "bf16":
        flags["kv-dtype"] = offload.kv
    if sparse:
        flags["sparse-attention"] = TOP_SHARE
    budgets = {"device": offload.device_bytes, "host": offload.host_bytes, "disk": offload.disk_bytes}
    arguments = [f"{name}={int(amount(size))}" for name, size in budgets.items() if size is not None]
    flags["offload"] = ",".join([*arguments, f"path={offload.disk_path}"])
    return flags

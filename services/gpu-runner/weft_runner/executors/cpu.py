"""The kind `cpu`: the native kernels. No torch here."""

from typing import TYPE_CHECKING, Any

from weft.domain.model.packed import int4_kv_group
from weft.domain.model.spec import ModelSpec
from weft_kernels.cpu.errors import LevelUnusable, NativeUnavailable
from weft_kernels.cpu.library import load
from weft_kernels.cpu.sources import SOURCES
from weft_runner.core.adapters.slots import MAX_SLOTS
from weft_runner.errors import ExecutorUnavailable
from weft_runner.executors.memory import check_host_memory as check_memory
from weft_runner.executors.memory import host_limits as limits
from weft_runner.executors.memory import host_pages as kv_pages
from weft_runner.executors.source import ModelSource, offload_budget, offload_folder, offload_formats, parts_of
from weft_runner.model.checkpoint import open_checkpoint
from weft_runner.model.cpu.executor import CpuExecutor
from weft_runner.model.cpu.machine_rates import measure_rates
from weft_runner.model.cpu.offload import OffloadExecutor
from weft_runner.model.cpu.packed_weights import unsupported_reason
from weft_runner.model.executor import Executor
from weft_runner.model.partition import Partition
from weft_runner.model.tiers.kept_rates import kept_rates, rates_identity
from weft_runner.offload.machine import MachineRates
from weft_runner.settings import CPU_PAGE, RunnerSettings

if TYPE_CHECKING:
    from weft_runner.parallel.process_group import TorchRanks

__all__ = ["check_memory", "kv_pages", "limits", "make", "measure", "refusal"]


def refusal(settings: RunnerSettings, spec: ModelSpec) -> str:
    parts = parts_of(settings, spec)
    if settings.page_tokens % CPU_PAGE:
        return f"a page of {settings.page_tokens} tokens is no multiple of {CPU_PAGE}"
    if reason := next(filter(None, map(unsupported_reason, parts)), ""):
        return reason
    if settings.kv_dtype == "int4" and not int4_kv_group(head_dim := parts[0].local.head_dim):
        return f"--kv-dtype int4 has groups of 64 or 32 numbers of a head, and head_dim is {head_dim}"
    try:
        load()
    except LevelUnusable as error:
        raise ExecutorUnavailable(f"$WEFT_CPU_LEVEL: {error}") from error
    except NativeUnavailable as error:
        return error.reason
    return ""


def measure(settings: RunnerSettings, spec: ModelSpec, threads: int) -> MachineRates:
    folder, most, formats = offload_folder(settings), settings.offload.device_bytes // 2, offload_formats(settings)
    identity = rates_identity(f"{load().level} {SOURCES.digest()}", settings.base_digest, formats, threads)
    return kept_rates(
        folder, identity, lambda: measure_rates(folder, spec, [formats.weights], formats.kv, threads, most)
    )


def make(settings: RunnerSettings, base: ModelSource, part: Partition, ranks: "TorchRanks | None" = None) -> Executor:
    library, checkpoint = load(), open_checkpoint(base.files, base.spec, base.stopping, base.progress)
    options: dict[str, Any] = {
        "dtype": settings.dtype,
        "kv_dtype": settings.kv_dtype,
        "top_share": settings.sparse_attention,
        "threads": base.threads,
        "pages": settings.kv_pages,
        "page_tokens": settings.page_tokens,
        "slots": max_slots(settings),
        "part": part,
    }
    if settings.offload.device_bytes:
        budget = offload_budget(settings, base.policy, 0 if ranks is None else ranks.rank)
        return OffloadExecutor(library, checkpoint, budget, stopping=base.stopping, **options)
    slots = ranks.native_slots(library.native, slot_bytes(settings, part)) if ranks and part.size > 1 else None
    return CpuExecutor(library, checkpoint, ranks=slots, **options)


def max_slots(settings: RunnerSettings) -> int:
    """Bound the adapters on the device by what its pages could hold, if no bound is set."""
    return settings.max_adapters or min(settings.kv_pages, MAX_SLOTS)


def slot_bytes(settings: RunnerSettings, part: Partition) -> int:
    """Return the most that a tensor rank gives the others in a step: rows of partial sums or of adapters, or logits."""
    stacked = 3 * (settings.max_rank + settings.max_rank % 2)
    rows = settings.max_batch_tokens * max(part.whole.hidden_size, stacked)
    return -(-4 * max(rows, settings.max_sequences * part.whole.vocab_size // part.size) // 64) * 64

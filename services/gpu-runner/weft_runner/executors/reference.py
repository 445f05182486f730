"""The kind `reference`: plain torch in fp32. It serves every model."""

from weft.domain.model.spec import ModelSpec
from weft_runner.executors.cpu import max_slots
from weft_runner.executors.memory import check_host_memory as check_memory
from weft_runner.executors.memory import host_limits as limits
from weft_runner.executors.memory import host_pages as kv_pages
from weft_runner.executors.source import ModelSource, parts_of
from weft_runner.model.executor import Executor
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.operator_threads import MAX_OPERATOR_THREADS, set_operator_threads
from weft_runner.model.partition import Partition
from weft_runner.model.reference.adapters import TorchAdapterStore
from weft_runner.model.reference.executor import ReferenceExecutor
from weft_runner.model.tensor_parallel import SingleProcessGroup
from weft_runner.model.weights import load_weights
from weft_runner.offload.machine import MachineRates
from weft_runner.parallel.process_group import TorchRanks
from weft_runner.settings import RunnerSettings

__all__ = ["check_memory", "kv_pages", "limits", "make", "measure", "refusal"]


def refusal(settings: RunnerSettings, spec: ModelSpec) -> str:
    parts_of(settings, spec)
    return "it does not offload" if settings.offload.device_bytes else ""


def measure(settings: RunnerSettings, spec: ModelSpec, threads: int) -> MachineRates:
    """Fail: nobody asks what does not offload."""
    del settings, spec, threads
    raise AssertionError("the reference executor does not offload")


def make(settings: RunnerSettings, base: ModelSource, part: Partition, ranks: TorchRanks | None = None) -> Executor:
    if ranks is None:
        set_operator_threads(min(base.threads, MAX_OPERATOR_THREADS))
    weights = load_weights(base.files, base.spec, stopping=base.stopping, part=part, progress=base.progress)
    kv_cache = KvCache(part.local, settings.kv_pages, settings.page_tokens)
    adapters = TorchAdapterStore(base.spec, max_slots(settings), part)
    group = SingleProcessGroup() if ranks is None else ranks.tensor
    return ReferenceExecutor(part.local, weights, kv_cache, adapters, group)

"""The table of executors: cuda where there is a GPU, else the native one of the CPU, else the reference.

The last one serves every model; `auto` takes the first without a refusal and logs why the others have one. All but the
native one need torch: where that is not installed, nothing here imports it, and `auto` is the native one.
"""

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from weft.domain.model.spec import ModelSpec
from weft.telemetry.logs import kv
from weft_runner.errors import ExecutorUnavailable
from weft_runner.executors import cpu
from weft_runner.executors.memory import WITHOUT_GPU, StepLimits
from weft_runner.executors.source import ModelSource
from weft_runner.gpu_driver import NO_GPU, NO_TORCH, gpu_bytes, has_torch
from weft_runner.model.executor import Executor
from weft_runner.model.partition import Partition
from weft_runner.offload.machine import MachineRates
from weft_runner.settings import HOST_MIB, RunnerSettings

if TYPE_CHECKING:
    from weft_runner.parallel.process_group import TorchRanks

log = logging.getLogger(__name__)
KINDS = ("cuda", "cpu", "reference")  # as `auto` walks them
COSTS = {"reference": "fp32 in torch, one operator after another: twice the bytes a token, and several times the time"}
ABSENT = (NO_GPU, NO_TORCH)  # what nobody is told who did not ask for it


class ExecutorKind(Protocol):
    """What the module of a kind answers. `settings` name it, but for `refusal`, and count all ranks of the runner."""

    def refusal(self, settings: RunnerSettings, spec: ModelSpec) -> str:
        """Say why this machine cannot serve the model so; empty when it can. Raises ExecutorUnavailable."""
        ...

    def limits(self, settings: RunnerSettings, spec: ModelSpec) -> tuple[StepLimits, int]:
        """Choose what a step takes, and MiB of host memory for copies."""
        ...

    def kv_pages(self, settings: RunnerSettings, spec: ModelSpec) -> int:
        """Choose the KV pages that --kv-memory-fraction holds. Raises KvCacheTooSmall."""
        ...

    def check_memory(self, settings: RunnerSettings, spec: ModelSpec) -> None:
        """Compare what serving needs with what there is, before any weight is read. Raises OutOfMemory."""
        ...

    def measure(self, settings: RunnerSettings, spec: ModelSpec, threads: int) -> MachineRates:
        """Measure this host for offloading, or read what an earlier start has measured."""
        ...

    def make(
        self, settings: RunnerSettings, base: ModelSource, part: Partition, ranks: "TorchRanks | None" = None
    ) -> Executor:
        """Make the executor of a part, or without `ranks` of the whole model."""
        ...


def kind_of(name: str) -> ExecutorKind:
    """Import the module of a kind, and torch with it but for the native one's."""
    if name == "cpu":
        return cpu
    if name == "cuda":
        from weft_runner.executors import cuda

        return cuda
    from weft_runner.executors import reference

    return reference


def settle_executor(settings: RunnerSettings, spec: ModelSpec) -> tuple[RunnerSettings, ExecutorKind]:
    """Name what computes in the settings, if they leave it open.

    A split model goes to GPUs wherever there is one: too few of them is an error. Raises ExecutorUnavailable.
    """
    if settings.ranks > 1:
        require_torch("--tensor-parallel and --pipeline-parallel")
    settings, passed = _narrowed(settings), dict[str, str]()
    auto = settings.executor == "auto"
    for name in KINDS if auto else (settings.executor,):
        if not (why := _refusal(name, settings, spec)):
            for other, reason in passed.items():
                if reason not in ABSENT:
                    fields = kv(executor=other, reason=reason, instead=name, cost=COSTS.get(name, ""))
                    log.warning("an executor cannot serve: the next one does", extra=fields)
            return replace(settings, executor=name), kind_of(name)
        if not auto or (name == "cuda" and settings.ranks > 1 and why not in ABSENT):
            raise ExecutorUnavailable(f"--executor {name}{_split(settings)}: {why}")
        passed[name] = why
    raise ExecutorUnavailable("; ".join(f"the {name} executor: {why}" for name, why in passed.items()))


def _narrowed(settings: RunnerSettings) -> RunnerSettings:
    """Name the one executor that has what is asked for, where only one has."""
    on_disk = settings.by_hand is not None and settings.by_hand.kv_disk_pages
    if on_disk or settings.kv_dtype == "int4" or settings.sparse_attention:
        return replace(settings, executor="cpu")
    return settings


def _refusal(name: str, settings: RunnerSettings, spec: ModelSpec) -> str:
    """Ask a kind, unless its module cannot be imported or need not be."""
    if name != "cpu" and not has_torch():
        return NO_TORCH
    if name == "cuda" and settings.executor == "auto" and settings.ranks == 1 and not gpu_bytes():
        return NO_GPU  # as torch would say, after a second; a split model takes torch anyway
    return kind_of(name).refusal(settings, spec)


def _split(settings: RunnerSettings) -> str:
    flags = {"tensor-parallel": settings.tensor_parallel, "pipeline-parallel": settings.pipeline_parallel}
    return "".join(f" --{flag} {parts}" for flag, parts in flags.items() if parts > 1)


def require_torch(what: str) -> None:
    """Refuse, where torch is not installed, what needs it. Raises ExecutorUnavailable."""
    if not has_torch():
        raise ExecutorUnavailable(f"{what}: {NO_TORCH}")


def settle_limits(settings: RunnerSettings, spec: ModelSpec) -> RunnerSettings:
    """Set each limit of a step that is 0, and host memory, by what will compute.

    One that is given bounds the other: each running sequence needs a token an iteration. Raises ExecutorUnavailable.
    """
    settings, kind = settle_executor(settings, spec)
    found, host = (WITHOUT_GPU, HOST_MIB) if settings.offload.device_bytes else kind.limits(settings, spec)
    sequences = settings.max_sequences or min(found.sequences, settings.max_batch_tokens or found.sequences)
    limits = {
        "max_sequences": sequences,
        "max_batch_tokens": settings.max_batch_tokens or max(found.batch_tokens, sequences),
        "max_prefills": settings.max_prefills or found.prefills,
        "host_mib": settings.host_mib or host,
    }
    log.info("limits of steps", extra=kv(**limits))
    return replace(settings, **limits)


def settle_kv_pages(settings: RunnerSettings, spec: ModelSpec) -> RunnerSettings:
    """Set a number of KV pages by --kv-memory-fraction, where none was given; the executor that will compute counts.

    Raises ExecutorUnavailable, KvCacheTooSmall.
    """
    if settings.kv_pages or settings.offload.device_bytes:
        return settings
    settings, kind = settle_executor(settings, spec)
    pages = kind.kv_pages(settings, spec)
    log.info("KV pages chosen", extra=kv(pages=pages, page_tokens=settings.page_tokens))
    return replace(settings, kv_pages=pages)


def make_executor(settings: RunnerSettings, base: ModelSource) -> Executor:
    """Make the executor that `--executor` names, of all ranks.

    Raises ExecutorUnavailable, WeightsInvalid, OutOfMemory, StoppedAtStart; of several ranks also ExecutorLost.
    """
    settings, kind = settle_executor(settings, base.spec)
    kind.check_memory(settings, base.spec)
    if settings.ranks == 1:
        return kind.make(settings, base, Partition(base.spec))
    from weft_runner.executors.split import split_executor

    return split_executor(settings, base, partial(make_rank, settings, base))


def make_rank(settings: RunnerSettings, base: ModelSource, ranks: "TorchRanks") -> Executor:
    """Make a rank's part of the executor that the settings name. Raises WeightsInvalid, StoppedAtStart."""
    part = ranks.grid.part_of(base.spec, ranks.rank)
    return kind_of(settings.executor).make(settings, base, part, ranks)

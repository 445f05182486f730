"""What computes: the cuda executor where there is a GPU, else the native CPU executor, else the reference executor.

The last one serves every model; `auto` takes the first that can serve this one and logs why the others cannot. All but
the native one need torch: where that is not installed, nothing here imports it, and `auto` is the native one.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from weft.domain.model.config import ModelSpec
from weft.telemetry.logs import kv
from weft_kernels.cpu.errors import NativeUnavailable
from weft_runner.cpu_executors import ModelSource, container_pages, cpu_executor
from weft_runner.errors import ExecutorUnavailable
from weft_runner.gpu_driver import finds_gpu, has_torch
from weft_runner.model.executor import Executor
from weft_runner.settings import HOST_MIB, RunnerSettings
from weft_runner.step_limits import WITHOUT_GPU, StepLimits

if TYPE_CHECKING:
    from weft_runner.model.cuda.device import Gpu

log = logging.getLogger(__name__)
T = TypeVar("T")
NO_TORCH = "torch is not installed: pip install 'weft[torch]'"


def make_executor(settings: RunnerSettings, base: ModelSource) -> Executor:
    """The executor that `--executor` names. Raises ExecutorUnavailable, WeightsInvalid, OutOfMemory, StoppedAtStart."""
    settings = _narrowed(settings)
    if settings.tensor_parallel > 1 or settings.pipeline_parallel > 1:
        require_torch("--tensor-parallel and --pipeline-parallel")
        from weft_runner.torch_executors import split_executor

        return split_executor(settings, base)
    if settings.executor == "reference":
        return _reference(settings, base)
    if (found := _on_gpu(settings, base)) is not None:
        return found
    try:
        return cpu_executor(settings, base)
    except NativeUnavailable as error:
        if settings.executor == "cpu":
            raise ExecutorUnavailable(f"--executor cpu: {error.reason}") from error
        if not has_torch():
            raise ExecutorUnavailable(
                f"the CPU executor: {error.reason}; the reference executor: {NO_TORCH}"
            ) from error
        from weft_runner.torch_executors import COST

        log.warning("the native CPU executor cannot serve: reference does", extra=kv(reason=error.reason, cost=COST))
        return _reference(settings, base)


def settle_limits(settings: RunnerSettings, spec: ModelSpec) -> RunnerSettings:
    """Set each limit of a step that is 0, and host memory, by what will compute.

    One that is given bounds the other: each running sequence needs a token an iteration. Raises ExecutorUnavailable.
    """
    narrowed, of_gpus = _narrowed(settings), None
    if not settings.offload.device_bytes:
        of_gpus = _on_gpus(narrowed, lambda: _gpu_limits(narrowed, spec))
    found, host = of_gpus or (WITHOUT_GPU, HOST_MIB)
    sequences = settings.max_sequences or min(found.sequences, settings.max_batch_tokens or found.sequences)
    limits = {
        "max_sequences": sequences,
        "max_batch_tokens": settings.max_batch_tokens or max(found.batch_tokens, sequences),
        "max_prefills": settings.max_prefills or found.prefills,
        "host_mib": settings.host_mib or host,
    }
    log.info("limits of steps", extra=kv(**limits))
    return replace(settings, **limits)


def _gpu_limits(settings: RunnerSettings, spec: ModelSpec) -> tuple[StepLimits, int] | None:
    """None where Triton's interpreter plays the GPU. Raises GpuUnavailable, ExecutorUnavailable."""
    from weft_runner.torch_executors import gpu_limits

    return gpu_limits(settings, spec)


def settle_kv_pages(settings: RunnerSettings, spec: ModelSpec) -> RunnerSettings:
    """With a number of KV pages, by --kv-memory-fraction where none was given; the executor that will compute counts.

    Raises ExecutorUnavailable, KvCacheTooSmall.
    """
    if settings.kv_pages or settings.offload.device_bytes:
        return settings
    narrowed = _narrowed(settings)
    pages = _on_gpus(narrowed, lambda: _gpu_pages(narrowed, spec))
    if pages is None:
        pages = container_pages(narrowed, spec)
    log.info("KV pages chosen", extra=kv(pages=pages, page_tokens=settings.page_tokens))
    return replace(settings, kv_pages=pages)


def _gpu_pages(settings: RunnerSettings, spec: ModelSpec) -> int:
    """Raises GpuUnavailable, ExecutorUnavailable, KvCacheTooSmall."""
    from weft_runner.torch_executors import gpu_pages

    return gpu_pages(settings, spec)


def _on_gpus(settings: RunnerSettings, ask: Callable[[], T | None]) -> T | None:
    """What GPUs have of it; None where the CPU is to compute."""
    if not _wants_gpu(settings):
        return None
    from weft_runner.model.cuda.device import GpuUnavailable

    try:
        return ask()
    except GpuUnavailable as error:
        if settings.executor == "cuda" or settings.ranks > 1:
            raise ExecutorUnavailable(f"--executor cuda: {error}") from error
        return None  # `make_executor` says why


def offload_gpu(settings: RunnerSettings, spec: ModelSpec) -> "Gpu | None":
    """The first GPU of a runner that offloads; None: the CPU computes. Raises ExecutorUnavailable."""
    settings = _narrowed(settings)
    if not _wants_gpu(settings):
        return None
    from weft_runner.model.cuda.device import GpuUnavailable
    from weft_runner.torch_executors import check_offload_gpu

    try:
        return check_offload_gpu(settings, spec)
    except GpuUnavailable as error:
        if settings.executor == "cuda":
            raise ExecutorUnavailable(f"--executor cuda: {error}") from error
    return None


def _on_gpu(settings: RunnerSettings, base: ModelSource) -> Executor | None:
    """None where the CPU is to compute."""
    if not _wants_gpu(settings):
        return None
    from weft_runner.model.cuda.device import GpuUnavailable
    from weft_runner.torch_executors import cuda_executor

    try:
        return cuda_executor(settings, base)
    except GpuUnavailable as error:
        if settings.executor == "cuda":
            raise ExecutorUnavailable(f"--executor cuda: {error}") from error
        log.warning("the GPU cannot serve: the CPU does", extra=kv(reason=error))
    return None


def _wants_gpu(settings: RunnerSettings) -> bool:
    """Raises ExecutorUnavailable where it does, and torch is not there."""
    if settings.executor == "cuda":
        require_torch("--executor cuda")
        return True
    if settings.executor != "auto" or not finds_gpu():
        return False
    from weft_runner.torch_executors import sees_gpu

    return sees_gpu()


def _reference(settings: RunnerSettings, base: ModelSource) -> Executor:
    require_torch("--executor reference")
    from weft_runner.torch_executors import reference_executor

    return reference_executor(settings, base)


def _narrowed(settings: RunnerSettings) -> RunnerSettings:
    """To the one executor that has what is asked for, where only one has."""
    on_disk = settings.by_hand is not None and settings.by_hand.kv_disk_pages
    if on_disk or settings.kv_dtype == "int4" or settings.sparse_attention:
        return replace(settings, executor="cpu")
    return replace(settings, executor="cuda") if settings.attention == "flashinfer" else settings


def require_torch(what: str) -> None:
    """Raises ExecutorUnavailable."""
    if not has_torch():
        raise ExecutorUnavailable(f"{what}: {NO_TORCH}")

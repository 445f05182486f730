"""What computes: the native CPU executor where it can serve this model, else the reference executor, which can."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from weft.telemetry.logs import kv
from weft_kernels.cpu.errors import LevelUnusable, NativeUnavailable
from weft_kernels.cpu.library import load
from weft_runner.errors import ExecutorUnavailable
from weft_runner.memory.available import available_memory
from weft_runner.memory.kv_cache import KvCache
from weft_runner.memory.lora_table import LoraTable
from weft_runner.model.checkpoint import open_checkpoint
from weft_runner.model.cpu import CpuExecutor
from weft_runner.model.executor import Executor
from weft_runner.model.footprint import check_memory, memory_needed
from weft_runner.model.packed import why_not
from weft_runner.model.reference import ReferenceExecutor
from weft_runner.model.spec import ModelSpec
from weft_runner.model.weights import Files, load_weights
from weft_runner.settings import CPU_PAGE, Settings

log = logging.getLogger(__name__)
COST = "fp32 in torch, one operator after the other: twice the bytes a token, and several times the time"


@dataclass(frozen=True, slots=True)
class Base:
    """The model to compute, and how many threads may. `stopping`: asked while weights load."""

    spec: ModelSpec
    files: Files
    threads: int
    stopping: Callable[[], bool]


def make_executor(settings: Settings, base: Base) -> Executor:
    """The executor that `--executor` names. Raises ExecutorUnavailable, WeightsInvalid, OutOfMemory, StoppedAtStart."""
    if settings.executor == "reference":
        return _reference(settings, base)
    try:
        return _cpu(settings, base)
    except LevelUnusable as error:
        raise ExecutorUnavailable(f"$WEFT_CPU_LEVEL: {error}") from error
    except NativeUnavailable as error:
        if settings.executor == "cpu":
            raise ExecutorUnavailable(f"--executor cpu: {error.reason}") from error
        log.warning("the native CPU executor cannot serve: reference does", extra=kv(why=error.reason, cost=COST))
        return _reference(settings, base)


def _cpu(settings: Settings, base: Base) -> Executor:
    """Raises NativeUnavailable before any weight is read."""
    if settings.page_tokens % CPU_PAGE:
        raise NativeUnavailable(f"--page-tokens {settings.page_tokens} is no multiple of {CPU_PAGE}")
    if reason := why_not(base.spec):
        raise NativeUnavailable(reason)
    library = load()
    _check_room(settings, base, settings.dtype)
    return CpuExecutor(
        library,
        open_checkpoint(base.files, base.spec, base.stopping),
        dtype=settings.dtype,
        threads=base.threads,
        pages=settings.kv_pages,
        page_tokens=settings.page_tokens,
        slots=settings.max_adapters,
    )


def _reference(settings: Settings, base: Base) -> Executor:
    _check_room(settings, base, "reference")
    weights = load_weights(base.files, base.spec, stopping=base.stopping)
    kv_cache = KvCache(base.spec, settings.kv_pages, settings.page_tokens)
    return ReferenceExecutor(base.spec, weights, kv_cache, LoraTable(base.spec, settings.max_adapters))


def _check_room(settings: Settings, base: Base, kind: str) -> None:
    """Raises OutOfMemory."""
    needed = memory_needed(base.spec, kind, kv_pages=settings.kv_pages, page_tokens=settings.page_tokens)
    check_memory(needed, available_memory())

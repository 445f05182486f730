"""What a runner that was given no numbers takes of its memory: KV pages, sequences and tokens of a step.

KV pages fill a share of all the memory, as with vLLM's `gpu_memory_utilization`: what weights, tables of adapters,
steps and others take of the share is not for pages. Nothing is loaded yet, so that a share that is too small ends the
start at once. Sequences of a GPU are those that KV pages hold at a usual length; a scheduler gives a runner no more of
them than its measured steps are good for (`Profile.best_batch`). Tokens of a step are those whose activations take a
small part of what weights leave; a measured step keeps prompts within its time (`CHUNK_TIME_MS`). Their ranges are
those of vLLM's defaults for its server.
"""

from collections.abc import Callable
from dataclasses import astuple, replace
from typing import NamedTuple

from weft.domain.model.spec import ModelSpec
from weft_runner.errors import KvCacheTooSmall, OutOfMemory
from weft_runner.executors.source import parts_of
from weft_runner.memory_estimate import (
    GIB,
    REQUESTS_BYTES,
    MemoryEstimate,
    MemoryLimit,
    available_memory,
    check_memory,
    estimate_memory,
)
from weft_runner.settings import HOST_MIB, KV_PAGES, MAX_BATCH_TOKENS, MAX_PREFILLS, MAX_SEQUENCES, RunnerSettings

MAX_PAGES = 1 << 20
ROUND_BITS = 6  # of a number of pages: runners that differ by a few megabytes are of one shape for the scheduler
HOST_SHARE = 4  # a quarter of a container may be copies of KV and adapters
MAX_HOST_MIB = 64 << 10
SEQUENCES = (256, 512, 1024)  # of a GPU
BATCH_TOKENS = (2048, 4096, 8192)
USUAL_TOKENS = 512  # of a sequence
STEP_SHARE = 16  # the part of what weights leave that a step's activations may take

Needs = Callable[[int], MemoryEstimate]  # what serving takes with that number of pages; never less with more


class StepLimits(NamedTuple):
    """How much an iteration takes. `prefills`: prompts that it works on."""

    sequences: int
    batch_tokens: int
    prefills: int


WITHOUT_GPU = StepLimits(MAX_SEQUENCES, MAX_BATCH_TOKENS, MAX_PREFILLS)


def gpu_step_limits(left: int, kv_token_bytes: int, step_bytes: Callable[[int], int]) -> StepLimits:
    """Choose for a GPU that has `left` bytes beside weights. `step_bytes`: what a step of that many tokens works on."""
    sequences = [most for most in SEQUENCES if most * USUAL_TOKENS * kv_token_bytes <= left]
    tokens = [most for most in BATCH_TOKENS if step_bytes(most) * STEP_SHARE <= left]
    most = max(sequences, default=SEQUENCES[0])
    return StepLimits(most, max(tokens, default=BATCH_TOKENS[0]), most)


def host_mib(memory: MemoryLimit, gpus: int) -> int:
    """Choose for a runner beside a GPU. `gpus`: runners of this machine, one a GPU; a container is of one runner."""
    share = memory.of_bytes // (HOST_SHARE if memory.is_group else HOST_SHARE * max(1, gpus))
    return max(HOST_MIB, min(share, memory.n_bytes // 2, MAX_HOST_MIB << 20) >> 20)


def fitting_pages(
    needs: Needs, available: MemoryLimit, fraction: float, *, context: int, page_tokens: int, most: int = MAX_PAGES,
    host_bytes: int = 0,
) -> int:  # fmt: skip
    """The most pages that fit, up to `most`, but no fewer than a sequence of `context` tokens takes.

    `host_bytes`: of copies in the same memory. Raises KvCacheTooSmall.
    """
    beside = max(int((1 - fraction) * available.of_bytes), min(host_bytes, available.of_bytes // HOST_SHARE))
    budget, least = available.n_bytes - beside, -(-context // page_tokens)
    pages, above = 0, max(most, least) + 1
    while above - pages > 1:
        middle = (pages + above) // 2
        pages, above = (middle, above) if needs(middle).total <= budget else (pages, middle)
    if pages < least:
        raise KvCacheTooSmall(
            f"--kv-memory-fraction {fraction:g}: a sequence of the model's {context} tokens takes {least} KV pages of "
            f"{page_tokens}, and {pages} fit. With one sequence serving needs {needs(least).by_part()}, and of "
            f"{available.limit} {max(0, budget) / GIB:.2f} GiB may be taken ({available.n_bytes / GIB:.2f} GiB are "
            f"left, {beside / GIB:.2f} GiB of which are kept free). Give it more memory, a larger "
            "memory.fraction, or a number of advanced.kvPages, which then bounds the context"
        )
    rounded = max(0, pages.bit_length() - ROUND_BITS)  # at most a thirty-second less
    return max(least, pages >> rounded << rounded)


# ---- where the CPU computes, in this machine's memory


def host_limits(settings: RunnerSettings, spec: ModelSpec) -> tuple[StepLimits, int]:
    """Give a CPU's step and its MiB of host memory, whatever the model is."""
    del settings, spec
    return WITHOUT_GPU, HOST_MIB


def host_pages(settings: RunnerSettings, spec: ModelSpec) -> int:
    """Choose the KV pages that --kv-memory-fraction of this container holds, and no more than is of use.

    Of use are pages for as many sequences as it takes, each of the model's context, and never fewer than KV_PAGES. A
    process without a container of its own has these. Raises ExecutorUnavailable, KvCacheTooSmall.
    """
    available = available_memory()
    if not available.is_group:
        return KV_PAGES
    return fitting_pages(
        lambda pages: _host_needs(replace(settings, kv_pages=pages), spec),
        available,
        settings.kv_memory_fraction,
        context=spec.max_positions,
        page_tokens=settings.page_tokens,
        most=max(KV_PAGES, settings.max_sequences * -(-spec.max_positions // settings.page_tokens)),
        host_bytes=settings.host_mib << 20,
    )


def check_host_memory(settings: RunnerSettings, spec: ModelSpec) -> None:
    """Compare what the ranks of this host take with what it has. Raises OutOfMemory, ExecutorUnavailable."""
    if settings.offload.device_bytes:
        check_budgets(settings, settings.offload.device_bytes + settings.offload.host_bytes, "device and host")
    else:
        check_memory(replace(_host_needs(settings, spec), requests=REQUESTS_BYTES), available_memory())


def check_budgets(settings: RunnerSettings, rank_bytes: int, what: str) -> None:
    """Compare what the ranks of this host may offload to with what it has. Raises OutOfMemory."""
    ranks, available = len(settings.ranks_here), available_memory()
    if (needed := rank_bytes * ranks) > available.n_bytes:
        raise OutOfMemory(
            f"--offload {what} of {ranks} ranks here are {needed}, "
            f"and {available.limit} has {available.n_bytes} left: give it more memory, or ask for less"
        )


def _host_needs(settings: RunnerSettings, spec: ModelSpec) -> MemoryEstimate:
    """Estimate what the ranks of this host take: all of the model's, or of several hosts the first ones."""
    kind, int4_kv = settings.dtype if settings.executor == "cpu" else "reference", settings.kv_dtype == "int4"
    sizes = {"kv_pages": settings.kv_pages, "page_tokens": settings.page_tokens}
    if settings.hosts > 1:
        own = parts_of(settings, spec)[: len(settings.ranks_here)]
        parts = [astuple(estimate_memory(part.local, kind, **sizes, int4_kv=int4_kv)) for part in own]
        return MemoryEstimate(*map(sum, zip(*parts, strict=True)))
    ranks, stages = settings.tensor_parallel, settings.pipeline_parallel
    return estimate_memory(spec, kind, **sizes, ranks=ranks, stages=stages, int4_kv=int4_kv)

"""Settings and a base model on disk -> an engine."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from weft.telemetry.logs import kv
from weft_runner.core.iteration import Limits
from weft_runner.core.request_pool import PoolLimits, RequestPool
from weft_runner.engine import Command, Engine, Iteration
from weft_runner.memory.adapter_pool import AdapterPool, Source
from weft_runner.memory.kv_cache import KvCache
from weft_runner.model.reference import ReferenceExecutor
from weft_runner.model.spec import ModelSpec, read_spec
from weft_runner.model.weights import Files, load_weights
from weft_runner.settings import Settings, cpu_quota

log = logging.getLogger(__name__)
MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class Built:
    """An engine that is not running yet, and what it was made of."""

    engine: Engine
    limits: PoolLimits
    numerics_class: str
    threads: int


def build_engine(
    settings: Settings,
    files: Files,
    source: Source,
    on_iteration: Callable[[Iteration], None],
    stopping: Callable[[], bool] = lambda: False,
) -> Built:
    """Load the base and make its engine. Raises ModelUnsupported, WeightsInvalid, StoppedAtStart."""
    started = time.perf_counter()
    spec = read_spec(files["config.json"], files.get("generation_config.json"))
    threads = settings.threads or default_threads(spec)
    torch.set_num_threads(threads)
    weights = load_weights(files, spec, stopping=stopping)
    kv_cache = KvCache(spec, settings.kv_pages, settings.page_tokens)
    limits = pool_limits(settings, spec)

    def make_adapters(post: Callable[[Command], None]) -> AdapterPool:
        return AdapterPool(spec, settings.max_adapters, settings.max_rank, source, post)

    def make_executor(adapters: AdapterPool) -> ReferenceExecutor:
        return ReferenceExecutor(spec, weights, kv_cache, adapters)

    engine = Engine(RequestPool(limits), make_adapters, make_executor, on_iteration)
    seconds = round(time.perf_counter() - started, 3)
    log.info("base loaded", extra=kv(layers=spec.layers, hidden=spec.hidden_size, threads=threads, seconds=seconds))
    return Built(engine, limits, engine.executor.numerics_class, threads)


def pool_limits(settings: Settings, spec: ModelSpec) -> PoolLimits:
    return PoolLimits(
        total_pages=settings.kv_pages,
        page_tokens=settings.page_tokens,
        max_sequences=settings.max_sequences,
        max_adapters=settings.max_adapters,
        max_context_tokens=min(spec.max_positions, settings.kv_pages * settings.page_tokens),
        vocab_size=spec.vocab_size,
        eos=spec.eos,
        batch=Limits(settings.max_prefills, settings.max_batch_tokens),
        starvation=settings.starvation,
        host_bytes=settings.host_mib << 20,
    )


def default_threads(spec: ModelSpec) -> int:
    """One thread for small models, whose operators are shorter than waking a second one; else the quota, at most 4."""
    return 1 if spec.hidden_size < 512 else min(cpu_quota(), MOST_THREADS)

"""RunnerSettings and a base model on disk -> an engine."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from math import inf

from weft.domain.ids import RunnerId
from weft.domain.model.spec import ModelSpec
from weft.telemetry.logs import kv
from weft.telemetry.progress import ByteProgress
from weft_kernels.cpu.threads import cpu_quota
from weft_runner.core.admission import PoolLimits
from weft_runner.core.batch import BatchLimits
from weft_runner.core.events import FoundOnDisk
from weft_runner.core.profile_model import Profile
from weft_runner.core.runner import Runner
from weft_runner.core.step_time_model import GUESS
from weft_runner.core.transfer.transfers import KvIdentity
from weft_runner.executors import ModelSource, make_executor, settle_kv_pages, settle_limits
from weft_runner.model.adapter_store import Source
from weft_runner.model.checkpoint import Files, read_spec
from weft_runner.model.executor import Executor, Ranks
from weft_runner.model.grammar import GrammarRefused, Grammars
from weft_runner.offload.machine import MachineRates
from weft_runner.offload.plan import OffloadPolicy
from weft_runner.parallel.worker_group import GatheredRanks, GatherRanks
from weft_runner.settings import OffloadByHand, RunnerSettings
from weft_runner.shell.adapter_pool import AdapterPool
from weft_runner.shell.engine import Engine, Output, Posted
from weft_runner.shell.kv_profile import measure_kv
from weft_runner.shell.offload_policy import measured_machine, settle_offload
from weft_runner.shell.profile import measure_profile

log = logging.getLogger(__name__)
WEIGHTS_OF_A_THREAD = 1 << 18  # of a layer: half a MiB in bf16, some 20 us of reading
CHUNK_TIME_MS = 100.0  # of a pool without objectives: prompts are chunked to keep to it all the same


@dataclass(frozen=True, slots=True)
class EngineBundle:
    """A built engine before its start, and its parts."""

    engine: Engine
    limits: PoolLimits
    numerics_class: str
    threads: int
    torch_threads: int  # of torch's operators on the engine's thread
    profile: Profile | None  # None: it is not timed
    grammars: Grammars
    close: Callable[[], None] = lambda: None  # once the engine has ended: nothing else is left running
    checks_drafts: bool = False


def build_engine(
    settings: RunnerSettings, files: Files, source: Source, on_output: Callable[[Output], None],
    stopping: Callable[[], bool] = lambda: False, runner: RunnerId | None = None,
    gather: GatherRanks | None = None, progress: ByteProgress | None = None,
) -> EngineBundle:  # fmt: skip
    """Load the base, make its engine, and time it.

    `runner`: who it is, for other runners; None: it exchanges no KV with any. `gather`: ranks of other hosts.
    `progress`: of this process's weights.

    Raises ModelUnsupported, WeightsInvalid, ExecutorUnavailable, OutOfMemory, NoPolicyFits, DiskUnusable,
    StoppedAtStart.
    """
    started = time.perf_counter()
    spec = read_spec(files["config.json"], files)
    threads = rank_threads(settings, spec)
    with ExitStack() as ending:
        settings, policy, gather = _settled(settings, spec, files, threads, gather, stopping, ending)
        settings = settle_kv_pages(settle_limits(settings, spec), spec)
        ending.pop_all()  # of ranks that `make_executor` ends from now on
    executor = make_executor(settings, ModelSource(spec, files, threads, stopping, gather, runner, policy, progress))
    can, adapters = executor.can, executor.adapters
    limits = pool_limits(
        settings, spec, executor.page_bytes, slots=adapters.slots, keep_copies=adapters.page_bytes > 0,
        swaps=executor.kv_memory is not None,
    )  # fmt: skip

    def make_adapters(post: Callable[[Posted], None]) -> AdapterPool:
        return AdapterPool(executor.adapters, settings.max_rank, source, post)

    seconds = round(time.perf_counter() - started, 3)
    log.info("base loaded", extra=kv(layers=spec.layers, hidden=spec.hidden_size, threads=threads, seconds=seconds))
    identity = _kv_identity(settings, executor, can.ranks, runner)
    limits = replace(limits, kv=identity, kv_page_bytes=executor.page_bytes)
    if can.stages is not None:
        limits = replace(limits, most_adapter_pages=min(stage.frames for stage in can.stages()))
    profile = _profile(executor, limits) if settings.profile else None
    if profile is not None:
        limits = replace(limits, layer_by_layer_tokens=profile.layer_by_layer_tokens)
    grammars = Grammars(files.get("tokenizer.json"), spec.vocab_size, spec.eos)
    with suppress(GrammarRefused, ImportError):  # said to the first request that has one
        grammars.prepare()
    search = can.drafts if settings.speculation == "suffix" else None
    grammars.finds_forced = search is not None
    machine = Runner(limits, profile.model if profile else GUESS, search, checks_drafts=can.drafts is not None)
    engine = Engine(machine, executor, make_adapters, on_output, grammars=grammars)
    if can.packs is not None:
        can.packs.complete = engine.gaps.complete
    engine.post(FoundOnDisk(source.on_disk()))
    if can.ranks is not None:  # one that is lost ends an engine without work, too
        can.ranks.watch(engine.post)
    return EngineBundle(
        engine, limits, executor.numerics_class, threads, executor.torch_threads, profile, grammars, can.close,
        checks_drafts=can.drafts is not None,
    )  # fmt: skip


def _settled(
    settings: RunnerSettings, spec: ModelSpec, files: Files, threads: int, gather: GatherRanks | None,
    stopping: Callable[[], bool], ending: ExitStack,
) -> tuple[RunnerSettings, OffloadPolicy | None, GatherRanks | None]:  # fmt: skip
    """Settle the offload policy with the measurements of other hosts' ranks, which are gathered. `ending` ends them."""
    gathered: list[GatheredRanks] = []

    def rates() -> list[MachineRates]:
        if gather is None:
            return []
        gathered.append(gather(settings.ranks, files, stopping))
        ending.push(gathered[0].ending)
        for worker in gathered[0].workers:
            for channel in worker.channels:
                ending.callback(channel.close)
        return [worker.machine for worker in gathered[0].workers if worker.machine is not None]

    settings, policy = settle_offload(settings, spec, threads, rates)
    return settings, policy, (lambda _size, _files, _stopping: gathered[0]) if gathered else gather


def machine_here(settings: RunnerSettings, files: Files) -> MachineRates | None:
    """Measure this host, if the runner finds a policy. Raises DiskUnusable, ExecutorUnavailable."""
    if not settings.finds_policy:
        return None
    spec = read_spec(files["config.json"], files)
    return measured_machine(settings, spec, rank_threads(settings, spec))


def _kv_identity(
    settings: RunnerSettings, executor: Executor, ranks: Ranks | None, runner: RunnerId | None
) -> KvIdentity | None:
    """Return the runner's identity for KV exchange; None if KV neither leaves nor arrives."""
    if runner is None or not settings.kv_listen:
        return None
    memory, addresses = executor.kv_memory, ()
    if ranks is not None:
        memory, addresses = ranks.kv_shard, ranks.kv_addresses
    if memory is None:
        log.warning("this executor has no KV that can be sent: requests that move are computed again")
        return None
    layout = memory.layout + ("" if ranks is None else f"/{ranks.kv_grid}")
    return KvIdentity(runner, settings.pool, settings.base_digest, layout, addresses)


def _profile(executor: Executor, limits: PoolLimits) -> Profile:
    profile = measure_profile(executor, limits, drafts=executor.can.drafts is not None)
    if limits.kv is not None and (memory := executor.kv_memory) is not None:
        measured = measure_kv(executor, memory, limits)
        profile = replace(
            profile, layer_by_layer_tokens=measured.layer_by_layer_tokens, kv_bytes_per_s=measured.bytes_per_s
        )
    about = kv(
        best_batch=profile.best_batch, step_ms_1=round(profile.step_ms_1, 3), step_ms_best=profile.step_ms_best,
        prefill_tokens_per_s=round(profile.prefill_tokens_per_s), layer_by_layer_tokens=profile.layer_by_layer_tokens,
        kv_bytes_per_s=round(profile.kv_bytes_per_s),
    )  # fmt: skip
    log.info("profiled", extra=about)
    return profile


def pool_limits(
    settings: RunnerSettings, spec: ModelSpec, page_bytes: int, *, slots: int, keep_copies: bool = False,
    swaps: bool = False,
) -> PoolLimits:  # fmt: skip
    """Set limits for a shared budget of adapters and KV on the device, and for a budget in host memory.

    Copies of adapters are kept there where the device's memory is not this machine's; `swaps`: KV goes there, too.
    """
    by_hand = settings.by_hand or OffloadByHand()
    return PoolLimits(
        total_pages=settings.kv_pages, page_tokens=settings.page_tokens, max_sequences=settings.max_sequences,
        max_adapters=slots, max_context_tokens=min(spec.max_positions, settings.kv_pages * settings.page_tokens),
        vocab_size=spec.vocab_size, eos=spec.eos, short_tokens=spec.short_tokens, batch=batch_limits(settings),
        host_bytes=settings.host_mib << 20, page_bytes=page_bytes, keep_copies=keep_copies,
        swap_page_bytes=page_bytes if swaps else 0,
        most_adapter_pages=settings.kv_pages - by_hand.kv_disk_pages - by_hand.kv_host_pages,
    )  # fmt: skip


def batch_limits(settings: RunnerSettings) -> BatchLimits:
    """Limit a batch; a pass takes all that it can where weights come from disk, as it takes as long with one row.

    Prompts leave a place to each running sequence: else those would cut the last prompt, and another pass begin it.
    """
    if settings.offload.device_bytes:
        max_tokens, rows = settings.max_batch_tokens, settings.max_sequences
        return BatchLimits(
            rows, max_tokens, batching=settings.batching, max_prompt_tokens=max(max_tokens - rows, max_tokens // 2)
        )
    objective = settings.token_time_ms or inf
    return BatchLimits(settings.max_prefills, settings.max_batch_tokens, objective, settings.batching, CHUNK_TIME_MS)


def rank_threads(settings: RunnerSettings, spec: ModelSpec) -> int:
    """Choose each rank's threads: its part of the host's, or all where the ranks take turns (`offload.stages`)."""
    threads = settings.threads or default_threads(spec)
    return threads if settings.offload.device_bytes else max(1, threads // len(settings.ranks_here))


def default_threads(spec: ModelSpec) -> int:
    """Choose what the quota allows while a layer has enough weights for each: threads meet 8 or 12 times in it."""
    layer = spec.hidden_size * (2 * (spec.q_size + spec.kv_size) + 3 * spec.intermediate_size)
    return min(cpu_quota(), -(-layer // WEIGHTS_OF_A_THREAD))

"""An offload pool finds its own policy: the machine is measured, a process solves, and unset limits follow from it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from weft.domain.model.spec import ModelSpec
from weft.telemetry.logs import kv
from weft_runner.errors import NoPolicyFits, OffloadError
from weft_runner.executors import settle_executor
from weft_runner.executors.source import offload_formats
from weft_runner.offload.machine import MachineRates
from weft_runner.offload.plan import OffloadPlan, OffloadPolicy
from weft_runner.offload.policy import Budgets, Shares
from weft_runner.offload.serving import RunnerRequest, ServingLimits, serving_limits, stage_searches
from weft_runner.offload.wire import solve_ranks
from weft_runner.settings import DEVICE_BATCH_TOKENS, KV_PAGES, MAX_BATCH_TOKENS, MAX_SEQUENCES, RunnerSettings

log = logging.getLogger(__name__)
SOLVE_S = 60.0


def settle_offload(
    settings: RunnerSettings,
    spec: ModelSpec,
    threads: int,
    measure_hosts: Callable[[], Sequence[MachineRates]] = lambda: (),
) -> tuple[RunnerSettings, OffloadPolicy | None]:
    """Set every limit, and find the policy. None: the model does not offload, or nothing is to be solved.

    `measure_hosts`: waits for what the other hosts have measured, in their order. Raises NoPolicyFits, DiskUnusable,
    ExecutorUnavailable.
    """
    if not settings.finds_policy:
        return settings, None
    settings, _ = settle_executor(settings, spec)
    stages = settings.pipeline_parallel
    hosts = [measured_machine(settings, spec, threads), *measure_hosts()]
    machines = {stage: hosts[stage // len(settings.ranks_here)] for stage in range(stages)}
    if settings.sparse_attention and not all(machine.sparse_pays for machine in hosts):
        settings = replace(settings, sparse_attention=0.0)
        # as long as attention to all keys; 0: not measured
        times = min(
            round(host.attention / host.sparse_attention, 2) if host.sparse_attention else 0.0 for host in hosts
        )
        log.warning("sparse attention is off: it is not a tenth faster here", extra=kv(times=times))
    requests = stage_searches(spec, machines, _runner_request(settings))
    try:
        plans = solve_ranks(requests, SOLVE_S)
    except NoPolicyFits:
        raise
    except OffloadError as error:
        log.warning("no policy was found: as many weights stay as fit", extra=kv(reason=error))
        limits = ServingLimits(KV_PAGES, MAX_SEQUENCES, MAX_BATCH_TOKENS)
        return _limited(settings, limits), OffloadPolicy(machines, {})
    limits = serving_limits({rank: (requests[rank], plan) for rank, plan in plans.items()})
    _log(plans, limits)
    return _limited(replace(settings, max_sequences=0, max_batch_tokens=0), limits), OffloadPolicy(machines, plans)


def measured_machine(settings: RunnerSettings, spec: ModelSpec, threads: int) -> MachineRates:
    """Measure this host, or read what an earlier start has measured. Raises DiskUnusable, ExecutorUnavailable."""
    settings, kind = settle_executor(settings, spec)
    return kind.measure(settings, spec, threads)


def _runner_request(settings: RunnerSettings) -> RunnerRequest:
    return RunnerRequest(
        Budgets(settings.offload.device_bytes, settings.offload.host_bytes, settings.offload.disk_bytes),
        offload_formats(settings), stages=settings.pipeline_parallel, hosts=settings.hosts,
        max_adapters=settings.max_adapters, max_rank=settings.max_rank, max_sequences=settings.max_sequences,
        max_batch_tokens=settings.max_batch_tokens, kv_pages=settings.kv_pages, page_tokens=settings.page_tokens,
        device_batch_tokens=DEVICE_BATCH_TOKENS,
    )  # fmt: skip


def _limited(settings: RunnerSettings, limits: ServingLimits) -> RunnerSettings:
    """Replace limits of 0 by the limits of the policy."""
    return replace(
        settings,
        kv_pages=settings.kv_pages or limits.pages,
        max_sequences=settings.max_sequences or limits.sequences,
        max_batch_tokens=settings.max_batch_tokens or max(limits.batch_tokens, limits.sequences),
    )


def _log(plans: Mapping[int, OffloadPlan], limits: ServingLimits) -> None:
    """Log the plan in a line for each rank."""
    for rank, plan in plans.items():
        policy, predicted = plan.policy, plan.predicted
        about = kv(
            rank=rank, block=policy.block, device_batch=policy.batch, weights=_shares(policy.weights),
            activations=_shares(policy.activations), kv=_shares(policy.kv),
            tokens_per_s=round(predicted.tokens_per_s, 2), token_ms=round(predicted.token.pass_s * 1e3, 2),
            one_request_token_ms=round(predicted.token_1_s * 1e3, 2), kv_pages=limits.pages,
            max_sequences=limits.sequences, max_batch_tokens=limits.batch_tokens,
        )  # fmt: skip
        log.info("the policy of offloading", extra=about)


def _shares(shares: Shares) -> str:
    parts = {"device": shares.device, "host": shares.host, "disk": shares.disk}
    return ", ".join(f"{share:.0%} {tier}" for tier, share in parts.items() if share > 0.0)

"""The autoscaler at work: wanted runners and victims of a pool, whenever its load, bounds or runners change.

A victim is *cordoned*: nothing new is placed on it, what runs there runs on.
"""

from collections.abc import Iterable, Iterator

from weft.domain.ids import BASE
from weft.domain.routes import PhaseCounts
from weft.domain.runner import RunnerRole
from weft_scheduler.core.policy.autoscaling.demand import PoolLoad, ReplicaBounds
from weft_scheduler.core.policy.autoscaling.groups import VictimCandidate
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.state import State
from weft_scheduler.core.timers import Timer, TimerKind


def scale(state: State, pool: Pool, *, at_once: bool = False) -> None:
    """Decide the number of wanted runners and the victims. `at_once`: for a request that arrived now.

    Nothing shrinks while a request waits, and one that waits longer than a moment gets every runner that is there. Nor
    is a runner released before this process knows the cluster.
    """
    autoscaler, spec, going = pool.scaling.autoscaler, pool.spec, PhaseCounts()
    phases = pool.scaling.phase_bounds(pool.declared)
    if spec is not None:
        deadline = autoscaler.recommend(
            load_of(pool, state.now),
            ReplicaBounds(spec.min_runners, spec.max_runners or None),
            state.now,
            window_s=spec.idle_s or state.config.give_back_s,
            work_s=state.config.work_s,
            keep=not state.settled or (len(pool.waiting.queue) > 0 and not at_once),
            phases=phases,
        )
        if deadline is not None:
            state.timers.set(Timer(TimerKind.SCALE_DOWN, pool.name), deadline)
        going = autoscaler.surplus(phases.groups)
    staying = [*_candidates(pool, autoscaler.victims)]
    # All runners are compared (1.1 ms for 1,000) only where more have to go than before, at most once a publication.
    everybody = [*_candidates(pool, pool.fleet.runners)] if autoscaler.needs_more(going, staying) else staying
    for uuid in autoscaler.select_victims(going, staying, everybody):
        runner = state.runners.get(uuid)
        if runner is not None and runner.cordon(uuid in autoscaler.victims):
            state.update_runner(runner)


def demand(state: State, pool: Pool) -> PhaseCounts:
    """Return the runners filled by the pool's requests, without bounds."""
    return pool.scaling.autoscaler.demand(load_of(pool, state.now), state.config.work_s)


def load_of(pool: Pool, now: float) -> PoolLoad:
    """Return a pool as the autoscaler sees it."""
    waiting, spec, capacity = pool.waiting, pool.declared, pool.fleet.capacity
    queued = waiting.queued_by_adapter  # of many adapters: those that are not counted are looked up, not the others
    return PoolLoad(
        running=waiting.running - waiting.batch.running,
        queued=len(waiting.queue),
        reserved_tokens=capacity.interactive_tokens,
        queued_tokens=waiting.queued_tokens,
        busy_slots=capacity.sum.busy_slots,
        queued_prompt_tokens=waiting.queued_prompt_tokens,
        ttft_s=spec.slo_ttft_s,
        split=spec.split,
        prompt_tokens_per_s=pool.scaling.arrivals.prompt_tokens_per_s(now),
        reused_share=pool.scaling.reuse.share(now),
        batch=waiting.batch.total > 0,
        queued_adapters=len(queued) - sum(digest in queued for digest in (BASE, *pool.adapters.pinned)),
    )


def _candidates(pool: Pool, uuids: Iterable[str]) -> Iterator[VictimCandidate]:
    """Yield the runners that count as candidates. A draining runner is leaving already."""
    groups = pool.scaling.phase_bounds(pool.declared).groups
    for uuid in uuids:
        runner = pool.fleet.runners.get(uuid)
        if runner is None or runner.spec is None or runner.counted.contribution is None:
            continue
        group = runner.spec.role.value if groups and runner.spec.role not in (None, RunnerRole.MIXED) else "any"
        role = pool.scaling.roles.base.get(uuid, RunnerRole.MIXED)
        yield VictimCandidate(runner.accounts.working_set, -runner.arrival, uuid, role, group)

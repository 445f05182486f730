"""Forecast prefetch at work: once a period runners are sent the digests of adapters that requests may name soon.

It is a hint beside the desired adapters, not one of them: readiness and statuses follow from what is desired, and a
forecast must change neither. No law depends on it, and what is lost of it is not repeated.
"""

from weft.domain.runner import OrderedRunner, RunnerOrder
from weft_scheduler.core.effects import Prefetched
from weft_scheduler.core.model.pool import Pool
from weft_scheduler.core.policy.prefetch.prefetch import PrefetchRunner, orders
from weft_scheduler.core.state import State
from weft_scheduler.core.timers import Timer, TimerKind


def on_arrival(state: State, pool: Pool, digest: str) -> None:
    """A new request names an adapter."""
    if pool.declared.prefetch != "never":
        pool.candidates.arrived(digest, state.now)


def expect(state: State, pool: Pool) -> None:
    """Let a pool whose adapters are requested be looked at within a period."""
    timer = Timer(TimerKind.PREFETCH, pool.name)
    if timer not in state.timers and pool.runners and pool.candidates.known and pool.declared.prefetch != "never":
        state.timers.set(timer, state.now + state.config.prefetch_s)


def order_fetches(state: State, pool: Pool) -> None:
    """Judge some adapters anew, and send runners what is worth a fetch and they may lack."""
    if not state.registry_known or pool.declared.prefetch == "never":
        return
    adapters = pool.adapters
    pool.candidates.judge(lambda: adapters.by_digest, len(adapters.by_digest), state.now)
    ranked = [
        one for one in pool.candidates.ranked() if adapters.registered(one.digest) and one.digest not in adapters.held
    ]
    runners = [
        PrefetchRunner(r.id.uuid, r.working_set, r.good_sequences, r.figures.prefetching > 0, r.brought)
        for r in pool.runners.values()
        if r.placeable
    ]
    for uuid, digests in orders(ranked, runners):
        runner = pool.runners[uuid]
        runner.bring(digests)
        supervisor = state.supervisors[runner.supervisor]
        state.send(supervisor, OrderedRunner(runner.id, RunnerOrder(prefetch=digests)))
        state.emit(Prefetched(pool.name, runner.id, digests))
    expect(state, pool)

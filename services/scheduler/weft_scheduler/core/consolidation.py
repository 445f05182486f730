"""Consolidation at work: once a period a pool's lightly loaded runner is emptied, where that is worth its migrations.

A migration is a preemption that the policy chose: the gateway stops the sequence, reports the exact number of tokens,
and the request is placed again by the pool's own policies, in its numerics class. So it can fail in no new way.
"""

from collections.abc import Sequence

from weft_scheduler.core.effects import Consolidated
from weft_scheduler.core.migration import migrate_with_kv
from weft_scheduler.core.model.request import Phase
from weft_scheduler.core.model.runner import Contact, RunnerAccount
from weft_scheduler.core.policy.consolidation.consolidation import (
    MAX_CONSOLIDATIONS,
    ConsolidationRunner,
    RunningSequence,
    select_leaving,
    select_sources,
)
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.request_lifecycle import preempt
from weft_scheduler.core.scaling import demand
from weft_scheduler.core.state import State


def due(state: State, pool: Pool) -> float | None:
    """Return when to look at a pool next: within a period where something runs or it packs; None: not at all."""
    return (
        state.now + state.config.consolidation_s
        if pool.fleet.prefers_packing or (pool.waiting.running and _releases(pool))
        else None
    )


def consolidate(state: State, pool: Pool) -> bool:
    """Order the migrations that empty one runner, if the pool is in balance: without waiting requests, and not growing.

    Until the next period new requests are packed, unless more runners are to come. True: look again.
    """
    wanted_runners, present = sum(demand(state, pool)), pool.fleet.capacity.runners
    grows = present < min(wanted_runners, pool.declared.max_runners or wanted_runners)
    pool.fleet.pack(prefer=_releases(pool) and wanted_runners > 0 and not grows)
    if not _releases(pool) or len(pool.waiting.queue) or len(pool.waiting.batch.queue) or wanted_runners > present:
        return True
    runners = [candidate for runner in pool.fleet.runners.values() if (candidate := _runner(runner, pool)) is not None]
    for source in select_sources(runners):
        sequences = _sequences(state, pool, source.uuid)
        leaving = select_leaving(source, sequences, runners, state.config.consolidation_s) if sequences else []
        if leaving:
            _empty(state, pool, source.uuid, [sequence.request_id for sequence in leaving])
            break
    return True


def _empty(state: State, pool: Pool, uuid: str, request_ids: Sequence[str]) -> None:
    """Order these requests off a runner, with their KV if this is cheaper."""
    in_kv = dict(pool.fleet.runners[uuid].report.in_kv())
    for request_id in request_ids:
        request = state.requests[request_id]
        request.history.consolidate()
        if not migrate_with_kv(state, pool, request, in_kv[request_id], "consolidation"):
            preempt(state, request)
    state.emit(Consolidated(pool.name, state.runners[uuid].id, tuple(request_ids)))


def _releases(pool: Pool) -> bool:
    """Return whether an idle runner is of use: it can be released, or the pool wants it idle.

    Never where phases are split: the pool's placement spreads load over the shortest queues, and would spread it again.
    """
    spec, runners = pool.declared, pool.fleet.capacity.runners
    return (runners > 1 and not spec.split) and (
        spec.consolidation == "always" or (spec.consolidation == "autoscaled" and runners > spec.min_runners)
    )


def _runner(runner: RunnerAccount, pool: Pool) -> ConsolidationRunner | None:
    spec, pinned = runner.spec, pool.adapters.pinned
    if spec is None or runner.contact is not Contact.PRESENT or runner.report.figures.draining:
        return None
    return ConsolidationRunner(
        uuid=runner.id.uuid,
        shape=runner.shape,
        accepts=runner.placeable,
        working_set=runner.accounts.working_set,
        good_sequences=runner.accounts.good_sequences,
        packed_sequences=runner.accounts.packed_sequences
        if pool.fleet.prefers_packing
        else runner.accounts.good_sequences,
        free_tokens=runner.accounts.free_tokens,
        total_tokens=spec.total_pages * spec.page_tokens,
        page_tokens=spec.page_tokens,
        busy_adapters=frozenset(runner.accounts.busy_adapters(pinned)),
        slots=spec.max_adapters,
        step_s=spec.step_s(runner.accounts.working_set),
        prefill_tokens_per_s=spec.prefill_tokens_per_s,
    )


def _sequences(state: State, pool: Pool, uuid: str) -> Sequence[RunningSequence] | None:
    """Return what runs on a runner; None if something has just come or is about to leave."""
    runner = pool.fleet.runners[uuid]
    if (
        runner.accounts.unacked
        or runner.report.overdue_pages
        or len(runner.accounts.owned) != len(runner.report.sequences)
    ):
        return None
    sequences: list[RunningSequence] = []
    for request_id, in_kv in runner.report.in_kv():
        request = state.requests.get(request_id)
        if request is None or request.phase is not Phase.RUNNING or request.runner != runner.id:
            return None
        emitted = request.tokens.emitted_with(in_kv)
        sequences.append(
            RunningSequence(
                request_id,
                request.adapter,
                pool.adapters.rank(request.adapter),
                request.tokens.context,
                request.tokens.prompt + emitted,
                request.reservation.footprint_after(emitted),
                request.tokens.expected_remaining(emitted),
                request.history.consolidations < MAX_CONSOLIDATIONS and not request.reservation.stays,
            )
        )
    return sequences

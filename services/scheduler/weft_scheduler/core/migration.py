"""Migrations that take the KV along: off runners that should go, and for consolidation.

A move is one Assign of a higher epoch with `kv_address`: its gateway freezes the sequence, the source sends its KV to
the target under the target's reservation, and the stream goes on there. Whatever fails of it becomes a recomputation.
So a runner that should go is emptied in order: it takes nothing new, what it runs moves, it is idle when it is removed.
"""

from weft.domain.runner import RunnerRole
from weft_scheduler.core.effects import KvMigration
from weft_scheduler.core.model.pool import Pool
from weft_scheduler.core.model.request import Phase, Request
from weft_scheduler.core.model.runner import RunnerAccount
from weft_scheduler.core.policy.phases.kv_cost import transfer_is_cheaper
from weft_scheduler.core.policy.placement.policy import PlacementRequest
from weft_scheduler.core.policy.placement.splitwise import domain_of
from weft_scheduler.core.request_lifecycle import migrate
from weft_scheduler.core.state import State
from weft_scheduler.core.timers import Timer, TimerKind

ROUND_S = 0.25  # between two rounds
MIGRATIONS = 4  # of a source in a round: their KV shares its network
MAX_KV_MIGRATIONS = 8  # of a request: a stream that pauses for the system's own reasons does so rarely
LEAST_S = 1.0  # a sequence that is expected to end sooner ends where it is


def expect(state: State, pool: Pool) -> None:
    """Let runners that should go be emptied, where anything runs on them."""
    if any(_movable(pool, uuid) for uuid in pool.autoscaler.victims):
        state.timers.set_earlier(Timer(TimerKind.MIGRATION, pool.name), state.now + ROUND_S)


def empty_victims(state: State, pool: Pool) -> None:
    """One round of moves off the runners that should go; others follow while any runs there."""
    if len(pool.queue):  # what is free is theirs
        expect(state, pool)
        return
    ordered = False
    for uuid in [*pool.autoscaler.victims]:
        source = pool.runners.get(uuid)
        if source is None or source.spec is None:
            continue
        migrations = 0
        for request_id, in_kv in [*source.in_kv()]:
            request = state.requests.get(request_id)
            if request is None or request.placement is None or request.runner != source.id:
                continue
            lasts_s = request.expected_remaining(request.emitted_with(in_kv)) * source.spec.step_s(source.working_set)
            if (not source.spec.step_ms_best or lasts_s >= LEAST_S) and migrate_with_kv(
                state, pool, request, in_kv, "scale_in"
            ):
                migrations, ordered = migrations + 1, True
            if migrations == MIGRATIONS:
                break
    if ordered:
        expect(state, pool)


def migrate_with_kv(state: State, pool: Pool, request: Request, in_kv: int, reason: str) -> bool:
    """Move a running request with its `in_kv` tokens, where a runner can take it and that is cheaper. True: it goes.

    Only what its runner has reported under its present epoch, with its prompt computed, and on one runner.
    """
    placement, source = request.placement, state.runner(request.runner)
    if placement is None or placement.token is not None or request.phase is not Phase.RUNNING or source is None:
        return False
    known = source.confirmed and source.includes(request.id, request.epoch) and in_kv >= request.prompt_tokens
    if not known or not source.shape.kv_layout or request.kv_migrations >= MAX_KV_MIGRATIONS:
        return False
    emitted = request.emitted_with(in_kv)
    target = _target(state, pool, request, source, emitted)
    if target is None or target.spec is None or source.spec is None:
        return False
    rates = [spec.kv_bytes_per_s or state.config.kv_bytes_per_s for spec in (source.spec, target.spec)]
    if not transfer_is_cheaper(target.spec, in_kv, min(rates)):
        return False
    request.emitted(emitted)
    request.migrated_with_kv()
    migrate(state, pool, request, target)
    state.emit(KvMigration(request.id, pool.name, target.id, reason))
    return True


def _target(state: State, pool: Pool, request: Request, source: RunnerAccount, emitted: int) -> RunnerAccount | None:
    """Where placement would put it, if that exchanges KV with its runner. Room for what is emitted meanwhile, too."""
    assert source.spec is not None
    across = pool.declared.kv_across_classes
    rank, n_bytes = pool.adapters.size(request.adapter)
    choice = pool.placement.place(
        PlacementRequest(
            adapter=request.adapter,
            rank=rank,
            footprint_tokens=request.footprint_after(emitted) + source.spec.page_tokens,
            context_tokens=request.context_tokens,
            numerics_class="" if across else source.shape.numerics_class,
            avoid={source.id.uuid},
            skip_limit=state.config.skip_limit,
            adapter_bytes=n_bytes,
            one_runner=True,
        ),
        (),
    )
    target = state.runners[choice.uuid] if choice is not None else None
    if target is None or target.role is RunnerRole.PROMPT:
        return None
    same = domain_of(target.shape, across) == domain_of(source.shape, across)
    return target if same and target.shape.kv_layout else None


def _movable(pool: Pool, uuid: str) -> bool:
    source = pool.runners.get(uuid)
    return source is not None and bool(source.owned) and bool(source.shape.kv_layout) and len(pool.runners) > 1

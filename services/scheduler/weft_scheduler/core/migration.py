"""Migrations that take the KV along: off runners that should go or end, for consolidation, for those preempted.

A move is one Assign of a higher epoch with `kv_address`: its gateway freezes the sequence, the source sends its KV to
the target under the target's reservation, and the stream continues there. Whatever fails of it becomes a
recomputation. So a runner that should go is emptied in order: it takes nothing new, what it runs moves, it is idle when
it is removed. One that ends without having been named before (SIGTERM) says so in its report, and is emptied at once.
"""

from weft.domain.runner import RunnerRole
from weft_scheduler.core.effects import KvMigration
from weft_scheduler.core.model.request import Phase, Request
from weft_scheduler.core.model.runner import Contact, RunnerAccount
from weft_scheduler.core.policy.phases.kv_cost import transfer_is_cheaper
from weft_scheduler.core.policy.placement.policy import PlacementRequest
from weft_scheduler.core.policy.placement.splitwise import domain_of
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.request_lifecycle import migrate
from weft_scheduler.core.state import State
from weft_scheduler.core.timers import Timer, TimerKind

ROUND_S = 0.25  # time between two rounds
MIGRATIONS = 4  # migrations off a source in a round: their KV shares its network
MAX_KV_MIGRATIONS = 8  # migrations of a request: a stream that pauses for the system's own reasons does so rarely
MIN_REMAINING_S = 1.0  # a sequence that is expected to end sooner ends where it is


def due(state: State, pool: Pool, after_s: float = ROUND_S) -> float | None:
    """Return the time to empty leaving or ending runners; None if no sequence runs on them."""
    return state.now + after_s if (pool.fleet.draining or pool.scaling.autoscaler.victims) and _sources(pool) else None


def expect_at_once(state: State, pool: Pool) -> None:
    """Begin to empty ending runners, which have only seconds."""
    if (at := due(state, pool, 0.0)) is not None:
        state.timers.set_earlier(Timer(TimerKind.MIGRATION, pool.name), at)


def empty_runners(state: State, pool: Pool) -> bool:
    """Order one round of moves. Return True if more rounds follow, while sequences run there. An ending runner does not
    wait.
    """
    queued, again = len(pool.waiting.queue) > 0, False  # what is free is for queued requests, before a victim's
    for source in _sources(pool):
        ends = source.report.figures.draining
        ordered = (ends or not queued) and _empty(state, pool, source)
        again |= ordered or ends or queued
    return again


def _empty(state: State, pool: Pool, source: RunnerAccount) -> bool:
    """Order requests off a runner. True if any was."""
    assert source.spec is not None
    ends, migrations = source.report.figures.draining, 0
    for request_id, in_kv in [*source.report.in_kv()]:
        request = state.requests.get(request_id)
        if request is None or request.placement is None or request.runner != source.id:
            continue
        lasts_s = request.tokens.expected_remaining(request.tokens.emitted_with(in_kv)) * source.spec.step_s(
            source.accounts.working_set
        )
        if source.spec.step_ms_best and lasts_s < MIN_REMAINING_S and not ends:
            continue
        migrations += migrate_with_kv(state, pool, request, in_kv, "drain" if ends else "scale_in")
        if migrations == MIGRATIONS and not ends:
            break
    return migrations > 0


def migrate_with_kv(state: State, pool: Pool, request: Request, in_kv: int, reason: str) -> bool:
    """Move a running request with its `in_kv` tokens, if a runner can take it and that is cheaper. True: it goes.

    Only a request that its runner has reported under its present epoch, with its prompt computed, and on one runner.
    """
    placement, source = request.placement, state.runners.present(request.runner)
    if placement is None or placement.token is not None or request.phase is not Phase.RUNNING or source is None:
        return False
    reported = source.contact is Contact.PRESENT and source.report.includes(request.id, request.epoch)
    if not reported or in_kv < request.tokens.prompt:
        return False
    if not source.shape.kv_layout or request.history.kv_migrations >= MAX_KV_MIGRATIONS:
        return False
    emitted = request.tokens.emitted_with(in_kv)
    target = _target(state, pool, request, source, emitted)
    if target is None or target.spec is None or source.spec is None:
        return False
    rates = [spec.kv_bytes_per_s or state.config.kv_bytes_per_s for spec in (source.spec, target.spec)]
    if not transfer_is_cheaper(target.spec, in_kv, min(rates)):
        return False
    request.tokens.emit(emitted)
    request.history.migrate_with_kv()
    migrate(state, pool, request, target)
    state.emit(KvMigration(request.id, pool.name, target.id, reason))
    return True


def _target(state: State, pool: Pool, request: Request, source: RunnerAccount, emitted: int) -> RunnerAccount | None:
    """Return the runner chosen by placement, if it exchanges KV with `source` and has room for the tokens."""
    assert source.spec is not None
    across = pool.declared.kv_across_classes
    rank, n_bytes = pool.adapters.size(request.adapter)
    tokens = request.reservation.footprint_after(emitted) + source.spec.page_tokens
    choice = pool.fleet.placement.place(
        PlacementRequest(
            adapter=request.adapter,
            rank=rank,
            footprint_tokens=tokens,
            context_tokens=request.tokens.context,
            numerics_class="" if across else source.shape.numerics_class,
            avoid={source.id.uuid} | pool.kept_from(request, tokens),
            skip_limit=state.config.skip_limit,
            adapter_bytes=n_bytes,
            one_runner=True,
        ),
        (),
    )
    target = state.runners[choice.uuid] if choice is not None else None
    if target is None or target.role is RunnerRole.PROMPT:
        return None
    is_same_domain = domain_of(target.shape, across) == domain_of(source.shape, across)
    return target if is_same_domain and target.shape.kv_layout else None


def _sources(pool: Pool) -> list[RunnerAccount]:
    """Return the runners with sequences to move and KV to send."""
    if len(pool.fleet.runners) < 2:
        return []
    leaving = (
        pool.fleet.runners.get(uuid)
        for uuid in {**pool.fleet.draining, **dict.fromkeys(pool.scaling.autoscaler.victims)}
    )
    return [runner for runner in leaving if runner is not None and runner.accounts.owned and runner.shape.kv_layout]

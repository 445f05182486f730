"""Roles at work: which runner of a pool computes which phase, ordered through the supervisor.

A role is a state of a runner: what runs there runs on, and no stream notices.
"""

from weft.domain.runner import OrderedRunner, RunnerOrder, RunnerRole
from weft_scheduler.core.effects import RoleChanged
from weft_scheduler.core.model.request import PROMPT_TOKENS
from weft_scheduler.core.model.runner import Contact, RunnerAccount
from weft_scheduler.core.policy.phases.roles import REPLANNED, REVIEW_S, PhaseRunner
from weft_scheduler.core.policy.placement.splitwise import domain_of
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.state import State
from weft_scheduler.core.timers import Timer, TimerKind


def due(state: State, pool: Pool) -> float | None:
    """Return when the roles of a pool may change next; None: not before the pool changes."""
    return (
        pool.scaling.roles.next_review(state.now, waiting=len(pool.waiting.queue) > 0) if pool.declared.split else None
    )


def plan(state: State, pool: Pool) -> None:
    """Plan the roles again: usable runners have come or gone, or the pool's spec has changed."""
    if pool.declared.split and len(pool.fleet.runners) > REPLANNED and pool.scaling.roles.base:
        state.timers.set_earlier(Timer(TimerKind.ROLES, pool.name), state.now + REVIEW_S)  # several at a time
        return
    _plan(state, pool)


def _plan(state: State, pool: Pool) -> None:
    pool.fleet.planned()
    if pool.declared.split:
        pool.scaling.roles.plan(_runners(pool), state.now)
    _order_all(state, pool, "runners")
    if (at := due(state, pool)) is not None:
        state.timers.set_earlier(Timer(TimerKind.ROLES, pool.name), at)


def review(state: State, pool: Pool) -> bool:
    """Change roles by the queue, and from time to time by the mix of requests. Return True to look again."""
    if not pool.declared.split:
        return False
    if pool.scaling.roles.resumes(state.now) or pool.fleet.roles_stale:
        _plan(state, pool)
    pool.scaling.roles.review(_runners(pool), state.now, waiting=len(pool.waiting.queue) > 0)
    _order_all(state, pool, "load")
    return True


def on_kv_lost(state: State, pool: Pool) -> None:
    """Count a failed transfer. After several in a row both phases run on one runner for a while."""
    if pool.declared.split and pool.scaling.roles.lost(state.now):
        _plan(state, pool)


def order_role(state: State, runner: RunnerAccount) -> None:
    """Send a runner its role, if its role or the last order differs."""
    if runner.report.figures.role is runner.sent.role:
        runner.send(runner.sent._replace(role=None))
    if runner.contact is Contact.PRESENT and (runner.sent.role or runner.report.figures.role) is not runner.role:
        runner.send(runner.sent._replace(role=runner.role))
        state.send(state.supervisors[runner.supervisor], OrderedRunner(runner.id, RunnerOrder(role=runner.role)))


def _order_all(state: State, pool: Pool, reason: str) -> None:
    for runner in pool.fleet.runners.values():
        uuid, old_role = runner.id.uuid, runner.role
        role = pool.scaling.roles.role_of(uuid) if pool.declared.split else RunnerRole.MIXED
        if runner.take_role(role, alone=uuid not in pool.scaling.roles.base):
            state.update_runner(runner)
        if role is not old_role:
            state.emit(RoleChanged(pool.name, runner.id, role.value, reason))
        order_role(state, runner)


def _runners(pool: Pool) -> list[PhaseRunner]:
    return [_seen(runner, pool) for runner in pool.fleet.runners.values() if runner.counted.accepting is not None]


def _seen(runner: RunnerAccount, pool: Pool) -> PhaseRunner:
    spec = runner.spec
    assert spec is not None, runner.id
    total_tokens = spec.total_pages * spec.page_tokens
    measured = spec.prefill_tokens_per_s and spec.step_ms_best and spec.best_batch
    return PhaseRunner(
        uuid=runner.id.uuid,
        domain=domain_of(runner.shape, pool.declared.kv_across_classes),
        preferred=spec.role if spec.role is not RunnerRole.MIXED else None,
        prompt_s=1 / spec.prefill_tokens_per_s if measured else 1.0,
        token_s=spec.step_ms_best / 1000 / spec.best_batch if measured else float(PROMPT_TOKENS),
        pending_prompt_tokens=runner.accounts.pending_prompt_tokens,
        queue_open=runner.accounts.pending_prompt_tokens < runner.accounts.prompt_queue_tokens,
        reserved_share=1 - runner.accounts.free_tokens / total_tokens,
    )

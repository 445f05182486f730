"""The admission of a request that has come: it runs, waits, or is rejected by its pool's bound or objective."""

from weft.domain.request import RejectReason
from weft_scheduler.core.cycle import schedule
from weft_scheduler.core.effects import Queued
from weft_scheduler.core.model.request import Phase, Request
from weft_scheduler.core.model.runner import PROMPT_QUEUE_S
from weft_scheduler.core.policy.autoscaling.throughput import bounded_retry_ms, retry_after_ms
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.request_lifecycle import enqueue, reject
from weft_scheduler.core.state import State
from weft_scheduler.core.view import infeasible_reason


def admit(state: State, pool: Pool, request: Request) -> None:
    """Enqueue a request and run one scheduling cycle: afterwards it runs, waits, or is rejected."""
    waiting = pool.waiting
    enqueue(state, pool, request)
    infeasible = infeasible_reason(state, pool, request)
    if infeasible is not None:
        reject(state, request, *infeasible)
        return
    changed = state.take_changed(pool.name)
    out_of_reach = waiting.overtaking_of(request).out_of_reach(waiting.queue_of(request), request)
    if changed is None or changed or not out_of_reach or waiting.batch.running:
        schedule(state, pool, changed)
    if request.phase is not Phase.WAITING:
        return
    if request.batch:
        state.emit(Queued(request.id, pool.name, "no runner has capacity beside interactive requests"))
        return
    if not request.history.admitted and _is_full_for(pool, request.tenant):
        message = f"{len(waiting.queue) - 1} requests wait for {pool.name}"
        reject(state, request, RejectReason.QUEUE_FULL, message, estimate_retry_ms(pool, request, state.now))
        return
    if pool.declared.slo_reject and not request.history.admitted and _rejected_for_slo(state, pool, request):
        return
    if pool.scaling.autoscaler.victims:
        state.mark_schedulable(pool.name, ())  # one that should have gone may be needed again
    state.emit(Queued(request.id, pool.name, "no runner has capacity"))


def _rejected_for_slo(state: State, pool: Pool, request: Request) -> bool:
    """Reject a request that would get its first token too late. True if it was."""
    objective_s = pool.declared.slo_ttft_s
    left_s = objective_s - (state.now - request.order[0])
    wait_s = estimate_first_token_s(pool, request, left_s)
    if wait_s <= left_s:
        return False
    message = f"It would come in about {wait_s:.1f} s; the objective is {objective_s:g} s."
    reject(state, request, RejectReason.SLO_UNATTAINABLE, message, bounded_retry_ms(wait_s - left_s))
    return True


def _is_full_for(pool: Pool, tenant: str) -> bool:
    """Return whether more requests wait than may, and more of this tenant than its share of the bound by weight."""
    limit, waiting = pool.declared.max_queue if pool.spec is not None else 0, pool.waiting.queue
    if not 0 < limit < len(waiting):
        return False
    share = limit * waiting.counters.weight(tenant) / waiting.counters.waiting_weight
    return len(waiting.of_tenant(tenant)) > share


def estimate_first_token_s(pool: Pool, request: Request, limit_s: float) -> float:
    """Return in how many seconds a waiting request gets its first token; 0: nothing was measured yet.

    Ahead of the request is what its tenant has before it, at the tenant's share of what runners compute; never more
    than all that waits. Counting ends beyond `limit_s`. Where the request waits for a prompt runner alone, prompts are
    ahead of it, and what such a runner has before any of them.
    """
    prompts = _waits_for_prompts(pool, request)
    per_s = pool.prompt_tokens_per_s if prompts else pool.work_per_s
    if not per_s:
        return 0.0
    queue, counters = pool.waiting.queue, pool.waiting.queue.counters
    share = counters.weight(request.tenant) / counters.waiting_weight
    tokens_ahead = request.tokens.prompt if prompts else request.waiting.work
    for rival in queue.of_tenant(request.tenant):
        if rival is request or tokens_ahead > limit_s * per_s * share:
            break
        tokens_ahead += rival.tokens.prompt if prompts else rival.waiting.work
    waiting = pool.waiting.queued_prompt_tokens if prompts else pool.waiting.queued_work
    return min(tokens_ahead / share, waiting) / per_s + PROMPT_QUEUE_S * prompts


def estimate_retry_ms(pool: Pool, request: Request, now: float) -> int:
    """Return when a rejected client should come again, in ms: half of what waits will have left the queue."""
    if _waits_for_prompts(pool, request) and pool.prompt_tokens_per_s:
        return bounded_retry_ms(pool.waiting.queued_prompt_tokens / 2 / pool.prompt_tokens_per_s)
    return retry_after_ms(len(pool.waiting.queue), pool.scaling.departures.per_s(now))


def _waits_for_prompts(pool: Pool, request: Request) -> bool:
    """Return whether a token runner has room for a waiting request, so that its first token waits only for prompts."""
    return pool.splits(request) and pool.fleet.placement.free_tokens() >= request.reservation.footprint_tokens

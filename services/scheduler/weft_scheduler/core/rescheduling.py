"""A request leaves a runner and is placed again: under a higher epoch, with its age, a bounded number of times.

Exactly one new placement follows each epoch's end: the first trigger (the gateway's Failed, a deadline here) takes the
request off its runner and back to the queue; later triggers of that epoch find it there and change nothing. When a
lease runs out the gateway is informed and answers, rather than the request requeued at once: the gateway alone
knows how many tokens were emitted; a gateway that stays silent for `assign_s` loses that privilege.
"""

from collections import Counter
from collections.abc import Iterable

from weft.domain.ids import RunnerId
from weft.domain.request import Failed, FailReason, RejectReason, RunnerGone
from weft.domain.runner import PreemptDecision
from weft_scheduler.core.effects import KvHandOff, Requeued, Stale
from weft_scheduler.core.migration import migrate_with_kv
from weft_scheduler.core.model.gateway import Avoidance, GatewayStream
from weft_scheduler.core.model.request import Phase, Request
from weft_scheduler.core.model.runner import Contact, RunnerAccount
from weft_scheduler.core.phases import on_kv_lost
from weft_scheduler.core.policy.placement.runner_index import RunnerShape
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.request_lifecycle import enqueue, order_off, overran, reject, release, stop
from weft_scheduler.core.state import State
from weft_scheduler.core.timers import Timer, TimerKind
from weft_scheduler.core.view import infeasible_reason

UNCOUNTED = frozenset({FailReason.NO_CAPACITY, FailReason.PREEMPTED})  # the system's own doing
LOAD_RETRY_FACTOR = 10  # a failed load is retried on the same runner after this many `avoid_s`


def on_failed(state: State, gateway: GatewayStream, failed: Failed) -> None:
    """Place a request again after a failed epoch, unless an earlier trigger has done so."""
    request = state.requests.get(failed.request_id)
    if request is None or request.gateway != gateway.id or request.epoch != failed.epoch:
        state.emit(Stale("failed", failed.request_id, "not its present epoch"))
        return
    request.tokens.emit(failed.emitted_tokens)
    if not request.placed:
        state.emit(Stale("failed", failed.request_id, "second trigger of this epoch"))
        return
    assert request.placement is not None
    runner_ids = request.placement.runners
    runners = tuple([one for one in runner_ids if one == failed.runner]) or runner_ids
    if request.tokens.emitted > request.tokens.start_emitted:
        request.classes.keep()
        if failed.reason is FailReason.NO_CAPACITY:
            request.reservation.preempt(state.config.max_preemptions)  # it was admitted there, and given back
    release(state, request)
    request.history.fail_on(runners, failed.reason, failed.detail)
    if failed.reason is FailReason.KV_LOST:
        state.emit(KvHandOff(request.id, request.pool, "lost"))
        on_kv_lost(state, state.pool(request.pool))
    for runner_id in runners:
        _avoid_after(state, gateway, request, runner_id, failed)
    _requeue(state, request, failed.reason.value, counted=failed.reason not in UNCOUNTED)


def on_assign_timeout(state: State, timer: Timer) -> None:
    """Take back an Assign without acknowledgement or Failed in time. A silent cluster proves nothing."""
    request = state.requests[timer.name]
    assert request.placement is not None
    runners = [(runner_id, state.runners.present(runner_id)) for runner_id in request.placement.runners]
    expired = request.phase is Phase.ASSIGNED
    if expired and any(runner is not None and runner.contact is not Contact.PRESENT for _, runner in runners):
        state.timers.set(timer, state.now + state.config.assign_s)
        return
    if expired:
        for runner_id, _ in runners:
            _avoid(state, request, runner_id, state.config.avoid_s)
    else:
        request.classes.keep()  # its gateway may have tokens that were not reported here
    release(state, request)
    _requeue(state, request, "expired" if expired else "silent", counted=expired)


def on_preempt_decision(state: State, decision: PreemptDecision) -> None:
    """Remove the supervisor's victim, with KV if this is cheaper. The decision sets its next reservation."""
    request = state.requests.get(decision.request_id)
    running = request is not None and request.phase in (Phase.ASSIGNED, Phase.RUNNING)
    placement = request.placement if request is not None and request.epoch == decision.epoch else None
    if request is None or placement is None or not running or decision.runner not in placement.runners:
        state.emit(Stale("preempt", decision.request_id, "not running there under that epoch"))
        return
    if decision.runner == placement.last:  # a prompt runner reserves the first token alone
        request.reservation.reserve_again(decision.reservation_tokens)
    pool, source = state.pool(request.pool), state.runners.present(decision.runner)
    overran(pool, request)
    request.reservation.preempt(state.config.max_preemptions)
    in_kv = dict(source.report.in_kv()).get(request.id, 0) if source is not None else 0
    if not migrate_with_kv(state, pool, request, in_kv, "preemption"):
        order_off(state, request)


def stop_requests_of(state: State, runner: RunnerAccount) -> None:
    """Stop the requests of an incarnation that is over: inform the gateways, await their Failed."""
    for gateway in state.gateways.values():
        gateway.runner_lost(runner.id)
        state.send(gateway.peer, RunnerGone(runner.id))
    for request_id in sorted(runner.accounts.owned):
        stop(state, state.requests[request_id])


def on_avoidance_over(state: State, timer: Timer) -> None:
    """Use a runner again for a request that avoided it."""
    request = state.requests[timer.name]
    if request.history.avoidance is not None:
        _avoids_less(state, timer, request.history.avoidance, (request.pool,))


def on_gateway_avoidance_over(state: State, timer: Timer) -> None:
    """Use a runner again for the requests of a gateway that avoided it."""
    gateway = state.gateways[timer.name]
    _avoids_less(state, timer, gateway.avoidance, gateway.pools)


def on_class_wait_over(state: State, timer: Timer) -> None:
    """Let a request wait for any class: it has waited long enough for its numerics class."""
    request = state.requests[timer.name]
    if request.phase is Phase.WAITING and request.waiting.lane:
        pool = state.pool(request.pool)
        pool.waiting.stop_awaiting_class(request, pool.work_per_s)
    state.mark_schedulable(request.pool)


def _avoids_less(state: State, timer: Timer, avoidance: Avoidance, pools: Iterable[str]) -> None:
    deadline = avoidance.next_deadline(state.now)
    if deadline is not None:
        state.timers.set_earlier(timer, deadline)
    for pool in sorted(pools):
        state.mark_schedulable(pool)


def _avoid_after(state: State, gateway: GatewayStream, request: Request, runner_id: RunnerId, failed: Failed) -> None:
    """Let the request avoid a runner for a bounded time, by the reason of the failure."""
    config = state.config
    match failed.reason:
        case FailReason.SESSION_LOST if state.runners.present(runner_id) is not None:
            avoided_until = gateway.lost_session(runner_id, state.now, config.avoid_s)
            if avoided_until is not None:
                state.timers.set_earlier(Timer(TimerKind.GATEWAY_AVOIDANCE, gateway.id), avoided_until)
        case FailReason.NO_CAPACITY:
            # the runner's book was right and ours was late; a report is on its way
            pause_s = config.no_capacity_s * 2 ** min(request.history.capacity_refusals - 1, 16)
            _avoid(state, request, runner_id, min(pause_s, config.assign_s))
        case FailReason.LOAD_FAILED | FailReason.RUNNER_FULL:
            _avoid(state, request, runner_id, config.avoid_s * LOAD_RETRY_FACTOR)
        case FailReason.DRAINED | FailReason.RUNNER_ERROR:
            _avoid(state, request, runner_id, config.avoid_s)
        case _:
            pass


def _avoid(state: State, request: Request, runner_id: RunnerId, seconds: float) -> None:
    request.history.avoid(runner_id, state.now + seconds)
    state.timers.set_earlier(Timer(TimerKind.AVOIDANCE, request.id), state.now + seconds)


def _requeue(state: State, request: Request, reason: str, *, counted: bool) -> None:
    """Put a request back into the queue with its age, or reject it."""
    pool = state.pool(request.pool)
    if counted:
        request.history.migrate()
    if counted and request.history.migrations > state.config.max_migrations:
        message = f"{request.history.migrations} migrations, the last for {reason}"
        reject(state, request, RejectReason.TOO_MANY_MIGRATIONS, message)
    elif _fails_everywhere(state, pool, request):
        details = "; ".join(sorted(set(request.history.load_failures.values())))
        full = reason == FailReason.RUNNER_FULL.value
        kind = RejectReason.RUNNER_FULL if full else RejectReason.ADAPTER_FAILED
        reject(state, request, kind, details or "no runner could load the adapter")
    elif (infeasible := infeasible_reason(state, pool, request)) is not None:
        reject(state, request, *infeasible)
    else:
        state.emit(Requeued(request.id, pool.name, reason))
        enqueue(state, pool, request)


def _fails_everywhere(state: State, pool: Pool, request: Request) -> bool:
    """Return whether every present runner that could take the request has failed to load its adapter."""
    if not request.history.load_failures:
        return False
    failed: Counter[RunnerShape] = Counter()
    for runner_id in request.history.load_failures:
        runner = state.runners.present(runner_id)
        if runner is not None and runner.contact:
            failed[runner.shape] += 1
    shapes = pool.fleet.fitting_shapes(pool.adapters.rank(request.adapter), request.tokens.context)
    return all(failed[shape] >= pool.fleet.confirmed_shapes[shape] for shape in shapes)

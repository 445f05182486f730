"""The handlers of what gateways send: streams that open and close, requests, their ends."""

from weft.domain.adapter import DesiredAdapter
from weft.domain.ids import NEVER, RunnerId
from weft.domain.limits import LimitReport
from weft.domain.machine import Close, Kind, Peer
from weft.domain.request import (
    Cancel,
    GatewayHello,
    OutcomeAck,
    OutcomeReport,
    Preempt,
    Reject,
    RejectReason,
    ResubmitComplete,
    RunnerGone,
    Started,
    Submit,
)
from weft.domain.routes import ResyncRoutes, RoutesApplied
from weft_scheduler.core import canaries
from weft_scheduler.core.admission import admit
from weft_scheduler.core.effects import Judged, Stale
from weft_scheduler.core.epochs import advance_epoch
from weft_scheduler.core.model.gateway import GatewayStream
from weft_scheduler.core.model.request import Phase, Placement, Request
from weft_scheduler.core.model.runner import RunnerAccount
from weft_scheduler.core.policy.reservation.policies import ExpectedOutput
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.request_lifecycle import acknowledge, add_to_runners, charge, drop, hand_off, stop, take_in
from weft_scheduler.core.state import State
from weft_scheduler.core.status import routes_applied
from weft_scheduler.core.timers import Timer, TimerKind


def on_connected(state: State, peer: Peer, hello: object) -> None:
    """Start a gateway from nothing: it submits all its requests again."""
    name = peer.name
    on_closed(state, name)
    applies_routes = isinstance(hello, GatewayHello) and hello.applies_routes
    gateway = state.gateways[name] = GatewayStream(name, applies_routes=applies_routes)
    state.timers.set(Timer(TimerKind.RESUBMIT, name), state.now + state.config.assign_s)
    if state.routes.published:
        state.send(gateway.peer, state.routes.full())


def on_closed(state: State, name: str) -> None:
    """Forget a gateway's requests; their unacknowledged Assigns end too, what runs stays in the runners' reports."""
    gateway = state.gateways.get(name)
    if gateway is None:
        return
    for request_id in sorted(gateway.requests):
        drop(state, state.requests[request_id])
    state.timers.clear(Timer(TimerKind.RESUBMIT, name))
    state.timers.clear(Timer(TimerKind.GATEWAY_AVOIDANCE, name))
    state.outcomes.forget_gateway(name)  # its next stream sends them again anyway
    del state.gateways[name]
    routes_applied(state)


def on_resync_routes(state: State, gateway: GatewayStream, _: ResyncRoutes) -> None:
    """Send the full route table to a gateway with a gap."""
    if state.routes.published:
        state.send(gateway.peer, state.routes.full())


def on_routes_applied(state: State, gateway: GatewayStream, applied: RoutesApplied) -> None:
    """Record the route table of later requests of a gateway."""
    gateway.apply_routes(applied.version)
    routes_applied(state)


def on_limit_report(state: State, gateway: GatewayStream, report: LimitReport) -> None:
    """Send every other gateway this gateway's use of the shared limits."""
    for name in sorted(state.gateways.keys() - {gateway.id}):
        state.send(state.gateways[name].peer, LimitReport(gateway.id, report.uses))


def on_resubmit_timeout(state: State, timer: Timer) -> None:
    """End the wait for a gateway's report that all its requests are submitted."""
    on_resubmit_complete(state, state.gateways[timer.name], ResubmitComplete())


def on_resubmit_complete(state: State, gateway: GatewayStream, _: ResubmitComplete) -> None:
    """Let a gateway's requests that were held back join the queue: their order is known now."""
    gateway.resubmitted()
    state.timers.clear(Timer(TimerKind.RESUBMIT, gateway.id))
    unplaced = [state.requests[r] for r in gateway.requests if state.requests[r].phase is Phase.UNPLACED]
    for request in sorted(unplaced, key=lambda r: (r.batch, r.order)):
        admit(state, state.pool(request.pool), request)


def on_submit(state: State, gateway: GatewayStream, submit: Submit) -> None:
    """Take a request in: reject it, adopt it where it runs, or let it wait."""
    if submit.request_id in state.requests:
        state.emit(Stale("submit", submit.request_id, "known already"))
        return
    newcomer = gateway.complete and submit.epoch == NEVER and not submit.emitted_tokens
    unknown = _unknown(state, submit, newcomer)
    if unknown is not None:
        if submit.runner is not None:
            state.send(gateway.peer, Preempt(submit.request_id, submit.epoch))
        state.send(gateway.peer, Reject(submit.request_id, *unknown))
        return
    advance_epoch(state, submit.epoch)
    request = Request(submit, gateway.id, state.now, state.numbers.ticket(), newcomer=newcomer)
    pool = state.pool(request.pool)
    take_in(state, pool, request)
    policy = state.reservations.policy(pool.declared.reservation)
    predicted = submit.p90_tokens, submit.bucket_tokens
    expected = ExpectedOutput(pool.name, request.adapter, request.tokens.max_output, *predicted)
    request.reservation.begin(
        policy.initial_tokens(expected), by_page=policy.by_page, leaves=policy.leaves, pooled=policy.pooled
    )
    request.reservation.limit_preemptions(state.config.max_preemptions)
    if newcomer:
        pool.scaling.arrive(request, state.now)
    if submit.runner is not None and request.epoch != NEVER:
        _adopt(state, pool, request, Placement(submit.runner, submit.token_runner))
    elif gateway.complete:
        admit(state, pool, request)
    state.mark_dirty(pool.name)


def on_started(state: State, gateway: GatewayStream, started: Started) -> None:
    """Note that a runner computes a request: its Assign cannot expire. The token runner has taken over if told so."""
    request = _request_of(state, gateway, started.request_id)
    if request is None or request.epoch != started.epoch or request.placement is None:
        return
    if started.handed_off:
        hand_off(state, request)
        gateway.started(request.placement.runners[-1])
    if request.phase is Phase.ASSIGNED:
        gateway.started(request.placement.prompt)
        acknowledge(state, request)


def on_cancel(state: State, gateway: GatewayStream, cancel: Cancel) -> None:
    request = _request_of(state, gateway, cancel.request_id)
    if request is not None:
        drop(state, request, cancel.emitted_tokens)


def on_outcome(state: State, gateway: GatewayStream, report: OutcomeReport) -> None:
    """Buffer an outcome until it is stored, and learn from it; the request is over."""
    request = _request_of(state, gateway, report.request_id)
    if request is not None:
        pool = state.pool(request.pool)
        state.reservations.lengths.observe(report.pool, report.adapter, report.completion_tokens, report.censored)
        if request.reservation.forecast is not None:
            pool.fleet.margin.ended()
        if not request.batch:
            pool.scaling.departures.count(state.now)
        if pool.declared.has_slo and not request.batch:
            ttft_s, total_s = report.ttft_ms / 1000, report.total_ms / 1000
            met = pool.scaling.service_level.judge(ttft_s, report.completion_tokens, total_s, state.now)
            state.emit(Judged(pool.name, *met))
        drop(state, request, report.completion_tokens)
    if state.outcomes.add(report, gateway.id):
        canaries.count(state, report)
        forward_outcome(state, report)


def forward_outcome(state: State, report: OutcomeReport) -> None:
    """Send an outcome to the longest connected supervisor, or keep it in the buffer."""
    supervisor = next(iter(state.supervisors.values()), None)
    if supervisor is not None:
        state.send(supervisor, report)


def on_outcomes_stored(state: State, _: Peer, ack: OutcomeAck) -> None:
    """Acknowledge outcomes, and let gateways that were rejected come back once there is space."""
    for gateway, request_ids in state.outcomes.stored(ack.request_ids).items():
        if gateway in state.gateways:
            state.send(state.gateways[gateway].peer, OutcomeAck(request_ids))
    for gateway in state.outcomes.take_retries():
        if gateway in state.gateways:
            state.emit(Close(Peer(Kind.GATEWAY, gateway), "the outcome buffer has space again"))
            on_closed(state, gateway)  # it submits everything again, if it lives


def drain_unknown(state: State, pool: Pool, digest: str) -> None:
    """Drain a digest that streams use and the registry lacks (it was deleted before this process started)."""
    grace_s, drain_s = state.config.route_grace_s, pool.drain_s(state.config)
    pool.adapters.drain(DesiredAdapter(digest, 0, 0, False), state.now, grace_s, drain_s)
    grace_until = pool.adapters.draining[digest].grace_until
    state.timers.set(Timer(TimerKind.ADAPTER_DRAIN, pool.name, digest), grace_until)


def _unknown(state: State, submit: Submit, newcomer: bool) -> tuple[RejectReason, str] | None:
    """Return why a request has no known pool or adapter, or None. One accepted once may finish on a gone digest."""
    if not state.registry.is_known:
        return None
    pool = state.pools.get(submit.pool)
    if pool is None or pool.spec is None:
        return RejectReason.UNKNOWN_POOL, f"pool {submit.pool} does not exist"
    if pool.adapters.knows(submit.adapter):
        return None
    if newcomer:
        return RejectReason.UNKNOWN_ADAPTER, f"{submit.model_name} has no adapter {submit.adapter}"
    drain_unknown(state, pool, submit.adapter)
    return None


def _adopt(state: State, pool: Pool, request: Request, placement: Placement) -> None:
    """Leave a request on its runner. For an ended incarnation, await its Failed."""
    runners = [_expected(state, runner_id) for runner_id in placement.runners]
    over = [runner_id for runner_id, runner in zip(placement.runners, runners, strict=True) if runner is None]
    produced = request.tokens.emitted > request.tokens.start_emitted
    acknowledged = produced or any(r is not None and r.report.includes(request.id, request.epoch) for r in runners)
    request.adopt(placement, Phase.STOPPING if over else Phase.RUNNING if acknowledged else Phase.ASSIGNED)
    add_to_runners(state, pool, request)
    if over:
        stop(state, request)
        for runner_id in over:
            state.send(state.gateways[request.gateway].peer, RunnerGone(runner_id))
        return
    charge(pool, request, state.runners[placement.last.uuid])
    state.mark_schedulable(pool.name, ())  # another tenant may be next
    if not acknowledged:
        timer = Timer(TimerKind.ASSIGN_TIMEOUT, request.id)
        state.timers.set(timer, state.now + state.config.assign_s)


def _expected(state: State, runner_id: RunnerId) -> RunnerAccount | None:
    """Return that incarnation, from now on known by name at least; None: it is over."""
    if state.runners.get(runner_id.uuid) is None and not state.runners.was_replaced(runner_id):
        unreported = Timer(TimerKind.RUNNER_UNREPORTED, runner_id.uuid)
        state.timers.set(unreported, state.now + state.config.absent_s)
        return state.runners.begin(runner_id)
    return state.runners.present(runner_id)


def _request_of(state: State, gateway: GatewayStream, request_id: str) -> Request | None:
    """Return the request, if it belongs to this gateway."""
    request = state.requests.get(request_id)
    return request if request is not None and request.gateway == gateway.id else None

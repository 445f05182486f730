"""What gateways say: streams that come and go, requests, their ends."""

from weft.identities import NEVER
from weft_scheduler.core import admission
from weft_scheduler.core.alarms import Alarm, Kind
from weft_scheduler.core.context import Context
from weft_scheduler.core.effects import (
    AckOutcomes,
    ForwardOutcome,
    HangUp,
    Ignored,
    Preempt,
    Queued,
    Reject,
    RejectReason,
    SendRoutes,
    TellGone,
)
from weft_scheduler.core.events import (
    Cancel,
    GatewayDown,
    GatewayUp,
    OutcomeReported,
    ResubmitComplete,
    Started,
    Submit,
)
from weft_scheduler.core.events import OutcomesStored as Stored
from weft_scheduler.core.lives import enqueue, forget, leave, reject
from weft_scheduler.core.rate import retry_after_ms
from weft_scheduler.core.state import Gateway, Phase, Pool, Request
from weft_scheduler.core.values import DesiredAdapter, RunnerId


def gateway_up(ctx: Context, event: GatewayUp) -> None:
    """Start from nothing: everything it holds comes again."""
    if event.gateway in ctx.state.gateways:
        gateway_down(ctx, GatewayDown(event.gateway))
    ctx.state.gateways[event.gateway] = Gateway(event.gateway)
    ctx.alarms.set(Alarm(Kind.RESUBMIT, event.gateway), ctx.now + ctx.config.assign_s)
    if ctx.told.table is not None:
        ctx.emit(SendRoutes(event.gateway, ctx.told.table))


def gateway_down(ctx: Context, event: GatewayDown) -> None:
    """Forget its requests; their unacknowledged Assigns expire with it, what runs stays in the runners' reports."""
    gateway = ctx.state.gateways.get(event.gateway)
    if gateway is None:
        return
    for request_id in sorted(gateway.requests):
        forget(ctx, ctx.state.requests[request_id])
    ctx.alarms.clear(Alarm(Kind.RESUBMIT, gateway.id))
    ctx.alarms.clear(Alarm(Kind.FORGIVE, gateway.id))
    ctx.outcomes.turned_away.discard(gateway.id)  # its next stream tells them again anyway
    del ctx.state.gateways[gateway.id]


def resubmit_complete(ctx: Context, event: ResubmitComplete) -> None:
    """Its requests' order is known now: those held back join the queue."""
    gateway = ctx.state.gateways.get(event.gateway)
    if gateway is None:
        return
    gateway.complete = True
    ctx.alarms.clear(Alarm(Kind.RESUBMIT, gateway.id))
    held = [ctx.state.requests[r] for r in gateway.requests if ctx.state.requests[r].phase is Phase.HELD]
    for request in sorted(held, key=lambda r: r.order):
        wait(ctx, request)


def submit(ctx: Context, event: Submit) -> None:
    """Take a request in: refuse it, adopt it where it runs, or let it wait."""
    gateway = ctx.state.gateways.get(event.gateway)
    if gateway is None or event.request_id in ctx.state.requests:
        ctx.emit(Ignored("submit", event.request_id, "no such gateway" if gateway is None else "known already"))
        return
    newcomer = gateway.complete and event.epoch == NEVER and not event.emitted_tokens
    refusal = _unknown(ctx, event, newcomer)
    if refusal is not None:
        if event.runner is not None:
            ctx.emit(Preempt(event.gateway, event.request_id, event.epoch))
        ctx.emit(Reject(event.gateway, event.request_id, *refusal))
        return
    ctx.heed(event.epoch)
    _take_in(ctx, gateway, _request(ctx, event, newcomer), event.runner)


def _take_in(ctx: Context, gateway: Gateway, request: Request, runner_id: RunnerId | None) -> None:
    pool = ctx.state.pool(request.pool)
    ctx.state.requests[request.id] = request
    gateway.requests.add(request.id)
    pool.requests.add(request.id)
    pool.live[request.digest] += 1
    admission.decide_cover(ctx, pool, request)
    if runner_id is not None and request.epoch != NEVER:
        _adopt(ctx, pool, request, runner_id)
    elif gateway.complete:
        wait(ctx, request)
    ctx.touch(pool.name)


def wait(ctx: Context, request: Request) -> None:
    """Into the queue and one look at it: afterwards it runs, waits, or is refused."""
    pool = ctx.state.pool(request.pool)
    enqueue(ctx, request)
    refusal = admission.impossible(ctx, pool, request)
    if refusal is not None:
        reject(ctx, request, *refusal)
        return
    admission.look(ctx, pool)
    ctx.state.look.pop(pool.name, None)  # this was that look
    if request.phase is not Phase.WAITING:
        return
    if _overflows(pool, request):
        after_ms = retry_after_ms(len(pool.queue), pool.rate.per_s(ctx.now))
        reject(ctx, request, RejectReason.QUEUE_FULL, f"{len(pool.queue) - 1} requests wait for {pool.name}", after_ms)
        return
    if pool.victims:
        ctx.look_at(pool.name)  # one that should have gone may be needed again
    ctx.emit(Queued(request.id, pool.name, "no runner has room"))


def started(ctx: Context, event: Started) -> None:
    """The runner has it: the Assign cannot expire any more."""
    request = _of(ctx, event.gateway, event.request_id)
    if request is None or request.epoch != event.epoch or request.phase is not Phase.ASSIGNED:
        return
    if request.runner is not None:
        ctx.state.gateways[event.gateway].lost_sessions.pop(request.runner, None)
    request.no_rooms = 0
    acknowledge(ctx, request)


def acknowledge(ctx: Context, request: Request) -> None:
    """Started, or in a report."""
    if request.phase is Phase.ASSIGNED:
        request.enter(Phase.RUNNING)
        request.same_class_until = 0.0
        ctx.alarms.clear(Alarm(Kind.ASSIGN, request.id))


def cancel(ctx: Context, event: Cancel) -> None:
    request = _of(ctx, event.gateway, event.request_id)
    if request is not None:
        forget(ctx, request)


def outcome(ctx: Context, event: OutcomeReported) -> None:
    """Keep it until it is stored; learn from it; the request is over."""
    request = _of(ctx, event.gateway, event.request_id)
    if request is not None:
        ctx.lengths.observe(event.pool, event.digest, event.completion_tokens, event.censored)
        ctx.state.pool(request.pool).rate.count(ctx.now)
        forget(ctx, request)
    if ctx.outcomes.keep(event.request_id, event.gateway, event.record):
        forward(ctx, event.request_id, event.record)


def forward(ctx: Context, request_id: str, record: bytes) -> None:
    """To the supervisor that has been there longest; without one it is kept."""
    supervisor = next(iter(ctx.state.supervisors), None)
    if supervisor is not None:
        ctx.emit(ForwardOutcome(supervisor, request_id, record))


def stored(ctx: Context, event: Stored) -> None:
    for gateway, request_ids in ctx.outcomes.stored(event.request_ids).items():
        if gateway in ctx.state.gateways:
            ctx.emit(AckOutcomes(gateway, request_ids))
    for gateway in ctx.outcomes.call_again():
        if gateway in ctx.state.gateways:
            ctx.emit(HangUp(gateway))


def _unknown(ctx: Context, event: Submit, newcomer: bool) -> tuple[RejectReason, str] | None:
    """Whether the registry knows its pool and adapter. What was accepted once may finish on a digest that is gone."""
    if not ctx.state.registry_known:
        return None
    pool = ctx.state.pools.get(event.pool)
    if pool is None or pool.spec is None:
        return RejectReason.UNKNOWN_POOL, f"pool {event.pool} does not exist"
    if pool.desired.knows(event.digest):
        return None
    if newcomer:
        return RejectReason.UNKNOWN_ADAPTER, f"{event.model_name} has no adapter {event.digest}"
    retire_unknown(ctx, pool, event.digest)
    return None


def retire_unknown(ctx: Context, pool: Pool, digest: str) -> None:
    """A digest that streams use and the registry does not have (it was deleted before this process started)."""
    pool.desired.retire(
        DesiredAdapter(digest, 0, 0, False), ctx.now, ctx.config.route_grace_s, pool.drain_s(ctx.config)
    )
    ctx.alarms.set_earlier(Alarm(Kind.RETIRE, pool.name), ctx.now)


def _request(ctx: Context, event: Submit, newcomer: bool) -> Request:
    ctx.state.tickets += 1
    return Request(
        id=event.request_id,
        gateway=event.gateway,
        pool=event.pool,
        namespace=event.namespace,
        digest=event.digest,
        prompt_tokens=event.prompt_tokens,
        max_tokens=event.max_tokens,
        emitted_tokens=event.emitted_tokens,
        p90_tokens=event.p90_tokens,
        since=ctx.now - event.waited_s,
        ticket=ctx.state.tickets,
        moves=event.moves,
        cover_tokens=event.start_emitted_tokens + event.reservation_tokens if event.reservation_tokens else 0,
        start_emitted_tokens=event.start_emitted_tokens,
        epoch=event.epoch,
        numerics_class=event.numerics_class,
        admitted_before=not newcomer,
    )


def _adopt(ctx: Context, pool: Pool, request: Request, runner_id: RunnerId) -> None:
    """It runs: leave it there. On an incarnation that is over, ask for its Failed."""
    runner = ctx.state.runners.get(runner_id.uuid)
    if runner is None and ctx.state.ended.get(runner_id.uuid) != runner_id.incarnation:
        runner = ctx.state.new_runner(runner_id)
        ctx.alarms.set(Alarm(Kind.ABSENT, runner_id.uuid), ctx.now + ctx.config.absent_s)
    request.runner = runner_id
    if runner is None or runner.id != runner_id:
        pool.running += 1
        leave(ctx, request)
        ctx.emit(TellGone(request.gateway, runner_id))
        return
    admission.own(ctx, pool, request, runner)
    produced = request.emitted_tokens > request.start_emitted_tokens
    acknowledged = produced or runner.included.get(request.id) == request.epoch
    request.enter(Phase.RUNNING if acknowledged else Phase.ASSIGNED)
    if not acknowledged:
        ctx.alarms.set(Alarm(Kind.ASSIGN, request.id), ctx.now + ctx.config.assign_s)


def _overflows(pool: Pool, request: Request) -> bool:
    limit = pool.spec.max_queue if pool.spec else 0
    return not request.admitted_before and 0 < limit < len(pool.queue)


def _of(ctx: Context, gateway: str, request_id: str) -> Request | None:
    """The request, if it is that gateway's."""
    request = ctx.state.requests.get(request_id)
    return request if request is not None and request.gateway == gateway else None

"""A request leaves a runner and is placed again: under a higher epoch, with its age, a bounded number of times.

Exactly one new placement follows each epoch's end: the first trigger (the gateway's Failed, a deadline here) takes the
request out of its runner and back to the queue; whatever says the same of that epoch later finds it there and is
ignored. When a lease runs out the gateway is told and asked, rather than the request moved at once, because the gateway
alone knows how many tokens were emitted; a gateway that stays silent for `assign_s` loses that privilege.
"""

from weft_scheduler.core.alarms import Alarm, Kind
from weft_scheduler.core.context import Context, avoided
from weft_scheduler.core.effects import Ignored, Preempt, RejectReason, Requeued, TellGone
from weft_scheduler.core.events import Failed, FailReason
from weft_scheduler.core.lives import enqueue, leave, reject, vacate
from weft_scheduler.core.shelves import Shape
from weft_scheduler.core.state import OWNED, Gateway, Phase, Pool, Request, Runner
from weft_scheduler.core.values import PreemptDecision, RunnerId

UNCOUNTED = frozenset({FailReason.NO_ROOM, FailReason.PREEMPTED})  # the system's own doing
DEFAULT_MAX_MOVES = 8
MAX_AVOID_S = 60.0  # of a runner whose sessions are lost again and again
LOAD_RETRY_FACTOR = 10  # a failed load is retried on the same runner after this many `avoid_s`


def failed(ctx: Context, event: Failed) -> None:
    """That epoch is over: place the request again, unless this was said before."""
    request = ctx.state.requests.get(event.request_id)
    if request is None or request.gateway != event.gateway or request.epoch != event.epoch:
        ctx.emit(Ignored("failed", event.request_id, "not its present epoch"))
        return
    request.emitted_tokens = max(request.emitted_tokens, event.emitted_tokens)
    if request.phase not in OWNED:
        ctx.emit(Ignored("failed", event.request_id, "second trigger of this epoch"))
        return
    runner_id = request.runner
    assert runner_id is not None
    if request.emitted_tokens > request.start_emitted_tokens:
        _keep_class(request)
    vacate(ctx, request)
    request.no_rooms = request.no_rooms + 1 if event.reason is FailReason.NO_ROOM else 0
    _keep_off(ctx, request, runner_id, event)
    _again(ctx, request, event.reason.value, counted=event.reason not in UNCOUNTED)


def overdue(ctx: Context, request: Request) -> None:
    """An Assign nobody acknowledged, or a Failed that never came. A silent cluster proves nothing: wait for it."""
    runner = ctx.state.runner(request.runner)
    if request.phase is Phase.ASSIGNED and runner is not None and not runner.confirmed:
        ctx.alarms.set(Alarm(Kind.ASSIGN, request.id), ctx.now + ctx.config.assign_s)
        return
    assert request.runner is not None
    expired = request.phase is Phase.ASSIGNED
    if expired:
        keep_off_for(ctx, request, request.runner, ctx.config.avoid_s)
    else:
        _keep_class(request)  # its gateway may have tokens that were not told here
    vacate(ctx, request)
    _again(ctx, request, "expired" if expired else "silent", counted=expired)


def preempt(ctx: Context, decision: PreemptDecision) -> None:
    """The supervisor's victim leaves; its next reservation is the one given here."""
    request = ctx.state.requests.get(decision.request_id)
    running = request is not None and request.phase in (Phase.ASSIGNED, Phase.RUNNING)
    if request is None or not running or (request.epoch, request.runner) != (decision.epoch, decision.runner):
        ctx.emit(Ignored("preempt", decision.request_id, "not running there under that epoch"))
        return
    request.cover_tokens = max(1, request.start_emitted_tokens + decision.reservation_tokens)
    leave(ctx, request)
    ctx.emit(Preempt(request.gateway, request.id, request.epoch))


def abandon(ctx: Context, runner: Runner) -> None:
    """An incarnation is over: tell the gateways, await their Failed."""
    ctx.to_gateways(lambda gateway: TellGone(gateway, runner.id))
    for gateway in ctx.state.gateways.values():
        gateway.lost_sessions.pop(runner.id, None)
    for request_id in sorted(runner.owned):
        leave(ctx, ctx.state.requests[request_id])


def keep_off_for(ctx: Context, request: Request, runner_id: RunnerId, seconds: float) -> None:
    """Keep one request off a runner for a while."""
    request.avoid[runner_id] = ctx.now + seconds
    ctx.alarms.set_earlier(Alarm(Kind.RETRY, request.id), ctx.now + seconds)


def retry(ctx: Context, request: Request) -> None:
    """An avoidance has ended."""
    _rearm(ctx, Alarm(Kind.RETRY, request.id), request.avoid)
    ctx.look_at(request.pool)


def forgive(ctx: Context, gateway_id: str) -> None:
    """A gateway's avoidance of a runner has ended."""
    gateway = ctx.state.gateways[gateway_id]
    _rearm(ctx, Alarm(Kind.FORGIVE, gateway_id), gateway.avoid)
    for pool in sorted({ctx.state.requests[r].pool for r in gateway.requests}):
        ctx.look_at(pool)


def _keep_class(request: Request) -> None:
    """Its latest tokens are of the class of the runner that it leaves."""
    request.numerics_class = request.assigned_class or request.numerics_class


def _rearm(ctx: Context, alarm: Alarm, avoid: dict[RunnerId, float]) -> None:
    rest = avoided(avoid, ctx.now)
    if rest:
        ctx.alarms.set_earlier(alarm, min(rest.values()))


def _keep_off(ctx: Context, request: Request, runner_id: RunnerId, event: Failed) -> None:
    """Where the request should not go for a bounded time, by what went wrong."""
    config = ctx.config
    match event.reason:
        case FailReason.SESSION_LOST:
            _keep_gateway_off(ctx, ctx.state.gateways[request.gateway], runner_id)
        case FailReason.NO_ROOM:
            # the runner's book was right and ours was late; a report is on its way
            pause_s = config.no_room_s * 2 ** min(request.no_rooms - 1, 16)
            keep_off_for(ctx, request, runner_id, min(pause_s, config.assign_s))
        case FailReason.LOAD_FAILED:
            request.load_failures[runner_id] = event.detail
            keep_off_for(ctx, request, runner_id, config.avoid_s * LOAD_RETRY_FACTOR)
        case FailReason.DRAINED | FailReason.RUNNER_ERROR:
            keep_off_for(ctx, request, runner_id, config.avoid_s)
        case FailReason.PREEMPTED:
            pass


def _keep_gateway_off(ctx: Context, gateway: Gateway, runner_id: RunnerId) -> None:
    """A lost session: of this gateway only, as a broken network must not take the fleet from the others.

    Twice as long each time until the runner starts a request of this gateway: a runner that was killed counts as ready
    until its lease runs out, and requests must not spend all their moves on it.
    """
    if ctx.state.runner(runner_id) is None or runner_id in avoided(gateway.avoid, ctx.now):
        return  # gone, or another request of the same session
    lost_before = gateway.lost_sessions.get(runner_id, 0)
    gateway.lost_sessions[runner_id] = min(lost_before + 1, 16)  # a float takes no more than 2**1023
    first_s = ctx.config.avoid_s
    until = ctx.now + min(first_s * 2**lost_before, max(first_s, MAX_AVOID_S))
    gateway.avoid[runner_id] = until
    ctx.alarms.set_earlier(Alarm(Kind.FORGIVE, gateway.id), until)


def _again(ctx: Context, request: Request, reason: str, *, counted: bool) -> None:
    """Back to the queue with its age, or the end of it."""
    pool = ctx.state.pool(request.pool)
    request.moves += counted
    request.enter(Phase.HELD)  # in no place: whatever happens next puts it into one
    if counted and request.moves > (pool.spec.max_moves if pool.spec else DEFAULT_MAX_MOVES):
        reject(ctx, request, RejectReason.TOO_MANY_MOVES, f"{request.moves} moves, the last for {reason}")
    elif _nowhere_loads(ctx, pool, request):
        details = "; ".join(sorted(set(request.load_failures.values())))
        reject(ctx, request, RejectReason.ADAPTER_FAILED, details or "no runner could load the adapter")
    else:
        ctx.emit(Requeued(request.id, pool.name, reason))
        pool.sweep = True
        enqueue(ctx, request)


def _nowhere_loads(ctx: Context, pool: Pool, request: Request) -> bool:
    """Whether every present runner that could take it has failed to load its adapter."""
    if not request.load_failures:
        return False
    shapes = set(pool.shelves.taking(pool.desired.rank(request.digest), request.context_tokens))
    return not any(_may_load(ctx.state.runners[uuid], shapes, request) for uuid in pool.runners)


def _may_load(runner: Runner, shapes: set[Shape], request: Request) -> bool:
    return runner.confirmed and runner.shape in shapes and runner.id not in request.load_failures

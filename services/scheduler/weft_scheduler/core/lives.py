"""A request's life outside of placement: into the queue, out of a runner, over."""

from weft_scheduler.core import room
from weft_scheduler.core.alarms import Alarm, Kind
from weft_scheduler.core.context import Context
from weft_scheduler.core.effects import Preempt, Reject, RejectReason
from weft_scheduler.core.state import OWNED, Phase, Request


def enqueue(ctx: Context, request: Request) -> None:
    """Let it wait in its pool's queue, in its place by age."""
    request.enter(Phase.WAITING)
    if request.numerics_class and not request.same_class_until:
        request.same_class_until = ctx.now + ctx.config.same_class_s
        ctx.alarms.set(Alarm(Kind.CLASS, request.id), request.same_class_until)
    ctx.state.pool(request.pool).enqueue(request, room.room_tokens(request))
    ctx.look_at(request.pool)


def vacate(ctx: Context, request: Request) -> None:
    """Take it out of its runner's accounts. What the runner's report includes stays counted until the next one."""
    ctx.alarms.clear(Alarm(Kind.ASSIGN, request.id))
    ctx.state.pool(request.pool).running -= 1
    runner = ctx.state.runner(request.runner)
    request.runner = None
    if runner is not None:
        runner.owned.discard(request.id)
        room.release(runner, request.id)
        ctx.reindex(runner)


def leave(ctx: Context, request: Request) -> None:
    """Its epoch is ending: await the gateway's Failed, which knows the exact number of emitted tokens."""
    request.enter(Phase.LEAVING)
    ctx.alarms.set(Alarm(Kind.ASSIGN, request.id), ctx.now + ctx.config.assign_s)


def forget(ctx: Context, request: Request) -> None:
    """It is over, or its gateway is gone: nothing of it remains but what its runner reports."""
    pool = ctx.state.pool(request.pool)
    if request.phase is Phase.WAITING:
        pool.dequeue(request)
    if request.phase in OWNED:
        vacate(ctx, request)
    ctx.alarms.clear(Alarm(Kind.RETRY, request.id))
    ctx.alarms.clear(Alarm(Kind.CLASS, request.id))
    pool.live[request.digest] -= 1
    if not pool.live[request.digest]:
        del pool.live[request.digest]
        if request.digest in pool.desired.retired:
            ctx.alarms.set_earlier(Alarm(Kind.RETIRE, pool.name), ctx.now)
    pool.requests.discard(request.id)
    del ctx.state.requests[request.id]
    ctx.state.gateways[request.gateway].requests.discard(request.id)
    ctx.look_at(pool.name)


def reject(ctx: Context, request: Request, reason: RejectReason, message: str, retry_after_ms: int = 0) -> None:
    """End it. One that runs is cancelled at its runner first."""
    if request.phase in OWNED:
        ctx.emit(Preempt(request.gateway, request.id, request.epoch))
    ctx.emit(Reject(request.gateway, request.id, reason, message, retry_after_ms))
    forget(ctx, request)

"""From the queue to a runner: one look at a pool, and the refusals that no waiting would change."""

from collections.abc import Container
from collections.abc import Set as AbstractSet

from weft_scheduler.core import placement, queueing, reservation, room
from weft_scheduler.core.alarms import Alarm, Kind
from weft_scheduler.core.context import Context, avoided
from weft_scheduler.core.effects import Assign, RejectReason, Resumed
from weft_scheduler.core.lives import reject
from weft_scheduler.core.placement import Ask
from weft_scheduler.core.shelves import Place, Shape
from weft_scheduler.core.state import Pending, Phase, Pool, Request, Runner
from weft_scheduler.core.values import BASE, PoolSpec

DEFAULTS = PoolSpec("")


def look(ctx: Context, pool: Pool) -> None:
    """Admit what the pool's policies admit now."""
    policy = queueing.POLICIES[(pool.spec or DEFAULTS).queue]()
    policy.look(pool.queue, PoolFloor(ctx, pool), ctx.config.starvation_bound, ctx.config.window)


class PoolFloor:
    """A pool's runners as its queue policy sees them."""

    def __init__(self, ctx: Context, pool: Pool) -> None:
        self._ctx, self._pool = ctx, pool
        self._placement = placement.POLICIES[(pool.spec or DEFAULTS).placement]()

    def admit(self, request: Request, closed: AbstractSet[Shape]) -> Place | None:
        """Place it by the pool's policy, in its own numerics class first; None if no other shape can take it."""
        shelves = self._pool.shelves
        key = self._placement.place(shelves, self._ask(request, request.numerics_class), closed)
        if key is None and request.numerics_class and not needed_class(self._ctx, self._pool, request):
            key = self._placement.place(shelves, self._ask(request, ""), closed)
        if key is None:
            return None
        runner = self._ctx.state.runners[key.uuid]
        assign(self._ctx, self._pool, request, runner)
        return Place(runner.shape, key.uuid)

    def waits_for(self, request: Request, place: Place) -> bool:
        needed = needed_class(self._ctx, self._pool, request)
        takes = place.shape.takes(self._pool.desired.rank(request.digest), request.context_tokens, needed)
        return takes and place.uuid not in _avoid(self._ctx, request)

    def shapes_for(self, request: Request) -> AbstractSet[Shape]:
        shelves, avoid = self._pool.shelves, _avoid(self._ctx, request)
        needed = needed_class(self._ctx, self._pool, request)
        taking = shelves.taking(self._pool.desired.rank(request.digest), request.context_tokens, needed)
        skip_limit = self._ctx.config.skip_limit
        return {shape for shape in taking if shelves.by_shape[shape].best(BASE, 0, avoid, skip_limit) is not None}

    def has_room(self, closed: AbstractSet[Shape]) -> bool:
        return self._pool.shelves.has_room(closed)

    def _ask(self, request: Request, numerics_class: str) -> Ask:
        return Ask(
            digest=request.digest,
            rank=self._pool.desired.rank(request.digest),
            room_tokens=room.room_tokens(request),
            context_tokens=request.context_tokens,
            numerics_class=numerics_class,
            avoid=_avoid(self._ctx, request),
            skip_limit=self._ctx.config.skip_limit,
        )


def needed_class(ctx: Context, pool: Pool, request: Request) -> str:
    """The numerics class that a request has to wait for; none: any will do, its own first.

    One with tokens waits for the class that computed them, for at most `same_class_s` after it ran, while a runner of
    that class can take it or is about to: it is full, its supervisor is reconnecting, or nobody has been heard yet.
    """
    computed_by = request.numerics_class
    if not computed_by or ctx.now >= request.same_class_until:
        return ""
    rank = pool.desired.rank(request.digest)
    waits = not ctx.state.settled or pool.has_taker(rank, request.context_tokens, computed_by)
    return computed_by if waits else ""


def decide_cover(ctx: Context, pool: Pool, request: Request) -> None:
    """The reservation a request starts with, once."""
    if not request.cover_tokens:
        policy = reservation.POLICIES[(pool.spec or DEFAULTS).reservation]()
        request.cover_tokens = policy.cover(
            ctx.lengths, pool.name, request.digest, request.p90_tokens, request.max_tokens
        )


def assign(ctx: Context, pool: Pool, request: Request, runner: Runner) -> None:
    """Give a waiting request to a runner, under a new epoch."""
    assert runner.spec is not None
    pool.dequeue(request)
    request.enter(Phase.ASSIGNED)
    request.epoch, request.runner = ctx.next_epoch(), runner.id
    request.start_emitted_tokens, request.passes = request.emitted_tokens, 0
    own(ctx, pool, request, runner)
    ctx.alarms.set(Alarm(Kind.ASSIGN, request.id), ctx.now + ctx.config.assign_s)
    spec, tokens = runner.spec, room.reserve_tokens(request)
    ctx.emit(Assign(request.gateway, request.id, request.epoch, runner.id, spec.address, tokens, spec.numerics_class))
    if request.numerics_class:
        ctx.emit(Resumed(request.id, pool.name, runner.id, request.numerics_class, spec.numerics_class))


def own(ctx: Context, pool: Pool, request: Request, runner: Runner) -> None:
    """Enter a request in a runner's accounts, unless its last report already counts this epoch."""
    runner.owned.add(request.id)
    request.assigned_class = runner.spec.numerics_class if runner.spec is not None else ""
    pool.running += 1
    if runner.spec is not None and runner.included.get(request.id) != request.epoch:
        pages = room.pages_of(room.room_tokens(request), runner.spec.page_tokens)
        room.reserve(runner, request.id, Pending(request.epoch, pages, request.digest))
    ctx.shelve(runner)
    ctx.touch(pool.name)


def impossible(ctx: Context, pool: Pool, request: Request) -> tuple[RejectReason, str] | None:
    """Why no runner of the pool could ever take it. Not said before the cluster had the time to report itself."""
    shapes = pool.shelves.by_shape
    rank = pool.desired.rank(request.digest)
    if not ctx.state.settled or not shapes or pool.shelves.taking(rank, request.context_tokens):
        return None
    largest = max(shape.max_context_tokens for shape in shapes)
    if request.context_tokens > largest:
        return RejectReason.TOO_LARGE, f"{request.context_tokens} tokens; the largest runner holds {largest}"
    return RejectReason.ADAPTER_FAILED, f"rank {rank}; no runner with that context takes it"


def sweep(ctx: Context, pool: Pool) -> None:
    """Refuse what no runner can take any more, where that may have changed."""
    if not pool.sweep:
        return
    pool.sweep = False
    for request in list(pool.queue):
        refusal = impossible(ctx, pool, request)
        if refusal is not None:
            reject(ctx, request, *refusal)


def _avoid(ctx: Context, request: Request) -> Container[str]:
    """UUIDs of the present incarnations that it should not go to."""
    of_gateway = ctx.state.gateways[request.gateway].avoid
    if not of_gateway and not request.avoid:
        return ()
    both = (*avoided(of_gateway, ctx.now), *avoided(request.avoid, ctx.now))
    return {runner_id.uuid for runner_id in both if ctx.state.runner(runner_id)}

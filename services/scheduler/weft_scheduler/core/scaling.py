"""A pool's number of runners and who of them should go, whenever its load, its bounds or its runners change.

A victim is *cordoned*: nothing new is placed on it, what runs there runs on. Victims stay victims while so many have to
go (their loads fall, others' change: the choice must not follow), and the last named is the first to be kept.
"""

from heapq import nsmallest

from weft_scheduler.core.alarms import Alarm, Kind
from weft_scheduler.core.capacity import Bounds, PoolLoad, asked_runners, demand_runners
from weft_scheduler.core.context import Context
from weft_scheduler.core.room import working_set
from weft_scheduler.core.state import Pool, Runner
from weft_scheduler.core.values import BASE, PoolSpec


def review(ctx: Context, pool: Pool, *, at_once: bool = False) -> None:
    """Decide `pool.wanted_runners` and `pool.victims` anew. `at_once`: for somebody who has come this moment."""
    pool.unit = pool.totals.unit(pool.pace.per_s()) or pool.unit
    if pool.spec is None:
        _name(ctx, pool, 0)
        return
    bounds = bounds_of(pool.spec)
    idle_s = pool.spec.idle_s or ctx.config.give_back_s
    pool.wanted_runners = bounds.clamp(pool.hold.ask(bounds.clamp(_asked(ctx, pool, at_once)), ctx.now, idle_s))
    deadline = pool.hold.next_deadline(idle_s)
    if deadline is not None:
        ctx.alarms.set(Alarm(Kind.GIVE_BACK, pool.name), deadline)
    _name(ctx, pool, max(0, pool.totals.runners - pool.wanted_runners))


def demand(ctx: Context, pool: Pool) -> int:
    """What the pool's requests would fill, whatever its bounds."""
    return demand_runners(load_of(pool), pool.unit, ctx.config.work_s)


def bounds_of(spec: PoolSpec) -> Bounds:
    return Bounds(spec.min_runners, spec.max_runners or None)


def load_of(pool: Pool) -> PoolLoad:
    """The pool as capacity sees it."""
    waiting = pool.waiting.keys() - {BASE, *pool.desired.pinned} if pool.waiting else ()
    return PoolLoad(
        running=pool.running,
        queued=len(pool.queue),
        reserved_tokens=pool.totals.sum.reserved_tokens,
        waiting_tokens=pool.waiting_tokens,
        busy_slots=pool.totals.sum.busy_slots,
        waiting_adapters=len(waiting),
    )


def _asked(ctx: Context, pool: Pool, at_once: bool) -> int:
    """Nothing shrinks while somebody waits, and whoever waits longer than a moment gets every runner that is there.

    Nor is anybody given back before this process knows what is going on.
    """
    asked = asked_runners(load_of(pool), pool.unit, ctx.config.work_s)
    if ctx.state.settled and (at_once or not len(pool.queue)):
        return asked  # what was wanted before is held for a while anyway
    return max(asked, pool.wanted_runners, pool.totals.runners)


def _name(ctx: Context, pool: Pool, count: int) -> None:
    """Let so many be victims."""
    kept = [uuid for uuid in pool.victims if uuid in pool.runners and _goes(ctx.state.runners[uuid])][:count]
    victims = kept if len(kept) == count else [*kept, *_others(ctx, pool, kept, count - len(kept))]
    if victims == pool.victims:
        return
    before, after, pool.victims = {*pool.victims}, {*victims}, victims
    for uuid in sorted(before ^ after):
        _cordon(ctx, uuid, uuid in after)


def _others(ctx: Context, pool: Pool, kept: list[str], count: int) -> list[str]:
    """Idle ones first, then the least loaded, the newest."""
    runners = [ctx.state.runners[uuid] for uuid in pool.runners]
    named = {*kept}
    candidates = (r for r in runners if _goes(r) and r.id.uuid not in named)
    chosen = nsmallest(count, candidates, key=lambda r: (working_set(r), -r.arrival, r.id.uuid))
    return [runner.id.uuid for runner in chosen]


def _goes(runner: Runner) -> bool:
    """Whether it is one of those that are counted: one that drains is on its way already."""
    return runner.share is not None


def _cordon(ctx: Context, uuid: str, cordoned: bool) -> None:
    runner = ctx.state.runners.get(uuid)
    if runner is not None and runner.cordoned != cordoned:
        runner.cordoned = cordoned
        ctx.reindex(runner)

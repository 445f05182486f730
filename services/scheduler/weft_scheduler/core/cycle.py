"""The scheduling cycle: what waits in a pool is placed on its runners, in six steps (ORCA, section 4.2: Select).

A cycle follows every event that may let something run. It costs what has changed and what it offers, never the length
of the queue or of the fleet.
"""

from collections.abc import Collection, Iterator
from itertools import islice

from weft_scheduler.core import phases
from weft_scheduler.core.batch_preemption import preempt_batch
from weft_scheduler.core.effects import SequencesParked
from weft_scheduler.core.model.request import Placement, Request
from weft_scheduler.core.parking import place_beside
from weft_scheduler.core.policy.placement.policy import Choice
from weft_scheduler.core.policy.priority.headroom import HEADROOM_S
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.request_lifecycle import add_to_runners, charge, reject, send_assign
from weft_scheduler.core.scaling import scale
from weft_scheduler.core.state import State
from weft_scheduler.core.timers import Timer, TimerKind
from weft_scheduler.core.view import BatchView, PoolView, infeasible_reason


def schedule_pools(state: State) -> None:
    """Run a cycle of each pool with possible progress, and forget unused pools."""
    while (name := state.next_schedulable()) is not None:
        changed, pool = state.take_changed(name), state.pools.get(name)
        if pool is not None:
            schedule(state, pool, changed)
            if pool.scaling.autoscaler.victims and len(pool.waiting.queue):
                scale(state, pool, at_once=True)  # a victim may be needed again
            if not pool.in_use:
                state.forget_pool(name)


def schedule(state: State, pool: Pool, changed: Collection[str] | None) -> None:
    """Run one cycle. `changed`: runners changed since the last cycle; None: all runners may have changed."""
    waiting = pool.waiting
    # 1. What is due: the roles of runners, where some came or went.
    if pool.fleet.roles_stale:
        phases.plan(state, pool)
    # 2. Infeasible: what no runner can ever take is rejected, where that may have changed.
    if waiting.take_recheck():
        for request in (*waiting.queue, *waiting.batch.queue):
            if (reason := infeasible_reason(state, pool, request)) is not None:
                reject(state, request, *reason)
    for view in _views(state, pool, changed):
        queue_pass = view.begin_pass()
        # 3. Order: the queue policy yields whose turn it is.
        for offer in queue_pass.offers():
            request, choice = offer.request, None
            # 4. Place: the placement policy says where; else others may have to make room.
            if not offer.tried and (not offer.blocked or view.changed_for(request)):
                choice = view.place(request, queue_pass.closed)
                queue_pass.tried(request, placed=choice is not None)
            gap_choice = place_beside(state, pool, view, request) if choice is None else None
            choice, parks = gap_choice or (choice, ())
            if choice is None:
                if offer.drains:
                    queue_pass.close(view.placeable_shapes(request))
                continue
            # 5. Commit: nothing else in a cycle writes.
            commit(state, pool, request, choice, parks)
            passed = queue_pass.passed_by(request, into_gap=gap_choice is not None)
            queue_pass.count([rival for rival in passed if view.waits_for(rival, choice)])
    # 6. Requeue: what waits on has lines of batches leave; lines are offered again once their room may have grown.
    if len(waiting.queue):
        if waiting.batch.total:
            waiting.batch.pass_over()
        if waiting.batch.total or waiting.claims:
            first = islice(waiting.queue, state.config.window)
            preempt_batch(state, pool, first, PoolView(state, pool, ()).could_run)
    elif len(waiting.batch.queue) and waiting.batch.headroom.sequences:
        state.timers.set_earlier(Timer(TimerKind.BATCH_HEADROOM, pool.name), state.now + HEADROOM_S)


def commit(state: State, pool: Pool, request: Request, choice: Choice, parks: tuple[str, ...] = ()) -> None:
    """Take a waiting request out of the queue, charge its tenant, and assign it under a new epoch.

    `parks`: sequences that make room for it.
    """
    waiting, runner = pool.waiting, state.runners[choice.uuid]
    token_runner = state.runners[choice.token] if choice.token is not None else None
    delay_s = waiting.delay_s(request, state.now)
    charge(pool, request, token_runner or runner)
    waiting.dequeue(request)
    pool.scaling.reuse.give(request.tokens.prefill, state.now)
    placement = Placement(runner.id, token_runner.id if token_runner is not None else None)
    request.assign(state.numbers.next_epoch(), placement)
    add_to_runners(state, pool, request, parks)
    send_assign(state, pool, request, delay_s=delay_s, parks=parks)
    if parks:
        state.emit(SequencesParked(pool.name, runner.id, request.id, parks))


def _views(state: State, pool: Pool, changed: Collection[str] | None) -> Iterator[PoolView]:
    """Yield the view of interactive requests, and without waiting interactive requests the view of batch requests."""
    interactive, batch = pool.waiting.queue, pool.waiting.batch.queue
    if len(interactive):
        yield PoolView(state, pool, changed)
    if not len(interactive) and len(batch):
        yield BatchView(state, pool, None if _keep_headroom(pool, state.now) else changed)


def _keep_headroom(pool: Pool, now: float) -> bool:
    """Let batch requests leave the room that the arrivals so far may need. True if all are to be offered again."""
    headroom = pool.scaling.arrivals.headroom(now, sum(pool.fleet.accepting.values()))
    pool.fleet.keep_headroom(headroom.sequences)
    return pool.waiting.batch.is_due(headroom)


def on_batch_headroom(state: State, timer: Timer) -> None:
    """Offer batch requests again: interactive arrivals may need less headroom now."""
    if timer.name in state.pools:
        state.mark_schedulable(timer.name, ())


def on_startup_grace(state: State, _: Timer) -> None:
    """Reject from now on what no runner can take: the cluster has had the time to report itself."""
    state.settle()
    for pool in state.pools.values():
        pool.waiting.recheck()
        state.mark_schedulable(pool.name)

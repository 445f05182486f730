"""The loops that timers drive: how many runners a pool wants, which are emptied, what each computes, what leaves them.

Each loop has a timer of its own, which is set by what can change its answer: nothing polls, and at rest nothing
happens. A pool's changes are gathered until its status is published (`State.mark_dirty`). Just before that the pool is
scaled, and every other loop says when it may have something to do.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from weft_scheduler.core import consolidation, migration, phases
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.scaling import scale
from weft_scheduler.core.state import State
from weft_scheduler.core.timers import Timer, TimerKind


class ControlLoop(NamedTuple):
    """A loop driven by a timer.

    `decide`: order what follows from a pool as it is; True: look again. `due`: when the answer may be another one than
    now, in seconds; None: nothing but another change of the pool can change it.
    """

    decide: Callable[[State, Pool], bool]
    due: Callable[[State, Pool], float | None]


CONTROLLERS: Mapping[TimerKind, ControlLoop] = {
    TimerKind.CONSOLIDATION: ControlLoop(consolidation.consolidate, consolidation.due),
    TimerKind.ROLES: ControlLoop(phases.review, phases.due),
    TimerKind.MIGRATION: ControlLoop(migration.empty_runners, migration.due),
}


def on_pools_changed(state: State, _: Timer) -> None:
    """Scale the changed pools, and let every other loop set its next time."""
    for name in state.take_changed_pools():
        pool = state.pools.get(name)
        if pool is not None and state.registry.is_known:
            scale(state, pool)
            for kind in CONTROLLERS:
                _expect(state, pool, kind)


def on_scale_down(state: State, timer: Timer) -> None:
    """Scale a pool again: a surplus has lasted long enough."""
    state.mark_dirty(timer.name)


def on_due(state: State, timer: Timer) -> None:
    """Let the loop of this timer decide."""
    pool = state.pools.get(timer.name)
    if pool is not None and CONTROLLERS[timer.kind].decide(state, pool):
        _expect(state, pool, timer.kind)


def _expect(state: State, pool: Pool, kind: TimerKind) -> None:
    due = CONTROLLERS[kind].due(state, pool)
    if due is not None:
        state.timers.set_earlier(Timer(kind, pool.name), due)

"""The autoscaler at work: wanted runners and victims of a pool, whenever its load, bounds or runners change.

A victim is *cordoned*: nothing new is placed on it, what runs there runs on.
"""

from collections.abc import Iterable, Iterator

from weft_scheduler.core.model.pool import Pool
from weft_scheduler.core.policy.autoscaling.autoscaler import VictimCandidate
from weft_scheduler.core.policy.autoscaling.demand import ReplicaBounds
from weft_scheduler.core.state import State
from weft_scheduler.core.timers import Timer, TimerKind


def scale(state: State, pool: Pool, *, at_once: bool = False) -> None:
    """Decide how many runners are wanted and which should go. `at_once`: for a request that came this moment.

    Nothing shrinks while a request waits, and one that waits longer than a moment gets every runner that is there. Nor
    is a runner released before this process knows the cluster.
    """
    autoscaler, spec = pool.autoscaler, pool.spec
    victims = 0
    if spec is not None:
        deadline = autoscaler.recommend(
            pool.load(),
            ReplicaBounds(spec.min_runners, spec.max_runners or None),
            state.now,
            window_s=spec.idle_s or state.config.give_back_s,
            work_s=state.config.work_s,
            keep=not state.settled or (len(pool.queue) > 0 and not at_once),
        )
        if deadline is not None:
            state.timers.set(Timer(TimerKind.SCALE_DOWN, pool.name), deadline)
        victims = autoscaler.surplus()
    present = [candidate.uuid for candidate in _candidates(pool, autoscaler.victims)]
    for uuid in autoscaler.select_victims(victims, present, lambda: _candidates(pool, pool.runners)):
        runner = state.runners.get(uuid)
        if runner is not None and runner.cordon(uuid in autoscaler.victims):
            state.update_runner(runner)


def demand(state: State, pool: Pool) -> int:
    """What the pool's requests would fill, whatever its bounds."""
    return pool.autoscaler.demand(pool.load(), state.config.work_s)


def _candidates(pool: Pool, uuids: Iterable[str]) -> Iterator[VictimCandidate]:
    """Those of these runners that count: one that drains is on its way already."""
    for uuid in uuids:
        runner = pool.runners.get(uuid)
        if runner is not None and runner.contribution is not None:
            yield VictimCandidate(runner.working_set, -runner.arrival, uuid)

"""How many runners a pool wants (Punica, section 5.1).

No lightly loaded runner: ask for more, as many as the queue fills. An idle runner: give it back. The most loaded
runners get new work first, so an idle one stays idle; one that is idle or lightly loaded is kept for what comes next.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """A pool's runners by load, and who waits. `batch` is the batch limit of one runner."""

    idle: int
    light: int
    busy: int
    queued: int
    batch: int
    min_runners: int

    @property
    def runners(self) -> int:
        return self.idle + self.light + self.busy


def surplus(load: PoolLoad) -> int:
    """Idle runners beyond the one that is kept in hand; none while anybody waits."""
    if load.queued or load.runners <= load.min_runners:
        return 0
    in_hand = 0 if load.light else 1 if load.busy else load.min_runners
    return max(0, min(load.idle - in_hand, load.runners - load.min_runners))


def wanted_runners(load: PoolLoad, give_back: bool) -> int:
    """`give_back`: the surplus has lasted long enough."""
    if load.queued:
        return max(load.min_runners, load.runners + -(-load.queued // max(1, load.batch)))
    if load.runners and not load.idle and not load.light:
        return load.runners + 1
    return max(load.min_runners, load.runners - surplus(load) * give_back)

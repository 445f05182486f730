"""The ranks of one model, started together: children spawned, parts loaded at the same time, all waited for."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from weft_runner.model.executor import Executor
from weft_runner.parallel.followers import Followers, spawn
from weft_runner.parallel.frames import nameless_file
from weft_runner.parallel.group import Group, TorchGroup, device_of

PATIENCE_S = 60.0  # of ranks for each other, within a step and when an adapter is built; far above any skew of theirs


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """Rank 0's own executor, and the others. `ending`: what closing undoes."""

    own: Executor
    group: TorchGroup
    followers: Followers
    ending: ExitStack


def start_ranks(
    size: int,
    settings: Mapping[str, Any],
    make_own: Callable[[Group], Executor],
    stopping: Callable[[], bool],
    patience_s: float,
    *,
    in_line: bool = False,
) -> Ranks:
    """`settings`: what a follower's part is made of, and its kind of `device` (`parallel.rank`).

    `patience_s`: of the ranks for each other. `in_line`: they will be the stages of a pipeline. Raises ExecutorLost,
    StoppedAtStart, and what loading a part raises on any rank; nothing is left behind then.
    """
    with ExitStack() as ending:
        meeting = nameless_file("weft-ranks")
        group = TorchGroup(0, size, device_of(settings["device"], 0), meeting, patience_s)
        ending.callback(group.close)
        followers = Followers(spawn(size, meeting), patience_s)
        ending.callback(followers.close)
        followers.start({**settings, "size": size, "patience_s": patience_s}, stopping)
        group.join(in_line=in_line)
        own = make_own(group)
        followers.await_ready(stopping)
        return Ranks(own, group, followers, ending.pop_all())

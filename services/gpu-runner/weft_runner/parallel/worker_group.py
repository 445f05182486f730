"""Ranks 1 and up as child processes of the runner: started, spoken to, watched, ended.

Each has two channels: `steps` for what happens in order, between and in steps, and `loads` for adapters, which are
built beside steps. A follower ends when its runner's ends of them close, however the runner ended; a follower that
ends, or stands still for too long, is the end of the runner (`ExecutorLost`): its requests go on elsewhere.
"""

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from weft_runner import errors
from weft_runner.errors import ExecutorLost, RunnerError, StoppedAtStart
from weft_runner.model.executor import Executor
from weft_runner.model.tensor_parallel import Group
from weft_runner.parallel.commands import Kind, read_json, write_json
from weft_runner.parallel.ipc import Channel, ChannelLost, Frame, nameless_file, pair
from weft_runner.parallel.process_group import TorchGroup, device_of

log = logging.getLogger(__name__)
T = TypeVar("T")
START_S = 600.0  # to import torch, or to load a part of the model
POLL_S = 0.2  # how soon a start is given up that is told to
END_S = 2.0  # for a follower to end by itself


@dataclass(frozen=True, slots=True, eq=False)
class Follower:
    """One child."""

    rank: int
    process: "subprocess.Popen[bytes]"
    steps: Channel
    loads: Channel


def spawn(size: int, meeting_fd: int) -> list[Follower]:
    """Ranks 1 .. size - 1, in sessions of their own: a terminal's Ctrl-C is the runner's business, which drains."""
    followers: list[Follower] = []
    for rank in range(1, size):
        (steps, theirs), (loads, theirs_too) = pair(), pair()
        files = theirs.fileno(), theirs_too.fileno(), meeting_fd
        command = [sys.executable, "-m", "weft_runner.worker", *map(str, files)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=files, start_new_session=True)  # noqa: S603
        theirs.close()
        theirs_too.close()
        followers.append(Follower(rank, process, Channel(steps), Channel(loads)))
    return followers


class Followers:
    """All of them. `tell` is the engine's thread's, `order` and `answers` are the builder's; `close` is anybody's."""

    def __init__(self, followers: Sequence[Follower], patience_s: float) -> None:
        """`patience_s`: how long a follower may leave a message, or an adapter, lying."""
        self._followers, self._patience_s = followers, patience_s
        self._on_lost: Callable[[ExecutorLost], None] = lambda _: None
        self._closing = threading.Event()
        for follower in followers:
            follower.steps.set_patience(patience_s)
            follower.loads.set_patience(patience_s)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(follower.process.pid for follower in self._followers)

    # ---- start

    def start(self, settings: Mapping[str, Any], stopping: Callable[[], bool]) -> None:
        """Tell each what it is to be, once it can hear. Raises ExecutorLost, StoppedAtStart."""
        self._await(Kind.HELLO, stopping)
        for follower in self._followers:
            message = {**settings, "rank": follower.rank}
            self._with(follower, lambda f, m=message: f.loads.send(Kind.START, write_json(m)))

    def await_ready(self, stopping: Callable[[], bool]) -> None:
        """Each has loaded its part. Raises what one was refused for, ExecutorLost, StoppedAtStart."""
        self._await(Kind.READY, stopping)

    def watch(self, on_lost: Callable[[ExecutorLost], None]) -> None:
        """`on_lost` hears from now on, from any thread, that one is lost: at once where it ended."""
        self._on_lost = on_lost
        for follower in self._followers:
            name = f"watch-rank-{follower.rank}"
            threading.Thread(target=self._wait_for, args=(follower,), name=name, daemon=True).start()

    # ---- talk

    def tell(self, kind: Kind, body: bytes = b"") -> None:
        """In the order of the steps. Does not wait for what it says to be done. Raises ExecutorLost."""
        for follower in self._followers:
            self._with(follower, lambda f: f.steps.send(kind, body))

    def order(self, kind: Kind, body: bytes, file: int) -> None:
        """Beside the steps, to be answered. Raises ExecutorLost."""
        for follower in self._followers:
            self._with(follower, lambda f: f.loads.send(kind, body, file))

    def answers(self) -> list[Frame]:
        """One of each, in order of ranks, once all have answered. Raises what one refused with, ExecutorLost."""
        frames = [self._with(follower, lambda f: f.loads.receive()) for follower in self._followers]
        for follower, frame in zip(self._followers, frames, strict=True):
            _raise_if_refused(follower.rank, frame)
        return frames

    # ---- end

    def close(self) -> None:
        """All have ended when this returns; what waits for one of them is told so at once."""
        self._closing.set()
        for follower in self._followers:
            follower.steps.close()
            follower.loads.close()
        for follower in self._followers:
            try:
                follower.process.wait(END_S)
            except subprocess.TimeoutExpired:
                log.warning("rank %d did not end by itself and is killed", follower.rank)
                follower.process.kill()
                follower.process.wait()

    # ---- inside

    def _await(self, kind: Kind, stopping: Callable[[], bool]) -> None:
        for follower in self._followers:
            left = START_S
            while not follower.loads.has_news(POLL_S):
                left -= POLL_S
                if stopping():
                    raise StoppedAtStart(f"told to stop before rank {follower.rank} was ready")
                if left <= 0:
                    raise self._lost(follower, f"it has not said {kind.name} for {START_S:.0f} s")
            frame = self._with(follower, lambda f: f.loads.receive())
            _raise_if_refused(follower.rank, frame)
            assert frame.kind == kind, frame

    def _with(self, follower: Follower, act: Callable[[Follower], T]) -> T:
        try:
            return act(follower)
        except ChannelLost as error:
            raise self._lost(follower, str(error)) from error

    def _wait_for(self, follower: Follower) -> None:
        code = follower.process.wait()
        if not self._closing.is_set():
            log.error("rank %d (pid %d) ended with %d", follower.rank, follower.process.pid, code)
            self._lost(follower, f"its process ended with {code}, see its log")

    def _lost(self, follower: Follower, why: str) -> ExecutorLost:
        error = ExecutorLost(f"rank {follower.rank} of the model (pid {follower.process.pid}) is lost: {why}")
        if not self._closing.is_set():
            self._on_lost(error)
        return error


def refusal(error: RunnerError) -> bytes:
    """REFUSED: a named error, to be raised again on rank 0."""
    return write_json({"error": type(error).__name__, "detail": str(error)})


def _raise_if_refused(rank: int, frame: Frame) -> None:
    if frame.kind == Kind.REFUSED:
        told = read_json(frame.body)
        named: type[RunnerError] = getattr(errors, told["error"])
        raise named(f"rank {rank}: {told['detail']}")


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
    """`settings`: what a follower's part is made of, and its kind of `device` (`worker.loop`).

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

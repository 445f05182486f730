"""Ranks 1 and up as child processes of the runner: started, sent commands, watched, ended.

Each has three channels: `steps` for what happens in order, between and in steps, `loads` for adapters, which are built
beside steps, and `events` for what it reports unasked. A worker ends when its runner's ends of them close, however the
runner ended; a worker that ends, or stands still for too long, is the end of the runner (`ExecutorLost`): its requests
go on elsewhere.
"""

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from weft_runner.errors import ExecutorLost, RunnerError, StoppedAtStart
from weft_runner.model.executor import Executor
from weft_runner.offload.machine import MachineRates
from weft_runner.offload.stages import StageState
from weft_runner.parallel.channel import Channel
from weft_runner.parallel.commands import RankReady, RankStart, RankStopping
from weft_runner.parallel.messages import ChannelLost

if TYPE_CHECKING:  # torch is imported where there are several ranks
    from weft_runner.parallel.process_group import RankMeeting, TorchRanks

log = logging.getLogger(__name__)
T = TypeVar("T")
START_S = 600.0  # to import torch, or to load a part of the model
POLL_S = 0.2  # how soon a start ends that is asked to stop
END_S = 2.0  # for a worker to end by itself


class RankProcess(Protocol):
    """A rank's process, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class RankChannels(NamedTuple):
    """The channels of a rank, at rank 0 or at the rank itself."""

    steps: Channel
    loads: Channel
    events: Channel


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """A further rank: a child, or a process of another host with measurements by the host's first rank."""

    rank: int
    process: RankProcess
    channels: RankChannels
    machine: MachineRates | None = None


def start_rank(files: Sequence[int]) -> RankProcess:
    """Start a child with these descriptors, in a session of its own: a terminal's Ctrl-C is the runner's business."""
    command = [sys.executable, "-m", "weft_runner.worker", *map(str, files)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=files, start_new_session=True)  # noqa: S603


class WorkerGroup:
    """All workers. The engine's thread calls `broadcast`, the builder's `request` and `replies`; any thread `close`.

    `stages`: the latest that stages which offload have reported, by rank; any thread.
    """

    def __init__(
        self, workers: Sequence[Worker], patience_s: float, on_stopping: Callable[[], None] = lambda: None
    ) -> None:
        """`patience_s`: how long a worker may leave a message, or an adapter, lying.

        `on_stopping` is called, from any thread, when the process of a worker is asked to end.
        """
        self._workers, self._patience_s, self._on_stopping = workers, patience_s, on_stopping
        self._on_event: Callable[[int, Any], None] | None = None
        self._on_lost: list[Callable[[ExecutorLost], None]] = []
        self._first_lost: str | None = None
        self.stages: dict[int, StageState] = {}
        self._started: dict[int, Any] = {}  # by rank: what has come at the start, and was not asked for yet
        self._lock, self._closing = threading.Lock(), threading.Event()
        for worker in workers:
            worker.channels.steps.set_patience(patience_s)
            worker.channels.loads.set_patience(patience_s)
            for name, target in (("watch", self._wait_for), ("events", self._take_events)):
                threading.Thread(target=target, args=(worker,), name=f"{name}-rank-{worker.rank}", daemon=True).start()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(worker.process.pid for worker in self._workers)

    # ---- start

    def start(self, start: RankStart, stopping: Callable[[], bool]) -> None:
        """Send each worker its START, once it has said that it is there. Raises ExecutorLost, StoppedAtStart."""
        self._await("hello", stopping)
        for worker in self._workers:
            self._ending_with(worker, lambda w: w.channels.loads.send(replace(start, rank=w.rank)))

    def run_beside(self, meet: Callable[[], None], stopping: Callable[[], bool]) -> None:
        """Run `meet`, which waits for all workers, but no longer than until one of them cannot come.

        Raises what `meet` raises, what a worker was refused for, ExecutorLost, StoppedAtStart; `meet` may go on then.
        """
        met: Future[None] = Future()

        def run() -> None:
            try:
                met.set_result(meet())
            except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
                met.set_exception(error)

        threading.Thread(target=run, name="meet", daemon=True).start()
        while not wait((met,), POLL_S).done:
            self._receive_start(0.0)
            if stopping():
                raise StoppedAtStart("stopped before the ranks had met")
        try:
            met.result()
        except ExecutorLost:
            self._receive_start(POLL_S)  # the end of a worker says more than that nobody answers at its address
            raise

    def await_ready(self, stopping: Callable[[], bool]) -> tuple[str, ...]:
        """Wait until each has loaded its part. Returns where some take KV of other runners.

        Raises what one was refused for, ExecutorLost, StoppedAtStart.
        """
        found: list[RankReady] = self._await("ready", stopping)
        for worker, ready in zip(self._workers, found, strict=True):
            if ready.stage is not None:
                self.stages[worker.rank] = ready.stage
        return tuple(ready.kv_address for ready in found if ready.kv_address)

    def watch(self, on_lost: Callable[[ExecutorLost], None]) -> None:
        """Call `on_lost`, from any thread, when a worker is lost, or has been: at once where it ended."""
        with self._lock:
            self._on_lost.append(on_lost)
            lost = self._first_lost
        if lost is not None:
            on_lost(ExecutorLost(lost))

    # ---- talk

    def broadcast(self, *command: Any) -> None:
        """Send a command in the order of the steps, without waiting for it to be executed. Raises ExecutorLost."""
        for worker in self._workers:
            self._ending_with(worker, lambda w: w.channels.steps.send(command))

    def request(self, *command: Any, file: int) -> None:
        """Send a command beside the steps, to be answered. Raises ExecutorLost."""
        for worker in self._workers:
            self._ending_with(worker, lambda w: w.channels.loads.send(command, file))

    def listen(self, on_event: Callable[[int, Any], None]) -> None:
        """Call `on_event` with a rank and what it reports of its KV, from a thread for each.

        None does before it has an order.
        """
        self._on_event = on_event

    def replies(self) -> list[Any]:
        """Take one reply of each worker, by rank, after all have replied. Raises errors of refusals, ExecutorLost."""
        replies = [self._ending_with(worker, lambda w: w.channels.loads.receive()) for worker in self._workers]
        return [_unless_refused(worker, reply) for worker, reply in zip(self._workers, replies, strict=True)]

    # ---- end

    def close(self) -> None:
        """End all workers and wait for their end. A thread waiting for a worker is woken at once."""
        self._closing.set()
        for worker in self._workers:
            for channel in worker.channels:
                channel.close()
        for worker in self._workers:
            try:
                worker.process.wait(END_S)
            except subprocess.TimeoutExpired:
                log.warning("rank %d did not end by itself and is killed", worker.rank)
                worker.process.kill()
                worker.process.wait()

    # ---- inside

    def _await(self, reply: str, stopping: Callable[[], bool]) -> list[Any]:
        """Take what each sends with this reply. Whichever is refused first is heard first."""
        deadline = time.monotonic() + START_S
        while missing := [worker for worker in self._workers if worker.rank not in self._started]:
            self._receive_start(POLL_S / len(missing))
            if stopping():
                raise StoppedAtStart(f"stopped before rank {missing[0].rank} was ready")
            if time.monotonic() >= deadline:
                raise self._lost(missing[0], f"it has not sent {reply!r} for {START_S:.0f} s")
        ready = [self._started.pop(worker.rank) for worker in self._workers]
        assert all(name == reply for name, _ in ready), ready
        return [value for _, value in ready]

    def _receive_start(self, timeout_s: float) -> None:
        """Take the first message of each worker, if it arrives within `timeout_s`.

        Raises what a worker was refused for, ExecutorLost.
        """
        for worker in self._workers:
            if worker.rank not in self._started and self._ending_with(
                worker, lambda w: w.channels.loads.has_data(timeout_s)
            ):
                reply = self._ending_with(worker, lambda w: w.channels.loads.receive())
                self._started[worker.rank] = _unless_refused(worker, reply)

    def _ending_with(self, worker: Worker, act: Callable[[Worker], T]) -> T:
        try:
            return act(worker)
        except ChannelLost as error:
            raise self._lost(worker, str(error)) from error

    def _take_events(self, worker: Worker) -> None:
        try:
            while True:
                event = worker.channels.events.receive()
                if isinstance(event, RankStopping):
                    log.info("rank %d is asked to stop: the runner drains", worker.rank)
                    self._on_stopping()
                elif isinstance(event, StageState):
                    self.stages[worker.rank] = event
                else:
                    assert self._on_event is not None, event
                    self._on_event(worker.rank, event)
        except ChannelLost as error:
            self._lost(worker, str(error))

    def _wait_for(self, worker: Worker) -> None:
        code = worker.process.wait()
        if not self._closing.is_set():
            log.error("rank %d (pid %d) ended with %d", worker.rank, worker.process.pid, code)
            self._lost(worker, f"its process ended with {code}, see its log")

    def _lost(self, worker: Worker, reason: str) -> ExecutorLost:
        reason = f"rank {worker.rank} of the model (pid {worker.process.pid}) is lost: {reason}"
        if not self._closing.is_set():
            with self._lock:
                self._first_lost = self._first_lost or reason
                watchers = tuple(self._on_lost)
            for on_lost in watchers:
                on_lost(ExecutorLost(reason))
        return ExecutorLost(reason)


def _unless_refused(worker: Worker, reply: Any) -> Any:
    """Return a worker's reply, unless it is an error, which is raised."""
    if isinstance(reply, RunnerError):
        raise type(reply)(f"rank {worker.rank}: {reply}", *reply.args[1:])
    return reply


PATIENCE_S = 60.0  # of ranks for each other, within a step and when an adapter is built; far above any skew of theirs
OFFLOADED_PATIENCE_S = 3600.0  # for a pass over a disk; one that completes no layer loses the runner's lease before


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedRanks:
    """Rank 0's executor, and the other ranks. `ending`: the actions of closing."""

    local: Executor
    ranks: "TorchRanks"
    workers: WorkerGroup
    ending: ExitStack
    kv_addresses: tuple[str, ...] = ()  # where the others take KV of other runners, where they do


@dataclass(frozen=True, slots=True, eq=False)
class GatheredRanks:
    """The other ranks, not started yet, and how they meet.

    Where they are on several hosts: `store_port` of rank 0, `on_stopping` of `WorkerGroup`, and what ends those that
    are on this host.
    """

    workers: Sequence[Worker]
    meeting: "RankMeeting"
    store_port: int = 0
    on_stopping: Callable[[], None] = lambda: None
    ending: ExitStack = field(default_factory=ExitStack)


# Gathers a number of ranks, with the base's files; asks meanwhile whether to stop.
GatherRanks = Callable[[int, Mapping[str, Path], Callable[[], bool]], GatheredRanks]


def _children(size: int) -> GatheredRanks:
    """Start ranks 1 .. size - 1 as children."""
    from weft_runner.parallel.process_group import RankFiles

    shared, workers = RankFiles.made(), list[Worker]()
    for rank in range(1, size):
        with ExitStack() as theirs:
            pairs = [socket.socketpair() for _ in RankChannels._fields]
            process = start_rank([*(theirs.enter_context(end).fileno() for _, end in pairs), *shared.all])
        workers.append(Worker(rank, process, RankChannels(*(Channel(end) for end, _ in pairs))))
    return GatheredRanks(workers, shared)


def launch_ranks(
    start: RankStart, make_own: "Callable[[TorchRanks], Executor]", stopping: Callable[[], bool], *,
    gather: GatherRanks | None = None,
) -> LaunchedRanks:  # fmt: skip
    """Start the other ranks, meet them, and load a part on each.

    `gather`: they are on other hosts; else children are started. Raises ExecutorLost, StoppedAtStart, and what loading
    a part raises on any rank; nothing is left behind then.
    """
    from weft_runner.parallel.process_group import TorchRanks, device_of

    grid, patience_s = start.grid, start.patience_s
    with ExitStack() as ending:
        channels = _children(grid.size) if gather is None else gather(grid.size, start.files, stopping)
        ending.push(channels.ending)
        ranks = TorchRanks(grid, 0, device_of(start.device, 0), channels.meeting, patience_s)
        ending.callback(ranks.close)
        workers = WorkerGroup(channels.workers, patience_s, channels.on_stopping)
        ending.callback(workers.close)
        workers.watch(lambda _: ranks.end_waits())
        workers.start(replace(start, store_port=channels.store_port), stopping)
        workers.run_beside(ranks.join, stopping)
        local = make_own(ranks)
        addresses = workers.await_ready(stopping)
        return LaunchedRanks(local, ranks, workers, ending.pop_all(), addresses)

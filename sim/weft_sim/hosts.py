"""Hosts: cores that threads share, and what each event costs.

A process runs Python on one thread at a time (the interpreter's lock): its events, and what a runner's engine does
between two steps, queue behind each other. A step of a model takes as many threads as the runner's executor, so that
steps and control-plane events of one host slow each other where they are more than its cores.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from weft.domain.machine import Kind
from weft_sim.clock import Clock, Rank


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU seconds of an event, by the kind of the machine and the class of the message or event.

    `per_item`: for each sequence of a Step or StepDone. `default`: for what is not listed. `wake`: of a process of that
    kind that had nothing to do, beside the event itself: a busy one finds the next event without being woken. `sends`:
    of a message that leaves a runner, after which the engine's step runs already; elsewhere sending is part of the
    event that it follows from. `switch`: seconds, not of CPU, until the other one of a runner's two threads has the
    interpreter's lock. `commit`, `outcome`: of a transaction of the store, and of each outcome in it.
    `client_request`, `client_token`: of the clients, one process on the gateway's host.
    """

    events: Mapping[tuple[Kind, str], float] = field(default_factory=dict[tuple[Kind, str], float])
    per_item: Mapping[tuple[Kind, str], float] = field(default_factory=dict[tuple[Kind, str], float])
    default: float = 0.0
    wake: Mapping[Kind, float] = field(default_factory=dict[Kind, float])
    sends: Mapping[str, float] = field(default_factory=dict[str, float])
    switch: float = 0.0
    commit: float = 0.0
    outcome: float = 0.0
    client_request: float = 0.0
    client_token: float = 0.0
    client_wake: float = 0.0

    @property
    def free(self) -> bool:
        return not (self.events or self.per_item or self.default or self.wake or self.sends)

    def cost_of(self, kind: Kind, event: str, items: int = 0) -> float:
        cost = self.events.get((kind, event), self.default)
        return cost + items * self.per_item.get((kind, event), 0.0)


# The quickstart on two cores of an AMD EPYC, measured event by event (commit 90d2784c): CPU of whole processes, so
# that gRPC, HTTP and SQLite are in it. What follows an idle moment of a process is booked as its wake, which is most of
# what a message costs. `weft bench fidelity` scales them to what the processes use where it runs.
MEASURED = Costs(
    events={
        (Kind.GATEWAY, "RequestArrived"): 0.003_5,
        (Kind.GATEWAY, "OutcomeAck"): 0.000_5,
        (Kind.SCHEDULER, "ClusterReport"): 0.000_3,
        (Kind.SUPERVISOR, "ReceivedReport"): 0.003_8,
        (Kind.RUNNER, "Start"): 0.002_3,
        (Kind.RUNNER, "StepDone"): 0.000_14,
    },
    per_item={(Kind.GATEWAY, "Step"): 0.000_047, (Kind.RUNNER, "StepDone"): 0.000_026},
    wake={
        Kind.GATEWAY: 0.000_2,
        Kind.SCHEDULER: 0.000_54,
        Kind.SUPERVISOR: 0.000_29,
        Kind.PREDICTOR: 0.001_5,  # for a prediction, and for its outcome
    },
    sends={"Step": 0.000_14},
    switch=0.000_04,
    commit=0.003_3,
)


class Host:
    """Cores that all busy threads share alike: each runs at the speed min(1, cores / busy threads).

    That is processor sharing, what round robin comes to as its quantum becomes small (Kleinrock 1967). Every busy
    thread has been given the same CPU time since any moment, so that work of s seconds is done when `_given` has grown
    by s. Work that is done at the same time ends in the order in which it began.
    """

    def __init__(self, name: str, cores: int, clock: Clock) -> None:
        self.name, self.cores, self.clock = name, cores, clock
        self.busy_s = 0.0  # of all cores, of work that has begun
        self._work: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []  # by `_done_s` at its end
        self._number = 0
        self._threads = 0  # that are busy
        self._speed = 1.0
        self._done_s, self._at = 0.0, clock.now
        self._next_end: tuple[int, int] | None = None  # which work ends first, and the plan that says so
        self._plans = 0

    def run(self, seconds: float, threads: int, done: Callable[..., None], *arguments: Any) -> None:
        """Run work that takes `threads` threads at a time, and `seconds` while there is a core for each."""
        threads = min(threads, self.cores)
        self._advance()
        self._number += 1
        heappush(self._work, (self._done_s + seconds, self._number, threads, done, arguments))
        self._threads += threads
        self.busy_s += seconds * threads
        self._plan()

    def _advance(self) -> None:
        now = self.clock.now
        self._done_s += (now - self._at) * self._speed
        self._at = now

    def _plan(self) -> None:
        """Plan when the first work ends, if nothing else begins."""
        speed = min(1.0, self.cores / self._threads) if self._threads else 1.0
        if not self._work:
            self._speed, self._done_s, self._next_end = 1.0, 0.0, None
            return
        done_s, number = self._work[0][:2]
        if speed == self._speed and self._next_end is not None and self._next_end[0] == number:
            return
        self._speed = speed
        self._plans += 1
        self._next_end = (number, self._plans)
        self.clock.at(self._at + (done_s - self._done_s) / speed, Rank.WORK, self._ended, self._plans)

    def _ended(self, plan: int) -> None:
        if self._next_end is None or self._next_end[1] != plan:
            return  # something began since
        self._advance()
        self._done_s, _, threads, done, arguments = heappop(self._work)  # exactly, whatever was rounded on the way
        self._threads -= threads
        self._next_end = None
        self._plan()
        done(*arguments)


class Lane:
    """Sequential work: a process's Python, or a model's steps with several threads each.

    `wake_s`: what the first work costs more after nothing was done; `woken`: how often that was. `switch_s`: how long
    the interpreter's lock takes from one thread of the process to another one, while nothing is computed.
    """

    def __init__(self, host: Host, threads: int = 1, wake_s: float = 0.0, switch_s: float = 0.0) -> None:
        self._host, self._threads, self._wake_s, self._switch_s = host, threads, wake_s, switch_s
        self._waiting: deque[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = deque()
        self._latest = 0  # the thread that had the lane last
        self.busy = False
        self.woken = 0

    def run(self, seconds: float, done: Callable[..., None], *arguments: Any, thread: int = 0) -> None:
        """Run work after all waiting work."""
        if self.busy:
            self._waiting.append((seconds, thread, done, arguments))
        else:
            self.busy = True
            self.woken += 1
            self._begin(seconds + self._wake_s, thread, done, arguments)

    def clear(self) -> None:
        """Drop what has not begun."""
        self._waiting.clear()

    def _begin(self, seconds: float, thread: int, done: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if thread != self._latest and self._switch_s:
            self._latest = thread
            self._host.clock.call_after(self._switch_s, Rank.WORK, self._begin, seconds, thread, done, arguments)
        else:
            self._host.run(seconds, self._threads, self._done, done, arguments)

    def _done(self, done: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        done(*arguments)
        if self._waiting:
            self._begin(*self._waiting.popleft())
        else:
            self.busy = False

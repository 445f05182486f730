"""A process: one machine, what stands around it, its streams, and the thread that serves it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from weft.domain.machine import TICK, Close, Closed, Connected, Kind, Machine, Peer, Received, Send, Tick
from weft_sim.clock import Clock, Rank
from weft_sim.hosts import Costs, Host, Lane
from weft_sim.network import Network, Stream

RECONNECT_S = 0.2  # between attempts of a link, as the shells' first back-off
GIVEN_UP_S = 2.0  # who has opened a stream to a process that stands still gives it up (`weft/wire/channels.py`)
INTERCEPTING = (Kind.SUPERVISOR, Kind.GATEWAY, Kind.RUNNER)  # whose shells take events that their machines never see
PER_SEQUENCE = ("Step", "StepDone")  # what costs something for each sequence
SPINS = 1000  # ticks of one machine at one time: more is a deadline that never passes


class LawBroken(AssertionError):
    """An invariant is broken. The message names the law."""


class Shell(Protocol):
    """The surroundings of a simulated machine: a persistent disk, clients, devices. One class per kind."""

    def start(self, process: "SimulatedProcess") -> Machine[Any, Any]:
        """Make a new machine from what is on disk; `process.peer` is set here."""
        ...

    def accepts(self, process: "SimulatedProcess", client: Any, hello: object) -> bool:
        """Return whether the server accepts a stream of this client."""
        ...

    def perform(self, process: "SimulatedProcess", effect: object) -> None:
        """Perform an effect without a peer."""
        ...

    def stopped(self, process: "SimulatedProcess") -> None:
        """Note that the process is gone, with everything but its disk."""
        ...

    def call_after(self, process: "SimulatedProcess", event: object) -> None:
        """Act after a runner's machine has handled an event, and its effects are performed."""
        ...

    def intercept(self, process: "SimulatedProcess", event: object) -> bool:
        """Return whether an event is only for the shell."""
        ...


class SimulatedProcess:
    """One process of the deployment. `machine` is None while it is down; `generation` counts its starts."""

    def __init__(
        self,
        name: str,
        kind: Kind,
        shell: Shell,
        host: Host,
        clock: Clock,
        network: Network,
        costs: Costs,
        *,
        check: bool = True,
    ) -> None:
        self.name, self.kind, self.shell, self.host = name, kind, shell, host
        self.clock, self.network, self.costs, self.checks = clock, network, costs, check
        self.machine: Machine[Any, Any] | None = None
        self.generation = 0
        self.offset_s = 0.0  # of its monotonic clock: a host that was suspended jumps ahead
        self.peer = Peer(kind, name)
        self.streams: dict[Peer, tuple[Stream, int]] = {}
        self.handled = 0
        self.busy_s = 0.0
        self.python = Lane(host)
        self.on_event: Callable[[SimulatedProcess, object, float], None] | None = None
        self.on_effects: Callable[[SimulatedProcess, object, Sequence[Any]], None] | None = None
        self._intercepts, self._free = kind in INTERCEPTING, costs.free
        self._links: list[Link] = []
        self._timer: float | None = None
        self._ticked = (0.0, 0)
        self._resumes: float | None = None
        self._still_since = 0.0
        self._waiting: list[tuple[object, int]] = []  # while it is paused

    @property
    def host_name(self) -> str:
        return self.host.name

    @property
    def up(self) -> bool:
        return self.machine is not None

    @property
    def still_until(self) -> float:
        """Return the end of a process's suspension; in the past, it runs."""
        return self._resumes or 0.0

    @property
    def now(self) -> float:
        """Return the time on the process's monotonic clock."""
        return self.clock.now + self.offset_s

    # ---------------------------------------------------------------- life

    def start(self) -> None:
        assert self.machine is None, f"{self.name} runs already"
        self.generation += 1
        switch_s = self.costs.switch if self.kind is Kind.RUNNER else 0.0
        self._timer = None
        self.python = Lane(self.host, wake_s=self.costs.wake.get(self.kind, 0.0), switch_s=switch_s)
        self.machine = self.shell.start(self)
        for link in self._links:
            link.open()
        self._arm()

    def crash(self, notice_s: float = 0.0) -> None:
        """Die (kill -9). Peers notice after `notice_s`: soon if a kernel closes sockets, late if a host dies."""
        if self.machine is None:
            return
        self.machine = None
        self._waiting.clear()
        self.python.clear()
        self._resumes = None
        for stream, side in self.network.streams_of(self):
            stream.alive[side] = False
            self.network.break_stream(stream, "connection reset", (notice_s, notice_s))
        self.streams.clear()
        self.shell.stopped(self)

    def pause(self, seconds: float) -> None:
        """Stop by SIGSTOP, then SIGCONT: time goes on, nothing is handled."""
        if self._resumes is None:
            self._still_since = self.clock.now
            self.clock.call_after(GIVEN_UP_S, Rank.FAULT, self._given_up, self.generation, self.clock.now)
        self._resumes = max(self._resumes or 0.0, self.clock.now + seconds)
        self.clock.at(self._resumes, Rank.FAULT, self._resume, self.generation)

    def _given_up(self, generation: int, started_s: float) -> None:
        if generation == self.generation and self._resumes is not None and self._still_since == started_s:
            for stream, side in self.network.streams_of(self):
                if side == 1:
                    self.network.give_up(stream)

    def _resume(self, generation: int) -> None:
        if generation != self.generation or self._resumes is None or self.clock.now < self._resumes:
            return
        self._resumes = None
        waiting, self._waiting = self._waiting, []
        for event, size in waiting:
            self.post(event, size)
        self.post(TICK)

    # ---------------------------------------------------------------- streams

    def link(self, server: "SimulatedProcess", hello: Callable[[], object | None]) -> "Link":
        """Keep a stream to this process open while the present process runs."""
        link = Link(self, server, hello)
        self._links.append(link)
        return link

    def opened(self, stream: Stream, side: int, hello: object) -> bool:
        if self.machine is None or (side == 1 and not self.shell.accepts(self, stream.ends[0], hello)):
            return False
        peer = stream.peers[1 - side]
        older = self.streams.get(peer)
        self.streams[peer] = (stream, side)
        if older is not None and older[0] is not stream:
            self.network.close(*older, "replaced by a newer stream")
        return True

    def ended(self, stream: Stream, side: int) -> bool:
        peer = stream.peers[1 - side]
        present = self.streams.get(peer)
        current = present is None or present[0] is stream
        if present is not None and current:
            del self.streams[peer]
        for link in self._links:
            if link.stream is stream:
                link.closed()
        return current

    # ---------------------------------------------------------------- events

    def post(self, event: object, size: int = 0) -> None:
        """Post an event to a process. Its machine handles the event after earlier work."""
        if self._resumes is not None:
            self._waiting.append((event, size))
            return
        if self._free:
            self.handle(event)
            return
        message: Any = event.message if isinstance(event, Received) else event
        name = type(message).__name__
        items = len(message.sequences if name == "Step" else message.step.sequences) if name in PER_SEQUENCE else 0
        cost = self.costs.cost_of(self.kind, name, items)
        self.busy_s += cost
        self.python.run(cost, self._served, self.generation, event, thread=isinstance(event, Received))

    def send(self, peer: Peer, message: object) -> None:
        """Send a message to a peer; where no stream with the peer is open the message is dropped."""
        if not self._free and self.kind is Kind.RUNNER and self.costs.sends:
            cost = self.costs.sends.get(type(message).__name__, 0.0)
            self.busy_s += cost
            self.python.run(cost, self._transmit, self.generation, peer, message, thread=1)
        else:
            self._transmit(self.generation, peer, message)

    def _transmit(self, generation: int, peer: Peer, message: object) -> None:
        if generation == self.generation and (open_stream := self.streams.get(peer)) is not None:
            self.network.send(*open_stream, message)

    def post_at(self, generation: int, event: object) -> None:
        """Post an event of that start of the process; later starts do not see it."""
        if generation == self.generation and self.up:
            self.post(event)

    def _served(self, generation: int, event: object) -> None:
        if generation == self.generation and self.machine is not None:
            self.handle(event)

    def handle(self, event: object) -> None:
        """Take one event through the machine, its effects in their order, and the next deadline."""
        machine = self.machine
        if machine is None:
            return
        self.handled += 1
        if self.on_event is not None:
            self.on_event(self, event, self.now)
        if self._intercepts and self.shell.intercept(self, event):
            return
        effects = machine.handle(event, self.clock.now + self.offset_s)
        if self.checks:
            machine.check()
        if self.on_effects is not None:
            self.on_effects(self, event, effects)
        perform = self.shell.perform
        for effect in effects:
            kind = type(effect)
            if kind is Send:
                self.send(effect.peer, effect.message)
            elif kind is Close:
                if (open_stream := self.streams.pop(effect.peer, None)) is not None:
                    self.network.close(*open_stream, effect.reason)
            else:
                perform(self, effect)
        if self.machine is machine:
            self._arm()
            if self.kind is Kind.RUNNER:
                self.shell.call_after(self, event)

    def _arm(self) -> None:
        assert self.machine is not None
        deadline = self.machine.next_deadline()
        if deadline is not None and (self._timer is None or deadline < self._timer):
            self._timer = deadline
            self.clock.at(deadline - self.offset_s, Rank.DEADLINE, self._tick, self.generation, deadline)

    def _tick(self, generation: int, deadline: float) -> None:
        if generation != self.generation or self._timer != deadline or self.machine is None:
            return
        if self._ticked[0] == self.clock.now:
            self._ticked = (self.clock.now, self._ticked[1] + 1)
            if self._ticked[1] > SPINS:
                raise LawBroken(f"{self.name} has ticked {SPINS} times at {self.clock.now}: its deadline does not pass")
        else:
            self._ticked = (self.clock.now, 0)
        self._timer = None
        self.post(TICK)


class Link:
    """A stream that a process keeps open to a server, like links of the shells."""

    def __init__(self, client: SimulatedProcess, server: SimulatedProcess, hello: Callable[[], object | None]) -> None:
        self._client, self._server, self._hello = client, server, hello
        self.stream: Stream | None = None

    def open(self) -> None:
        client = self._client
        self.stream = client.network.connect(client, self._server, self._hello())

    def closed(self) -> None:
        self.stream = None
        self._client.clock.call_after(RECONNECT_S, Rank.WORK, self._again, self._client.generation)

    def _again(self, generation: int) -> None:
        if self._client.up and generation == self._client.generation and self.stream is None:
            self.open()


__all__ = ["Closed", "Connected", "LawBroken", "Link", "Shell", "SimulatedProcess", "Tick"]

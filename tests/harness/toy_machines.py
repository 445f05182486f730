"""Toy machines and a codec, for tests of the simulator itself."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.domain.machine import TICK, Connected, Kind, Peer, Received, Send
from weft.wire.errors import PeerError
from weft_sim.clock import Clock, random_of
from weft_sim.hosts import Costs, Host
from weft_sim.network import Network
from weft_sim.process import SimulatedProcess


class Pickled:
    """Any value as bytes; those of the value "bad" break the contract."""

    def encode(self, sender: Kind, receiver: Kind, message: object) -> bytes:
        return pickle.dumps(message)

    def decode(self, sender: Kind, receiver: Kind, data: bytes) -> object:
        message = pickle.loads(data)
        if message == "bad":
            raise PeerError("it says bad")
        return message


@dataclass
class Toy:
    """Writes down what happens to it; answers every n with n - 1 until 0; `deadlines` come one after the other."""

    name: str
    log: list[tuple[float, str, object]]
    deadlines: list[float] = field(default_factory=list[float])

    def handle(self, event: object, now: float) -> Sequence[object]:
        self.log.append((round(now, 9), self.name, event))
        if event is TICK and self.deadlines:
            self.deadlines.pop(0)
        if isinstance(event, Received) and isinstance(event.message, int) and event.message > 0:
            return [Send(event.peer, event.message - 1)]
        return []

    def next_deadline(self) -> float | None:
        return self.deadlines[0] if self.deadlines else None

    def check(self) -> None: ...


@dataclass
class ToyShell:
    """Starts toys; `deadlines` for each start."""

    log: list[tuple[float, str, object]]
    deadlines: list[float] = field(default_factory=list[float])
    performed: list[object] = field(default_factory=list[object])

    def start(self, process: SimulatedProcess) -> Toy:
        process.peer = Peer(process.kind, f"{process.name}#{process.generation}")
        return Toy(process.peer.name, self.log, list(self.deadlines))

    def accepts(self, process: SimulatedProcess, client: object, hello: object) -> bool:
        return True

    def intercept(self, process: SimulatedProcess, event: object) -> bool:
        return False

    def after(self, process: SimulatedProcess, event: object) -> None: ...

    def perform(self, process: SimulatedProcess, effect: object) -> None:
        self.performed.append(effect)

    def stopped(self, process: SimulatedProcess) -> None: ...


class Town:
    """Two processes on two hosts, a gateway that links to a scheduler."""

    def __init__(self, seed: int = 0, costs: Costs | None = None, deadlines: Sequence[float] = ()) -> None:
        self.clock, self.log = Clock(0.0), list[tuple[float, str, object]]()
        self.network = Network(self.clock, Pickled(), random_of(seed, "network"), delay_s=0.001)
        self.shell = ToyShell(self.log, list(deadlines))
        self.left, self.right = (
            SimulatedProcess(
                name, kind, self.shell, Host(name, 1, self.clock), self.clock, self.network, costs or Costs()
            )
            for name, kind in (("left", Kind.GATEWAY), ("right", Kind.SCHEDULER))
        )
        self.link = self.left.link(self.right, lambda: "hello")

    def start(self) -> None:
        self.right.start()
        self.left.start()
        self.clock.run(end_s=self.clock.now + 0.1)

    def send(self, process: SimulatedProcess, message: object) -> None:
        (stream,) = process.streams.values()
        self.network.send(*stream, message)

    def run(self, seconds: float) -> None:
        self.clock.run(end_s=self.clock.now + seconds)

    def messages(self, name: str) -> list[Any]:
        return [e.message for _, who, e in self.log if who.startswith(name) and isinstance(e, Received)]

    def kinds(self, name: str) -> list[str]:
        return [type(e).__name__ for _, who, e in self.log if who.startswith(name)]


__all__ = ["Connected", "Pickled", "Town", "Toy", "ToyShell"]

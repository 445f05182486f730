"""What goes wrong in a run, and when: drawn from the seed, so that it happens again."""

import random
from dataclasses import dataclass
from enum import Enum

from weft.domain.machine import Peer

FOR_GOOD = 1e6  # seconds: a runner does not come back


class What(Enum):
    """The faults. `seconds` of a Fault is how long it lasts."""

    CRASH = "crash"  # a process is killed and comes back
    POWER = "power"  # a host dies: its peers notice late
    BREAK = "break"  # all streams of a process break, and it lives on
    PAUSE = "pause"  # a process stands still
    CLOCK = "clock"  # a process's clock jumps ahead
    SLOW = "slow"  # a runner's steps take ten times as long
    DELAY = "delay"  # messages to and from a process are late
    PARTITION = "partition"  # two hosts do not reach each other
    DUPLICATE = "duplicate"  # messages come twice
    LOAD = "load"  # a runner's adapter loads fail
    DISK = "disk"  # a disk is full: fetches fail, outcomes are not stored
    DELETE = "delete"  # an adapter is deleted, and declared again
    REORDER = "reorder"  # messages of different streams overtake each other: each is late by a time of its own
    TERMINATE = "terminate"  # a runner gets SIGTERM, drains, ends and comes back
    LIE = "lie"  # a runner says what is not so


@dataclass(frozen=True, slots=True)
class Fault:
    """At `at_s` something happens to `target`; for a partition `second` is the second host."""

    at_s: float
    kind: What
    target: str
    seconds: float
    second: str = ""

    def __str__(self) -> str:
        suffix = f" and {self.second}" if self.second else ""
        return f"{self.at_s:.3f} s: {self.kind.value} {self.target}{suffix} for {self.seconds:.2f} s"


def draw(chance: random.Random, names: list[str], runners: list[str], count: int, span_s: float) -> list[Fault]:
    """`count` faults within `span_s`, of processes called `names`, of which `runners` are runners."""
    kinds = [kind for kind in What if kind is not What.LIE]
    faults: list[Fault] = []
    for _ in range(count):
        kind = chance.choice(kinds)
        of_runner = kind in (What.SLOW, What.LOAD, What.TERMINATE)
        target = "registry" if kind is What.DELETE else chance.choice(runners if of_runner else names)
        second = chance.choice([name for name in names if name != target]) if kind is What.PARTITION else ""
        seconds = chance.choice((0.05, 0.3, 1.0, 3.0))
        if kind is What.CRASH and target in runners[1:] and chance.random() < 0.3:
            seconds = FOR_GOOD
        faults.append(Fault(round(chance.uniform(0.0, span_s), 4), kind, target, seconds, second))
    return sorted(faults, key=lambda fault: fault.at_s)


class Liar:
    """Rewrites the bytes of a peer: a changed byte, an earlier message, a message cut short."""

    def __init__(self, peer: Peer, chance: random.Random, rate: float) -> None:
        self.peer, self._chance, self._rate = peer, chance, rate
        self._sent: list[bytes] = []

    def __call__(self, data: bytes) -> bytes:
        chance = self._chance
        self._sent = [*self._sent[-20:], data]
        if not data or chance.random() > self._rate:
            return data
        match chance.randrange(3):
            case 0:
                at = chance.randrange(len(data))
                return data[:at] + bytes((chance.randrange(256),)) + data[at + 1 :]
            case 1:
                return chance.choice(self._sent)
            case _:
                return data[: chance.randrange(len(data))]

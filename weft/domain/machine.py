"""The contract of every service's core: a deterministic machine of events, effects and deadlines.

A shell feeds `handle` with what happened, performs the effects in their order and calls `handle(TICK, now)` when
`next_deadline()` has come. The same machines run under the simulator (`weft_sim`), which replaces the shells. A machine
has no clock, no random source and no thread of its own: `now` is in seconds on the caller's monotonic clock, randomness
is an argument of the constructor. Equal events at equal times give equal effects, under any hash seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, TypeVar


class Kind(Enum):
    """The kinds of processes that exchange messages."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    SUPERVISOR = "supervisor"
    RUNNER = "runner"
    PREDICTOR = "predictor"
    REGISTRY = "registry"  # the operator, or the controller of `weft up`

    __hash__ = object.__hash__  # Enum's own is a Python function, and every look-up by Peer calls it


class Peer(NamedTuple):
    """The other end of a stream. `name`: what its hello gave (a gateway's id, a runner's "uuid/incarnation")."""

    kind: Kind
    name: str


@dataclass(frozen=True, slots=True)
class Connected:
    """A stream with that peer is open, after the hellos. What an earlier stream with the peer carried is void."""

    peer: Peer
    hello: object = None  # the peer's hello, a value of weft.domain


class Received(NamedTuple):
    """A peer's message: a value of weft.domain. A tuple, for one is made of every step."""

    peer: Peer
    message: object


@dataclass(frozen=True, slots=True)
class Closed:
    """The stream with that peer is over."""

    peer: Peer
    reason: str = ""


class Tick(Enum):
    """A deadline has come."""

    TICK = "tick"


TICK = Tick.TICK


class Send(NamedTuple):
    """Send a message on the stream with that peer; the shell drops it where no stream is open."""

    peer: Peer
    message: object


@dataclass(frozen=True, slots=True)
class Close:
    """End the stream with that peer. No Closed follows: the machine is through with it as it decides this."""

    peer: Peer
    reason: str


@dataclass(frozen=True, slots=True)
class PersistTerm:
    """Make this term of a scheduler durable, as the highest so far; by a scheduler before anything that follows."""

    term: int


E_contra = TypeVar("E_contra", contravariant=True)  # events
F_co = TypeVar("F_co", covariant=True)  # effects


class Machine(Protocol[E_contra, F_co]):
    """`check` raises AssertionError for a state that cannot be: it is called between events."""

    def handle(self, event: E_contra, now: float) -> Sequence[F_co]: ...

    def next_deadline(self) -> float | None: ...

    def check(self) -> None: ...

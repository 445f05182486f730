"""What the request pool tells gateways (Tokens, NoRoom, Ended), the adapter pool (Load ...) and reports (PoolState)."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from weft.domain.adapter import AdapterState
from weft_runner.core.choice import TokenLogprob
from weft_runner.core.sequence import Epoch, Finish


class EndReason(Enum):
    """Why the runner gives a sequence up."""

    DRAINED = "drained"
    LOAD_FAILED = "load_failed"
    INTERNAL = "internal"
    UNKNOWN_ADAPTER = "unknown_adapter"


class Tokens(NamedTuple):
    """What an iteration produced for one sequence; `position` is the first token's index in the answer.

    A tuple, for one is made of every token: a third of what a frozen dataclass costs (0.26 against 0.89 us).

    `logprobs`: one for each token where the request asked for them, else empty.
    """

    owner: int
    request_id: str
    epoch: Epoch
    position: int
    tokens: tuple[int, ...]
    finish: Finish
    doublings: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Not admitted; `reason` is "pages", "sequences" or "context"."""

    owner: int
    request_id: str
    epoch: Epoch
    free_pages: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The runner gives a sequence up after `emitted_tokens` of its answer."""

    owner: int
    request_id: str
    epoch: Epoch
    reason: EndReason
    detail: str
    emitted_tokens: int


Event = Tokens | NoRoom | Ended


@dataclass(frozen=True, slots=True)
class Load:
    """Read an adapter that is on disk and convert it for a device slot, in the background.

    `to_host`: keep a copy in host memory. `pages`: those that were allocated for it, exactly what it takes.
    """

    digest: str
    slot: int
    to_host: bool = True
    pages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Unload:
    """A slot is empty from now on."""

    slot: int


@dataclass(frozen=True, slots=True)
class DropHost:
    """The host copy goes."""

    digest: str


@dataclass(frozen=True, slots=True)
class Retain:
    """The complete list of digests to keep on disk: the others are no longer desired and their last stream is over."""

    digests: frozenset[str]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring an adapter to disk, and into host memory if asked, in the background.

    `urgent`: a sequence waits for it. `measure`: report what it takes on the device.
    """

    digest: str
    to_host: bool = False
    urgent: bool = False
    measure: bool = False


Action = Load | Unload | DropHost | Retain | Fetch


@dataclass(frozen=True, slots=True)
class SequenceView:
    request_id: str
    epoch: Epoch
    gateway_id: str
    adapter: str
    reserved_pages: int
    used_pages: int
    tokens: int
    admitted: int
    reservation_tokens: int
    waiting: bool


@dataclass(frozen=True, slots=True)
class OverrunView:
    request_id: str
    epoch: Epoch
    wanted_pages: int
    reservation_tokens: int


@dataclass(frozen=True, slots=True)
class PoolState:
    """The whole state between two iterations: free + reserved + adapter pages = total, reserved covers used.

    `free_pages` is what a newcomer can count on: pages that unused adapters would give back are free, those that an
    adapter waits for are not. A page that several sequences read is reserved by the eldest of them.
    `adapters` lists those on the device, in host memory, loading, in use or with an error; `adapters_known` counts all.
    """

    free_pages: int
    used_pages: int
    total_pages: int
    sequences: tuple[SequenceView, ...]
    adapters: tuple[AdapterState, ...]
    adapters_known: int
    overruns: tuple[OverrunView, ...]
    draining: bool
    not_ready: str
    iterations: int
    forwards: int
    grown_pages: int
    doublings: int
    desired_version: int
    tokens: int
    adapter_pages: int = 0  # adapters in use, on their way or pinned hold them, or wait for them
    prefix_reused_tokens: int = 0

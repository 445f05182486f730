"""What can be ordered. A shell executes effects in order: RaiseTerm must be durable before what follows it."""

from dataclasses import dataclass
from enum import Enum

from weft_scheduler.core.values import DesiredList, Epoch, RouteTable, RunnerId


@dataclass(frozen=True, slots=True)
class RaiseTerm:
    """Persist this term (and tell it to every supervisor) before anything that comes after."""

    term: int


@dataclass(frozen=True, slots=True)
class Assign:
    """Start (request, epoch) at that runner with `reservation_tokens` output tokens from here on."""

    gateway: str
    request_id: str
    epoch: Epoch
    runner: RunnerId
    address: str
    reservation_tokens: int
    numerics_class: str = ""  # of that runner


@dataclass(frozen=True, slots=True)
class Preempt:
    """Cancel this epoch at its runner, answer Failed(PREEMPTED), hold the stream."""

    gateway: str
    request_id: str
    epoch: Epoch


class RejectReason(Enum):
    """Why a request ends here."""

    QUEUE_FULL = "queue_full"
    TOO_LARGE = "too_large"
    UNKNOWN_POOL = "unknown_pool"
    TOO_MANY_MOVES = "too_many_moves"
    ADAPTER_FAILED = "adapter_failed"
    UNKNOWN_ADAPTER = "unknown_adapter"


@dataclass(frozen=True, slots=True)
class Reject:
    """The request is over."""

    gateway: str
    request_id: str
    reason: RejectReason
    message: str
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class SendRoutes:
    """The complete route table for one gateway."""

    gateway: str
    table: RouteTable


@dataclass(frozen=True, slots=True)
class TellGone:
    """Every session to that incarnation is over."""

    gateway: str
    runner: RunnerId


@dataclass(frozen=True, slots=True)
class AckOutcomes:
    """In the store: the gateway may forget them."""

    gateway: str
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HangUp:
    """End this gateway's stream: outcomes that had no room here are told again on its next one."""

    gateway: str


@dataclass(frozen=True, slots=True)
class Order:
    """What that runner should know, by way of the supervisor that reports it."""

    supervisor: str
    runner: RunnerId
    desired: DesiredList


@dataclass(frozen=True, slots=True)
class ForwardOutcome:
    """For the store and the predictor."""

    supervisor: str
    request_id: str
    record: bytes


@dataclass(frozen=True, slots=True)
class TellTerm:
    """The scheduler's hello to one supervisor."""

    supervisor: str
    term: int


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """To the registry, when it changed."""

    pool: str
    ready_runners: int
    wanted_runners: int
    running: int
    queued: int
    victims: tuple[str, ...] = ()  # names of the runners that should go, the first one first
    max_runners: int = 0  # of the PoolSpec that this answers
    total_pages: int = 0
    reserved_pages: int = 0
    demand_runners: int = 0


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """To the registry, when it changed."""

    uid: str
    digest: str
    routed: bool
    ready_runners: int
    load_errors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Queued:
    """For logs and metrics: the request waits. `reason` says what for."""

    request_id: str
    pool: str
    reason: str


@dataclass(frozen=True, slots=True)
class Requeued:
    """For logs and metrics: an epoch is over and the request waits again."""

    request_id: str
    pool: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """For logs and metrics: a request that has tokens goes on at that runner, of the same numerics class or another."""

    request_id: str
    pool: str
    runner: RunnerId
    from_class: str
    to_class: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """For logs and metrics: an event that changes nothing any more."""

    what: str
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunnerEnded:
    """For logs: an incarnation is over."""

    runner: RunnerId
    reason: str


Effect = (
    RaiseTerm
    | Assign
    | Preempt
    | Reject
    | SendRoutes
    | TellGone
    | AckOutcomes
    | HangUp
    | Order
    | ForwardOutcome
    | TellTerm
    | PoolStatus
    | AdapterStatus
    | Queued
    | Requeued
    | Resumed
    | Ignored
    | RunnerEnded
)

"""What can happen. One class an event; the gateway, supervisor or registry it came from is its first field."""

from dataclasses import dataclass
from enum import Enum

from weft.identities import NEVER
from weft_scheduler.core.values import AdapterSpec, Epoch, KeyRoute, PoolSpec, PreemptDecision, RunnerId, RunnerReport


@dataclass(frozen=True, slots=True)
class GatewayUp:
    """A gateway's stream is there: what an older stream of it said is void, all it holds will be submitted again."""

    gateway: str


@dataclass(frozen=True, slots=True)
class ResubmitComplete:
    """The gateway has submitted everything it holds."""

    gateway: str


@dataclass(frozen=True, slots=True)
class GatewayDown:
    """The gateway's stream ended: its requests are forgotten until it submits them again."""

    gateway: str


@dataclass(frozen=True, slots=True)
class Submit:
    """A request, new or held by the gateway before. `epoch` and `runner` say where it runs, if it does."""

    gateway: str
    request_id: str
    pool: str
    namespace: str
    model_name: str
    digest: str
    prompt_tokens: int
    max_tokens: int
    emitted_tokens: int = 0
    p50_tokens: int = 0
    p90_tokens: int = 0
    waited_s: float = 0.0
    epoch: Epoch = NEVER
    runner: RunnerId | None = None
    moves: int = 0  # counted ones: without NO_ROOM and PREEMPTED
    reservation_tokens: int = 0  # under that epoch, from its start on
    start_emitted_tokens: int = 0  # emitted when that epoch began
    numerics_class: str = ""  # of the runner that computed the latest of the emitted tokens


class FailReason(Enum):
    """Why an epoch is over without an outcome."""

    SESSION_LOST = "session_lost"
    NO_ROOM = "no_room"
    PREEMPTED = "preempted"
    DRAINED = "drained"
    LOAD_FAILED = "load_failed"
    RUNNER_ERROR = "runner_error"


@dataclass(frozen=True, slots=True)
class Failed:
    """That epoch is over, with `emitted_tokens` streamed: place the request again."""

    gateway: str
    request_id: str
    epoch: Epoch
    reason: FailReason
    emitted_tokens: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this request any more."""

    gateway: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Started:
    """The runner has admitted this epoch."""

    gateway: str
    request_id: str
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class OutcomeReported:
    """A request's one terminal record; `record` is passed on unread, the rest is what the scheduler learns from."""

    gateway: str
    request_id: str
    pool: str
    digest: str
    completion_tokens: int
    censored: bool
    record: bytes


@dataclass(frozen=True, slots=True)
class SupervisorUp:
    """A supervisor's stream is there; full reports of its runners follow."""

    supervisor: str
    highest_term: int = 0


@dataclass(frozen=True, slots=True)
class SupervisorDown:
    """Its runners take nothing new until somebody reports them again."""

    supervisor: str


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """Whole states of the runners that changed, leases that ran out, and victims."""

    supervisor: str
    runners: tuple[RunnerReport, ...] = ()
    lost: tuple[RunnerId, ...] = ()
    preempts: tuple[PreemptDecision, ...] = ()


@dataclass(frozen=True, slots=True)
class OutcomesStored:
    """These outcomes are in the store."""

    supervisor: str
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeysTold:
    """All API keys."""

    supervisor: str
    keys: tuple[KeyRoute, ...]


@dataclass(frozen=True, slots=True)
class RegistryUp:
    """A registry stream is there and wants every status once."""


@dataclass(frozen=True, slots=True)
class RegistryChange:
    """Desired state: a complete snapshot, or what changed since."""

    snapshot: bool
    pools: tuple[PoolSpec, ...] = ()
    adapters: tuple[AdapterSpec, ...] = ()
    removed_pools: tuple[str, ...] = ()
    removed_adapters: tuple[str, ...] = ()


GatewayEvent = GatewayUp | ResubmitComplete | GatewayDown | Submit | Failed | Cancel | Started | OutcomeReported
ClusterEvent = SupervisorUp | SupervisorDown | ClusterReport | OutcomesStored | KeysTold
RegistryEvent = RegistryUp | RegistryChange
Event = GatewayEvent | ClusterEvent | RegistryEvent

"""Values that events, effects and state share. All are immutable; times are seconds on the caller's monotonic clock."""

from dataclasses import dataclass, field
from enum import IntEnum

from weft.identities import Epoch, RunnerId

BASE = ""  # the digest of "no adapter"


class Tier(IntEnum):
    """Where an adapter is, or has to be at least; the nearer to the device, the higher."""

    UNSPECIFIED = 0
    REMOTE = 1
    DISK = 2
    HOST = 3
    DEVICE = 4


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """What does not change while a runner lives."""

    address: str
    pool: str
    page_tokens: int
    total_pages: int
    max_sequences: int
    max_adapters: int
    max_rank: int
    max_context_tokens: int
    name: str = ""  # what people and the operator call it
    best_batch: int = 0  # beyond it more sequences gain nothing, or are too slow; 0: not measured
    numerics_class: str = ""  # runners of one class compute the same tokens (docs/numerics.md)

    @property
    def good_sequences(self) -> int:
        """What it runs well, of the `max_sequences` that it takes."""
        return min(self.best_batch or self.max_sequences, self.max_sequences)


@dataclass(frozen=True, slots=True)
class SequenceView:
    """A sequence as its runner reports it. `reservation_tokens` counts output tokens from this epoch's start on."""

    request_id: str
    epoch: Epoch
    digest: str
    reservation_tokens: int


@dataclass(frozen=True, slots=True)
class AdapterView:
    """An adapter that is on a runner's device or on its way to its tier, or that it failed to load."""

    digest: str
    on_device: bool
    error: str = ""
    loading: bool = False


@dataclass(frozen=True, slots=True)
class RunnerReport:
    """A runner's whole state; `free_pages` are in no reservation, `owed_pages` are wanted by paused sequences."""

    runner: RunnerId
    spec: RunnerSpec | None
    sequence: int
    free_pages: int
    sequences: tuple[SequenceView, ...] = ()
    adapters: tuple[AdapterView, ...] = ()
    owed_pages: int = 0
    draining: bool = False
    ready: bool = True
    desired_version: int = 0
    tokens: int = 0  # computed since the start of the incarnation


@dataclass(frozen=True, slots=True)
class PreemptDecision:
    """The supervisor's answer to an overrun: this sequence leaves its runner, its next reservation is given."""

    runner: RunnerId
    request_id: str
    epoch: Epoch
    for_request_id: str
    reservation_tokens: int


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool as the registry wants it."""

    name: str
    base_digest: str = ""
    base_model_name: str = ""
    shared_all: bool = False
    shared_namespaces: tuple[str, ...] = ()
    max_queue: int = 1000
    max_moves: int = 8
    placement: str = "punica"
    queue: str = "fcfs"
    reservation: str = "calibrated"
    created_unix_s: int = 0
    min_runners: int = 0
    max_runners: int = 0  # 0: no bound was told
    idle_s: float = 0.0  # 0: as the scheduler is configured
    hold_s: int = 0  # for the route table; 0: each gateway's own
    drain_s: float = 0.0  # 0: as the scheduler is configured
    max_context_tokens: int = 0  # what its runners will have; 0: not known


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """An adapter as the registry wants it; without a digest it is not routed."""

    uid: str
    namespace: str
    name: str
    model_name: str
    pool: str
    digest: str
    rank: int
    bytes: int = 0
    pinned: bool = False
    created_unix_s: int = 0
    tier: Tier = Tier.UNSPECIFIED  # the least that a Ready runner holds it in


@dataclass(frozen=True, slots=True)
class KeyRoute:
    """The hash of an API key and the namespace it speaks for."""

    key_hash: str
    namespace: str
    key_id: str


@dataclass(frozen=True, slots=True)
class Route:
    """A served name and what answers to it."""

    model_name: str
    namespace: str
    pool: str
    digest: str
    rank: int
    uid: str
    created_unix_s: int


@dataclass(frozen=True, slots=True)
class PoolRoute:
    """What a gateway has to know of a pool. `max_context_tokens` 0: no runner has ever told."""

    spec: PoolSpec
    max_context_tokens: int
    ready_runners: int


@dataclass(frozen=True, slots=True, eq=False)
class RouteTable:
    """The complete table; versions grow, across restarts too (the term is in the upper 32 bits).

    One object a version: identity is equality, so that a cache by table does not hash a hundred thousand routes.
    """

    version: int
    routes: tuple[Route, ...]
    pools: tuple[PoolRoute, ...]
    keys: tuple[KeyRoute, ...]
    keys_known: bool


@dataclass(frozen=True, slots=True)
class DesiredAdapter:
    """An adapter that a runner should know; before it is Ready it has pinned ones in a slot, others at their tier."""

    digest: str
    rank: int
    bytes: int
    pinned: bool
    tier: Tier = Tier.UNSPECIFIED


@dataclass(frozen=True, slots=True, eq=False)
class DesiredList:
    """All that the runners of a pool should know. One object a version: identity is equality."""

    version: int
    adapters: tuple[DesiredAdapter, ...]


@dataclass(frozen=True, slots=True)
class Config:
    """Limits and times of the core. Seconds unless the name says otherwise."""

    assign_s: float = 5.0  # an Assign neither started nor reported by then is taken back
    avoid_s: float = 3.0  # a gateway's requests keep off a runner whose session it lost
    drain_s: float = 300.0  # streams of a replaced or deleted digest may run on this long
    absent_s: float = 10.0  # a runner no supervisor reports is gone after this long
    same_class_s: float = 5.0  # a request with tokens waits this long for a runner of their numerics class
    no_room_s: float = 0.1  # first pause between a request and a runner that said NoRoom; doubles up to assign_s
    first_table_s: float = 2.0  # the first route table waits this long for the API keys
    status_s: float = 0.2  # statuses to the registry are gathered this long
    status_batch: int = 2_000  # adapters looked at per gathering: a stream's queue holds ten times as many messages
    give_back_s: float = 60.0  # runners that are needed no more are wanted this long all the same
    work_s: float = 30.0  # what waits should be done by then: about as long as a new runner takes to come
    route_grace_s: float = 5.0  # a retired digest is still accepted this long from gateways with an older table
    starvation_bound: int = 32  # how often a waiting request may be passed
    window: int = 64  # how many waiting requests may be passed at all in one look at the queue
    max_outcomes: int = 20_000  # kept until a supervisor has stored them
    default_output_tokens: int = 256  # reserved when nobody predicts and nothing was seen yet
    quantile: float = 0.9
    skip_limit: int = 64  # avoided runners looked past in one decision
    length_adapters: int = field(default=10_000)  # adapters whose lengths are remembered

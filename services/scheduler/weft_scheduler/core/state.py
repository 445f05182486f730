"""What the scheduler knows: requests, gateways, runners, pools. One owner (the `Scheduler`), changed by its event.

A request is in exactly one place: held back (its gateway is still re-submitting), in its pool's queue, or owned by a
runner (assigned, running, leaving). `invariants.py` says it exactly.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b

from weft.identities import NEVER
from weft_scheduler.core.capacity import Hold, Unit
from weft_scheduler.core.desired import Desired
from weft_scheduler.core.queueing import Queue
from weft_scheduler.core.ranking import Key
from weft_scheduler.core.rate import Pace, Rate
from weft_scheduler.core.shelves import Shape, Shelves
from weft_scheduler.core.totals import Share, Totals
from weft_scheduler.core.values import (
    AdapterSpec,
    Config,
    DesiredAdapter,
    Epoch,
    KeyRoute,
    PoolSpec,
    Route,
    RunnerId,
    RunnerReport,
    RunnerSpec,
)


class Phase(Enum):
    """Where a request is."""

    HELD = "held"  # its gateway is still re-submitting: order is not known yet
    WAITING = "waiting"  # in its pool's queue
    ASSIGNED = "assigned"  # an Assign is out, not acknowledged
    RUNNING = "running"  # started, or in its runner's report
    LEAVING = "leaving"  # told to leave, or its runner is gone: the gateway's Failed is awaited


# Which phase may follow; a request that ends is forgotten in any of them.
NEXT_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.HELD: frozenset({Phase.WAITING, Phase.ASSIGNED, Phase.RUNNING, Phase.LEAVING}),  # the last three: adopted
    Phase.WAITING: frozenset({Phase.ASSIGNED}),
    Phase.ASSIGNED: frozenset({Phase.RUNNING, Phase.LEAVING, Phase.HELD}),
    Phase.RUNNING: frozenset({Phase.LEAVING, Phase.HELD}),
    Phase.LEAVING: frozenset({Phase.LEAVING, Phase.HELD}),  # again: the runner of a victim is lost
}

MAX_ENDED = 20_000  # replaced incarnations remembered, twice the fleet this is made for
OWNED = frozenset({Phase.ASSIGNED, Phase.RUNNING, Phase.LEAVING})


@dataclass(slots=True, eq=False)
class Request:
    """A request on its way. `cover_tokens` is the output position its reservation reaches to, 0: not decided yet."""

    id: str
    gateway: str
    pool: str
    namespace: str
    digest: str
    prompt_tokens: int
    max_tokens: int
    emitted_tokens: int
    p90_tokens: int
    since: float  # when it arrived, on this process's clock: now - waited
    ticket: int  # breaks ties of `since`
    moves: int = 0
    cover_tokens: int = 0
    start_emitted_tokens: int = 0  # emitted when the present epoch was assigned
    epoch: Epoch = NEVER  # the highest it was assigned under
    runner: RunnerId | None = None
    waiting_tokens: int = 0  # as its pool counts it, while it waits
    passes: int = 0  # later requests admitted on its runners while it waited
    numerics_class: str = ""  # of the runner that computed its latest tokens; none before the first
    assigned_class: str = ""  # of the runner of its present epoch
    same_class_until: float = 0.0  # from then on any class will do; 0: it has not waited since it ran
    no_rooms: int = 0  # NoRoom answers in a row
    avoid: dict[RunnerId, float] = field(default_factory=dict[RunnerId, float])
    load_failures: dict[RunnerId, str] = field(default_factory=dict[RunnerId, str])
    admitted_before: bool = False  # was accepted once: never answered QUEUE_FULL
    _phase: Phase = field(default=Phase.HELD, init=False)

    @property
    def phase(self) -> Phase:
        """Where it is."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """The next phase. AssertionError where the present one does not lead there."""
        assert phase in NEXT_PHASES[self._phase], (self.id, self._phase, phase)
        self._phase = phase

    @property
    def order(self) -> tuple[float, int]:
        """First come, first served."""
        return self.since, self.ticket

    @property
    def context_tokens(self) -> int:
        """The most it can ever hold."""
        return self.prompt_tokens + self.max_tokens


@dataclass(slots=True)
class Gateway:
    """A gateway whose stream is there."""

    id: str
    complete: bool = False  # has re-submitted all it holds
    requests: set[str] = field(default_factory=set[str])
    avoid: dict[RunnerId, float] = field(default_factory=dict[RunnerId, float])
    lost_sessions: dict[RunnerId, int] = field(default_factory=dict[RunnerId, int])  # in a row
    has_routes: int = 0  # version last sent


@dataclass(frozen=True, slots=True)
class Pending:
    """An Assign that no report includes yet."""

    epoch: Epoch
    pages: int
    digest: str


class Runner:
    """A runner incarnation: what it reported, and what was assigned since. `room.py` keeps its accounts."""

    __slots__ = (
        "active",
        "arrival",
        "confirmed",
        "cordoned",
        "errors",
        "id",
        "included",
        "owned",
        "pending",
        "pending_pages",
        "priority",
        "ready_version",
        "report",
        "reported_at",
        "serving",
        "share",
        "shelved",
        "spec",
        "supervisor",
        "takes_more",
        "told_version",
    )

    def __init__(self, runner_id: RunnerId, arrival: int = 0) -> None:
        self.id = runner_id
        self.arrival = arrival  # the newest has the highest
        self.supervisor = ""  # who reports it; "" until somebody does
        self.confirmed = False  # fully reported on its supervisor's present stream
        self.cordoned = False  # should go: takes nothing new
        self.serving = False  # has been able to serve once: it is not held back for what is pinned later
        self.spec: RunnerSpec | None = None
        self.report: RunnerReport | None = None
        self.reported_at = 0.0
        self.included: dict[str, Epoch] = {}
        self.pending: dict[str, Pending] = {}
        self.pending_pages = 0
        self.active: dict[str, int] = {}  # digest -> sequences, reported and pending: its busy slots
        self.owned: set[str] = set()
        self.errors: dict[str, str] = {}
        self.priority = int.from_bytes(blake2b(runner_id.uuid.encode(), digest_size=8).digest(), "big")
        self.shelved: tuple[Shape, Key, tuple[str, ...] | None] | None = None
        self.share: Share | None = None  # what it adds to its pool's totals, from its first report on until it drains
        self.takes_more = False  # counted in its pool's `takers`
        self.ready_version: int | None = None  # the desired version it is Ready with
        self.told_version = 0

    @property
    def shape(self) -> Shape:
        """What it can hold at all. Only of a runner with a spec."""
        assert self.spec is not None
        return Shape(self.spec.max_rank, self.spec.max_context_tokens, self.spec.numerics_class)


class Pool:
    """A pool: what the registry wants, its runners by placement order, its queue."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec: PoolSpec | None = None
        self.adapters: dict[str, AdapterSpec] = {}
        # what follows from each adapter, made once: a change of one must not remake a hundred thousand
        self.routes: dict[str, Route] = {}
        self.wanted: dict[str, DesiredAdapter] = {}
        self.desired = Desired()
        self.live: Counter[str] = Counter()  # digest -> requests on their way
        self.queue: Queue[Request] = Queue()
        self.waiting: Counter[str] = Counter()  # digest -> requests in the queue
        self.waiting_tokens = 0
        self.requests: set[str] = set()
        self.running = 0
        self.rate, self.pace = Rate(), Pace()
        self.runners: set[str] = set()
        self.shelves, self.totals = Shelves(), Totals()
        self.takers: Counter[Shape] = Counter()  # runners that take something new now or soon: neither drain nor go
        self.unit: Unit | None = None  # the mean runner, the last known while there is none
        self.hold = Hold()
        self.wanted_runners = 0
        self.victims: list[str] = []  # uuids, the first to go first
        self.ready_versions: Counter[int] = Counter()
        self.max_context_tokens = 0  # of the ready runners; the last known while there are none
        self.sweep = False  # somebody in the queue may have become impossible

    def enqueue(self, request: Request, tokens: int) -> None:
        """Let it wait; `tokens`: what it has to compute and hold, by prediction."""
        request.waiting_tokens = tokens
        self.queue.add(request)
        self.waiting[request.digest] += 1
        self.waiting_tokens += tokens

    def dequeue(self, request: Request) -> None:
        """It waits no more. Raises KeyError where it does not."""
        self.queue.remove(request)
        self.waiting_tokens -= request.waiting_tokens
        self.waiting[request.digest] -= 1
        if not self.waiting[request.digest]:
            del self.waiting[request.digest]

    def put_adapter(self, spec: AdapterSpec) -> None:
        """Take an adapter in, or its newer version. Without a digest it is neither routed nor wanted."""
        self.drop_adapter(spec.uid)
        self.adapters[spec.uid] = spec
        if spec.digest:
            self.routes[spec.uid] = Route(
                spec.model_name, spec.namespace, spec.pool, spec.digest, spec.rank, spec.uid, spec.created_unix_s
            )
            self.wanted[spec.uid] = DesiredAdapter(spec.digest, spec.rank, spec.bytes, spec.pinned, spec.tier)

    def drop_adapter(self, uid: str) -> None:
        for by_uid in (self.adapters, self.routes, self.wanted):
            by_uid.pop(uid, None)

    def drop_adapters(self) -> None:
        for by_uid in (self.adapters, self.routes, self.wanted):
            by_uid.clear()

    def drain_s(self, config: Config) -> float:
        """How long streams of a replaced or deleted digest may run on."""
        return (self.spec.drain_s if self.spec else 0.0) or config.drain_s

    def has_taker(self, rank: int, context_tokens: int, numerics_class: str) -> bool:
        """Whether a runner of that class takes such a request now or soon."""
        return any(shape.takes(rank, context_tokens, numerics_class) for shape in self.takers)

    @property
    def in_use(self) -> bool:
        """Whether there is a reason to remember it."""
        return self.spec is not None or bool(self.requests or self.runners or self.adapters)


class State:
    """Everything, by name."""

    def __init__(self, term: int) -> None:
        self.term = term
        self.counter = 0
        self.tickets = 0
        self.arrivals = 0
        self.versions = 0
        self.gateways: dict[str, Gateway] = {}
        self.requests: dict[str, Request] = {}
        self.runners: dict[str, Runner] = {}
        self.ended: dict[str, str] = {}  # uuid -> the incarnation that a newer one has replaced
        self.pools: dict[str, Pool] = {}
        self.adapter_pool: dict[str, str] = {}  # adapter uid -> pool
        self.supervisors: dict[str, None] = {}  # in order of arrival
        self.registry_known = False
        self.settled = False  # the cluster has had the time to report itself
        self.keys: tuple[KeyRoute, ...] = ()
        self.keys_known = False
        self.look: dict[str, None] = {}  # pools whose queue may move, in order
        self.touched: set[str] = set()  # pools whose status may differ
        self.readiness: set[str] = set()  # pools whose adapters' statuses may differ
        self.reroute = False  # the route table may differ, and should go out at once

    def pool(self, name: str) -> Pool:
        """The pool of that name, new if need be."""
        if name not in self.pools:
            self.pools[name] = Pool(name)
        return self.pools[name]

    def runner(self, runner_id: RunnerId | None) -> Runner | None:
        """That incarnation, if it is the present one."""
        runner = self.runners.get(runner_id.uuid) if runner_id else None
        return runner if runner is not None and runner.id == runner_id else None

    def new_runner(self, runner_id: RunnerId) -> Runner:
        """The record of an incarnation that nobody has spoken of."""
        self.arrivals += 1
        runner = self.runners[runner_id.uuid] = Runner(runner_id, self.arrivals)
        return runner

    def end(self, runner_id: RunnerId) -> None:
        """Remember an incarnation that a newer one has replaced: what is still said of it is stale. Bounded."""
        self.ended.pop(runner_id.uuid, None)
        self.ended[runner_id.uuid] = runner_id.incarnation
        if len(self.ended) > MAX_ENDED:
            del self.ended[next(iter(self.ended))]

    def version(self) -> int:
        """Grows with each call, and across restarts: the term is its upper half."""
        self.versions += 1
        return (self.term << 32) | self.versions

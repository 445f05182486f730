"""Drives the scheduler's machine in tests: peers that speak in short words, and every law checked after each event.

A runner's reports are what real ones are: a full one first, then what changed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from weft.domain.adapter import AdapterState
from weft.domain.ids import NEVER, Epoch, RunnerId
from weft.domain.machine import TICK, Closed, Connected, Kind, Peer, Received, Send
from weft.domain.request import (
    Assign,
    Failed,
    FailReason,
    GatewayHello,
    OutcomeReport,
    Priority,
    ResubmitComplete,
    RunnerChecked,
    RunnerGone,
    Submit,
)
from weft.domain.routes import AdapterSpec, PhaseCounts, PoolSpec, RegistryChange, RegistryHello
from weft.domain.runner import (
    ClusterReport,
    Overrun,
    PreemptDecision,
    ReportedRunner,
    RunnerFigures,
    RunnerReport,
    RunnerSpec,
    SequenceState,
    SupervisorHello,
)
from weft_scheduler.core import (
    Effect,
    Event,
    Pool,
    PoolLoad,
    Request,
    RunnerAccount,
    Scheduler,
    SchedulerConfig,
    State,
    demand,
    estimate_retry_ms,
    load_of,
)

POOL = "acme/p"
REGISTRY = Peer(Kind.REGISTRY, "registry")
M = TypeVar("M")
SPEC = RunnerSpec(
    runner=RunnerId("", ""),
    address="127.0.0.1:1",
    pool=POOL,
    page_tokens=16,
    total_pages=100,
    max_sequences=4,
    max_adapters=2,
    max_rank=64,
    max_context_tokens=1600,
)


def of(effects: Sequence[Effect], kind: type[M]) -> list[M]:
    """Return the effects of one kind, and the messages of one kind that are sent."""
    everything = [effect.message if isinstance(effect, Send) else effect for effect in effects]
    return [one for one in everything if isinstance(one, kind)]


def peers(effects: Sequence[Effect], kind: type) -> list[str]:
    """Return the names of the peers that messages of one kind are sent to."""
    return [effect.peer.name for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def adapter(digest: str, pool: str = POOL, rank: int = 8, **fields: Any) -> AdapterSpec:
    values: dict[str, Any] = {"uid": f"uid-{digest}", "model_name": f"acme/{digest}"} | fields
    return AdapterSpec(namespace="acme", pool=pool, digest=digest, rank=rank, **values)


def sequence(
    request_id: str, epoch: Epoch, digest: str = "", reservation: int = 16, pages: int = 1
) -> SequenceState:  # fmt: skip
    """Make a sequence as a runner reports it."""
    return SequenceState(request_id, epoch, "g", digest, pages, reservation, 0)


class ReportedState:
    """What a runner has reported so far: its next report carries what changed."""

    def __init__(self, runner: RunnerId, supervisor: str) -> None:
        self.runner, self.supervisor, self.version = runner, supervisor, 0
        self.sequences: dict[str, SequenceState] = {}
        self.adapters: dict[str, AdapterState] = {}

    def report(
        self, figures: RunnerFigures, sequences: Sequence[SequenceState], adapters: Sequence[AdapterState], owed: int
    ) -> RunnerReport:
        full, self.version = not self.version, self.version + 1
        report = RunnerReport(
            version=self.version,
            full=full,
            figures=figures,
            sequences=[s for s in sequences if self.sequences.get(s.request_id) != s],
            ended=sorted(self.sequences.keys() - {s.request_id for s in sequences}),
            adapters=[a for a in adapters if self.adapters.get(a.digest) != a],
            removed_adapters=sorted(self.adapters.keys() - {a.digest for a in adapters}),
            overruns=[Overrun("paused", NEVER, owed, 0)] if owed else (),
        )
        self.sequences = {s.request_id: s for s in sequences}
        self.adapters = {a.digest: a for a in adapters}
        return report


class Driver:
    """One pool, one gateway, one supervisor, one registry, as many runners as are reported."""

    def __init__(self, term: int = 1, **config: Any) -> None:
        self.core = Scheduler(SchedulerConfig(**config), term)
        self.now = 100.0
        self.reported: dict[str, ReportedState] = {}
        self.specs: dict[str, RunnerSpec] = {}
        self.connect_registry()

    @property
    def state(self) -> State:
        return self.core.state

    def pool(self, name: str = POOL) -> Pool:
        return self.core.state.pools[name]

    def demanded(self, name: str = POOL) -> PhaseCounts:
        """Return the runners that the requests of a pool would fill."""
        return demand(self.core.state, self.pool(name))

    def load(self) -> PoolLoad:
        """Return the pool as its autoscaler sees it."""
        return load_of(self.pool(), self.now)

    def retry_ms(self, request_id: str) -> int:
        """Return when a client would be told to come again in place of that request, in milliseconds."""
        return estimate_retry_ms(self.pool(), self.request(request_id), self.now)

    def handle(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        self.core.check()
        return effects

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, with a tick at every deadline on the way."""
        until, effects = self.now + seconds, list[Effect]()
        while (deadline := self.core.next_deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            effects += self.handle(TICK)
        self.now = until
        return effects

    # ------------------------------------------------------------ peers

    def connect_registry(self, name: str = REGISTRY.name, term: int = 0) -> list[Effect]:
        return self.handle(Connected(Peer(Kind.REGISTRY, name), RegistryHello(term)))

    def change(self, change: RegistryChange) -> list[Effect]:
        """Send a change of the registry."""
        return self.handle(Received(REGISTRY, change))

    def registry(self, *digests: str, pool: str = POOL, rank: int = 8, **spec: Any) -> list[Effect]:
        """Send a snapshot of one pool and its adapters."""
        adapters = tuple(adapter(d, pool=pool, rank=rank) for d in digests)
        pools = (PoolSpec(pool, "sha256:base", "base", **spec),)
        return self.change(RegistryChange(True, pools, adapters))

    def gateway(self, name: str = "g", complete: bool = True, *, applies_routes: bool = False) -> list[Effect]:
        effects = self.handle(Connected(Peer(Kind.GATEWAY, name), GatewayHello(name, applies_routes)))
        return effects + self.gateway_sends(ResubmitComplete(), name) if complete else effects

    def close_gateway(self, name: str = "g") -> list[Effect]:
        return self.handle(Closed(Peer(Kind.GATEWAY, name)))

    def gateway_sends(self, message: object, name: str = "g") -> list[Effect]:
        return self.handle(Received(Peer(Kind.GATEWAY, name), message))

    def supervisor(self, highest_term: int = 0, name: str = "s") -> list[Effect]:
        self.reported = {uuid: r for uuid, r in self.reported.items() if r.supervisor != name}
        return self.handle(Connected(Peer(Kind.SUPERVISOR, name), SupervisorHello(name, highest_term)))

    def close_supervisor(self, name: str = "s") -> list[Effect]:
        return self.handle(Closed(Peer(Kind.SUPERVISOR, name)))

    def supervisor_sends(self, message: object, name: str = "s") -> list[Effect]:
        return self.handle(Received(Peer(Kind.SUPERVISOR, name), message))

    def start(self, *digests: str, settle: bool = True, **spec: Any) -> "Driver":
        """Start everything but runners."""
        self.registry(*digests, **spec)
        self.gateway()
        self.supervisor()
        if settle:
            self.wait(self.core.config.absent_s + 1)
        return self

    # ------------------------------------------------------------ runners

    def report_of(
        self, uuid: str, *running: SequenceState, free: int | None = None, supervisor: str = "s", **state: Any
    ) -> ReportedRunner:
        """Make the next report of a runner; its spec is remembered. `version`: a full report of that version.

        `role`: the one that it is in; `made_for`: that of its group.
        """
        runner_id = RunnerId(uuid, state.pop("incarnation", "i1"))
        fields = {k: state.pop(k) for k in list(state) if k in RunnerSpec.__dataclass_fields__ and k != "role"}
        fields["role"] = state.pop("made_for", None)
        spec = self.specs[uuid] = replace(self.specs.get(uuid) or replace(SPEC, **fields), runner=runner_id)
        reported = self.reported.get(uuid)
        version, adapters, owed = state.pop("version", None), state.pop("adapters", ()), state.pop("owed_pages", 0)
        if reported is None or (reported.runner, reported.supervisor) != (runner_id, supervisor) or version is not None:
            before = reported.version if reported is not None and reported.runner == runner_id else 0
            reported = self.reported[uuid] = ReportedState(runner_id, supervisor)
            figures = RunnerFigures(spec.total_pages if free is None else free, **state)
            report = reported.report(figures, running, adapters, owed)
            reported.version = before + 1 if version is None else version
            return ReportedRunner(runner_id, report._replace(version=reported.version), spec)
        figures = RunnerFigures(spec.total_pages if free is None else free, **state)
        return ReportedRunner(runner_id, reported.report(figures, running, adapters, owed))

    def reports(self, *reports: ReportedRunner, supervisor: str = "s") -> list[Effect]:
        return self.supervisor_sends(ClusterReport(reports), supervisor)

    def runner(self, uuid: str, *running: SequenceState, **state: Any) -> list[Effect]:
        supervisor = state.get("supervisor", "s")
        return self.reports(self.report_of(uuid, *running, **state), supervisor=supervisor)

    def lease_ends(self, uuid: str, incarnation: str = "i1", supervisor: str = "s") -> list[Effect]:
        return self.supervisor_sends(ClusterReport((), (RunnerId(uuid, incarnation),)), supervisor)

    def lost(self, uuid: str, incarnation: str = "i1", supervisor: str = "s") -> list[Effect]:
        """Let a lease end of a runner that no gateway finds alive."""
        effects = self.lease_ends(uuid, incarnation, supervisor)
        for gateway in peers(effects, RunnerGone):
            effects += self.checks(uuid, gateway, incarnation, alive=False)
        return effects

    def checks(self, uuid: str, gateway: str = "g", incarnation: str = "i1", *, alive: bool) -> list[Effect]:
        """Let a gateway say whether a runner is alive."""
        return self.gateway_sends(RunnerChecked(RunnerId(uuid, incarnation), alive), gateway)

    def preempt(self, uuid: str, request_id: str, reservation_tokens: int, for_: str = "") -> list[Effect]:
        decision = PreemptDecision(
            RunnerId(uuid, "i1"), request_id, self.request(request_id).epoch, for_ or request_id, reservation_tokens
        )
        return self.supervisor_sends(ClusterReport((), (), (decision,)))

    # ------------------------------------------------------------ requests

    def submit(self, request_id: str, digest: str = "", **fields: Any) -> list[Effect]:
        gateway = fields.pop("gateway", "g")
        values: dict[str, Any] = {"prompt_tokens": 16, "max_tokens": 100, "p90_tokens": 16}
        values |= {"pool": POOL, "namespace": "acme", "model_name": "m"} | fields
        return self.gateway_sends(Submit(request_id=request_id, adapter=digest, **values), gateway)

    def place(self, request_id: str, digest: str = "", **fields: Any) -> Assign:
        """Submit what is placed at once. Returns its Assign."""
        (assign,) = of(self.submit(request_id, digest, **fields), Assign)
        assert assign.request_id == request_id
        return assign

    def failed(self, request_id: str, reason: FailReason, emitted: int = 0, **fields: Any) -> list[Effect]:
        epoch = fields.pop("epoch", self.request(request_id).epoch)
        message = Failed(request_id, epoch, reason, emitted, detail=fields.pop("detail", ""), **fields)
        return self.gateway_sends(message, self.request(request_id).gateway)

    def outcome(self, request_id: str, tokens: int = 10, digest: str = "", censored: bool = False) -> list[Effect]:
        return self.gateway_sends(OutcomeReport(request_id, POOL, digest, tokens, censored, request_id.encode()))

    def request(self, request_id: str) -> Request:
        return self.core.state.requests[request_id]

    def knows(self, request_id: str) -> bool:
        return request_id in self.core.state.requests

    def record(self, uuid: str) -> RunnerAccount:
        return self.core.state.runners[uuid]

    def view(self, request_id: str, reservation_tokens: int = 16) -> SequenceState:
        """Return that request as its runner reports it."""
        request = self.request(request_id)
        seen = sequence(request_id, request.epoch, request.adapter, reservation_tokens)
        return seen._replace(priority=Priority.BATCH if request.batch else Priority.INTERACTIVE)

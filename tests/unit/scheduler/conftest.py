"""A desk: the real core with short words for its events, and every law checked after each of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from weft_scheduler.core import events as ev
from weft_scheduler.core.effects import Assign, Effect
from weft_scheduler.core.invariants import check_all
from weft_scheduler.core.scheduler import Scheduler
from weft_scheduler.core.state import Request, Runner
from weft_scheduler.core.values import (
    AdapterSpec,
    Config,
    Epoch,
    PoolSpec,
    PreemptDecision,
    RunnerId,
    RunnerReport,
    RunnerSpec,
    SequenceView,
)

POOL = "acme/p"
E_ = TypeVar("E_", bound=Effect)


def of(effects: list[Effect], kind: type[E_]) -> list[E_]:
    return [e for e in effects if isinstance(e, kind)]


class Desk:
    """One pool, one gateway, one supervisor, as many runners as are reported."""

    def __init__(self, term: int = 1, **config: Any) -> None:
        self.core = Scheduler(Config(**config), term)
        self.now = 100.0
        self.sequences: dict[str, int] = {}
        self.specs: dict[str, RunnerSpec] = {}

    def handle(self, event: ev.Event) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        check_all(self.core.context)
        return effects

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, ticking at every deadline on the way."""
        until, effects = self.now + seconds, list[Effect]()
        while (deadline := self.core.next_deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            effects += self.core.tick(self.now)
            check_all(self.core.context)
        self.now = until
        return effects

    # ------------------------------------------------------------ peers

    def registry(self, *digests: str, pool: str = POOL, rank: int = 8, **spec: Any) -> list[Effect]:
        adapters = tuple(adapter(d, pool=pool, rank=rank) for d in digests)
        pools = (PoolSpec(pool, "sha256:base", "base", **spec),)
        return self.handle(ev.RegistryChange(True, pools, adapters))

    def gateway(self, name: str = "g", complete: bool = True) -> list[Effect]:
        effects = self.handle(ev.GatewayUp(name))
        return effects + self.handle(ev.ResubmitComplete(name)) if complete else effects

    def supervisor(self, highest_term: int = 0) -> list[Effect]:
        return self.handle(ev.SupervisorUp("s", highest_term))

    def start(self, *digests: str, settle: bool = True, **spec: Any) -> "Desk":
        """Everything but runners."""
        self.registry(*digests, **spec)
        self.gateway()
        self.supervisor()
        if settle:
            self.wait(self.core.config.absent_s + 1)
        return self

    # ------------------------------------------------------------ runners

    def report_of(self, uuid: str, *running: SequenceView, free: int | None = None, **state: Any) -> RunnerReport:
        """The next whole state of a runner; its spec is remembered."""
        spec = replace(SPEC, **{k: state.pop(k) for k in list(state) if k in RunnerSpec.__dataclass_fields__})
        spec = self.specs.setdefault(uuid, spec)
        incarnation = state.pop("incarnation", "i1")
        self.sequences[uuid] = self.sequences.get(uuid, 0) + 1
        pages = spec.total_pages if free is None else free
        number = state.pop("sequence", self.sequences[uuid])
        return RunnerReport(RunnerId(uuid, incarnation), spec, number, pages, tuple(running), **state)

    def runner(self, uuid: str, *running: SequenceView, **state: Any) -> list[Effect]:
        return self.handle(ev.ClusterReport("s", (self.report_of(uuid, *running, **state),)))

    def lost(self, uuid: str, incarnation: str = "i1") -> list[Effect]:
        return self.handle(ev.ClusterReport("s", (), (RunnerId(uuid, incarnation),)))

    def preempt(self, uuid: str, request_id: str, reservation_tokens: int, for_: str = "") -> list[Effect]:
        decision = PreemptDecision(
            RunnerId(uuid, "i1"), request_id, self.request(request_id).epoch, for_ or request_id, reservation_tokens
        )
        return self.handle(ev.ClusterReport("s", (), (), (decision,)))

    # ------------------------------------------------------------ requests

    def submit(self, request_id: str, digest: str = "", **fields: Any) -> list[Effect]:
        values: dict[str, Any] = {"prompt_tokens": 16, "max_tokens": 100, "p90_tokens": 16, "gateway": "g"}
        values |= {"pool": POOL, "namespace": "acme", "model_name": "m"} | fields
        return self.handle(ev.Submit(request_id=request_id, digest=digest, **values))

    def place(self, request_id: str, digest: str = "", **fields: Any) -> Assign:
        """Submit what is placed at once."""
        (assign,) = of(self.submit(request_id, digest, **fields), Assign)
        assert assign.request_id == request_id
        return assign

    def failed(self, request_id: str, reason: ev.FailReason, emitted: int = 0, **fields: Any) -> list[Effect]:
        epoch = fields.pop("epoch", self.request(request_id).epoch)
        gateway = self.request(request_id).gateway
        return self.handle(ev.Failed(gateway, request_id, epoch, reason, emitted, fields.pop("detail", "")))

    def outcome(self, request_id: str, tokens: int = 10, digest: str = "", censored: bool = False) -> list[Effect]:
        return self.handle(ev.OutcomeReported("g", request_id, POOL, digest, tokens, censored, request_id.encode()))

    def request(self, request_id: str) -> Request:
        return self.core.state.requests[request_id]

    def knows(self, request_id: str) -> bool:
        return request_id in self.core.state.requests

    def record(self, uuid: str) -> Runner:
        return self.core.state.runners[uuid]

    def view(self, request_id: str, reservation_tokens: int = 16) -> SequenceView:
        """That request as its runner reports it."""
        request = self.request(request_id)
        return SequenceView(request_id, request.epoch, request.digest, reservation_tokens)


SPEC = RunnerSpec(
    address="127.0.0.1:1",
    pool=POOL,
    page_tokens=16,
    total_pages=100,
    max_sequences=4,
    max_adapters=2,
    max_rank=64,
    max_context_tokens=1600,
)


def adapter(digest: str, pool: str = POOL, rank: int = 8, **fields: Any) -> AdapterSpec:
    values: dict[str, Any] = {"uid": f"uid-{digest}", "model_name": f"acme/{digest}"} | fields
    return AdapterSpec(namespace="acme", name=digest, pool=pool, digest=digest, rank=rank, **values)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def new_desk() -> Callable[..., Desk]:
    return Desk


@pytest.fixture
def adapter_of() -> Callable[..., AdapterSpec]:
    return adapter


@pytest.fixture
def picked() -> Callable[..., Any]:
    """The effects of one kind."""
    return of


@pytest.fixture
def epoch_of() -> type[Epoch]:
    return Epoch

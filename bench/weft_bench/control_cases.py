"""The cases of `weft bench control`: shipped cores and codecs, fed with what their peers would send."""

import gc
import random
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import median, quantiles
from typing import Any

import orjson

from weft.domain import request, runner
from weft.domain.adapter import AdapterState, DesiredAdapter, DesiredChange, Tier
from weft.domain.ids import Epoch, RunnerId
from weft.domain.machine import TICK, Connected, Kind, Peer, Received, Send
from weft.domain.routes import AdapterSpec, PoolRoute, PoolSpec, RegistryChange, Routes
from weft.wire.codec.cluster import RUNNER_TO_SUPERVISOR, SCHEDULER_TO_SUPERVISOR, SUPERVISOR_TO_SCHEDULER
from weft.wire.codec.scheduling import SCHEDULER_TO_GATEWAY, outcome_bytes
from weft.wire.v1 import scheduler_pb2, supervisor_pb2
from weft_bench.peers.turns_worker import GATEWAY, REGISTRY, SUPERVISOR, Clock, connect
from weft_gateway.core import Gateway, GatewayConfig, Principal, RouteIndex
from weft_gateway.openai.models import _model  # pyright: ignore[reportPrivateUsage]
from weft_runner.core import Fetch, Fetched, PoolLimits, Runner
from weft_scheduler.core import Scheduler, SchedulerConfig
from weft_stage.lines import Line, Origin
from weft_supervisor.core import Supervisor, SupervisorConfig, runner_peer

REPORTS_A_SECOND = 20
BUSY = 64  # sequences of a busy runner
SLOTS = 16  # adapters on its device
PAGES = 1_000
SEQUENCE_PAGES = 8
POOL = "acme/p"
TENANTS = 100
TABLES = 3  # full route tables, one after the other
BASE_POOL = PoolSpec(POOL, "sha256:base", "base", max_queue=10**9)
POOL_ROUTE = PoolRoute(POOL, "sha256:base", "base")
DECIDED = {  # what the case names: the pool, its tenants
    "": (BASE_POOL, TENANTS),
    ", 10,000 tenants": (BASE_POOL, 10_000),
    ", shortest, pooled, 10,000 tenants": (replace(BASE_POOL, queue="shortest", reservation="pooled"), 10_000),
}
SCHEDULER = Peer(Kind.SCHEDULER, "s")
FIGURES = runner.RunnerFigures((64 - 32) * BUSY, desired_version=1)  # of a runner of the fleet
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much exists and how often it is measured. `QUICK` shows that everything works."""

    runners: int = 100  # whose reports alternate
    rounds: int = 40
    host_copies: int = 2_000
    adapters: int = 100_000
    fleet: int = 10_000
    decisions: int = 20_000

    @property
    def requests(self) -> int:
        """Return the requests of the fleet: more than run."""
        return 100 * self.fleet


QUICK = Amounts(4, 3, 50, 1_000, 40, 400)


def cpu_clock() -> Clock:
    return Clock(time.thread_time)


def median_ms(clock: Clock) -> float:
    return 1e3 * median(clock.seconds)


def digest(number: int) -> str:
    """Return a digest that nothing has."""
    return f"sha256:{number:064x}"


def adapter_of(number: int, tenants: int = TENANTS) -> AdapterSpec:
    """Return an adapter on demand."""
    tenant = f"ns{number % tenants}"
    return AdapterSpec(f"{tenant}/a{number}", tenant, POOL, digest(number), 16, f"uid-{number}")


def spec_of(number: int, total_pages: int = PAGES) -> runner.RunnerSpec:
    return runner.RunnerSpec(RunnerId(f"acme.{number:032x}", "i"), "a:1", POOL, 16, total_pages, BUSY, BUSY, 64, 4096)


def cluster_report(name: RunnerId, report: runner.RunnerReport, spec: Any = None) -> runner.ClusterReport:
    return runner.ClusterReport((runner.ReportedRunner(name, report, spec),))


def scheduler_of(adapters: Iterable[AdapterSpec], pool: PoolSpec = BASE_POOL) -> Scheduler:
    """Return a scheduler with connected peers. Its registry has one pool with these adapters."""
    core = Scheduler(SchedulerConfig(), 1)
    connect(core, RegistryChange(True, (pool,), tuple(adapters)))
    return core


def encoded(effects: Sequence[Any], peer: Kind) -> list[bytes]:
    """Return the messages to peers of that kind, as they travel."""
    direction: Any = SCHEDULER_TO_GATEWAY if peer is Kind.GATEWAY else SCHEDULER_TO_SUPERVISOR
    return [
        direction.encode(effect.message).SerializeToString()
        for effect in effects
        if isinstance(effect, Send) and effect.peer.kind is peer
    ]


def to_gateway(raw: bytes) -> Any:
    return SCHEDULER_TO_GATEWAY.decode(scheduler_pb2.SchedulerToGateway.FromString(raw))


class PlayedRunner:
    """A busy runner: with each report its oldest sequence has ended and another one has begun.

    Tokens in KV are reported once a second, as runners do.
    """

    def __init__(self, number: int, host_copies: int) -> None:
        self.spec = spec_of(number)
        self.peer = runner_peer(self.spec.runner)
        self._version = self._admitted = 0
        self._sequences = [self._begin() for _ in range(BUSY)]
        self._progress = [60 + i for i in range(BUSY)]
        self._adapters = [
            AdapterState(digest(i), Tier.DEVICE if i < SLOTS else Tier.HOST, 4 if i < SLOTS else 0, 10**7, 16)
            for i in range(host_copies)
        ]

    def _begin(self) -> runner.SequenceState:
        self._admitted += 1
        return runner.SequenceState(
            f"{self.spec.runner.uuid}-{self._admitted:016x}", Epoch(1, self._admitted), "gateway-0123456789abcdef",
            digest(self._admitted % SLOTS), SEQUENCE_PAGES, 64, self._admitted,
        )  # fmt: skip

    def report(self) -> bytes:
        """Return the next report as it travels; the first one is full."""
        self._version += 1
        full = self._version == 1
        changed, ended, adapters = self._sequences, (), self._adapters
        if not full:
            ended, changed = (self._sequences.pop(0).request_id,), [self._begin()]
            self._sequences += changed
            self._progress = [tokens + 1 for tokens in self._progress[1:]] + [60]
            uses = {self._admitted % SLOTS, (self._admitted - BUSY) % SLOTS}
            adapters = [self._adapters[i] for i in uses if i < len(self._adapters)]
        figures = runner.RunnerFigures(
            PAGES - BUSY * SEQUENCE_PAGES, BUSY * 4, desired_version=1, iterations=self._version,
            tokens=self._version * BUSY,
        )  # fmt: skip
        progress = self._progress if self._version % REPORTS_A_SECOND == 1 else ()
        report = runner.RunnerReport(self._version, full, figures, changed, ended, adapters=adapters, progress=progress)
        return RUNNER_TO_SUPERVISOR.encode(report).SerializeToString()


def reports(origin: Origin, amounts: Amounts, advance: Advance) -> Iterator[Line]:
    """Measure what a report costs supervisor (which merges what comes within its `merge_s`) and scheduler."""
    played = [PlayedRunner(i, amounts.host_copies) for i in range(amounts.runners)]
    supervisor, scheduler = Supervisor(SupervisorConfig()), scheduler_of(map(adapter_of, range(amounts.host_copies)))
    supervisor.handle(Connected(SCHEDULER), 0.0)
    for each in played:
        supervisor.handle(Connected(each.peer, each.spec), 0.0)
    clocks, received = (cpu_clock(), cpu_clock()), [0, 0]
    for turn in range(amounts.rounds + 1):
        sent = [(0.05 * (turn + i / amounts.runners), each.peer, each.report()) for i, each in enumerate(played)]
        merged: list[tuple[float, bytes]] = []
        with clocks[0]:  # each process does nothing else: a round of reports goes through one, then through the other
            for now, peer, raw in sent:
                message = RUNNER_TO_SUPERVISOR.decode(supervisor_pb2.RunnerToSupervisor.FromString(raw))
                merged.extend(
                    (now, SUPERVISOR_TO_SCHEDULER.encode(effect.message).SerializeToString())
                    for effect in supervisor.handle(Received(peer, message), now)
                    if isinstance(effect, Send) and isinstance(effect.message, runner.ClusterReport)
                )
        with clocks[1]:
            for now, raw in merged:
                report = SUPERVISOR_TO_SCHEDULER.decode(scheduler_pb2.SupervisorToScheduler.FromString(raw))
                encoded(scheduler.handle(Received(SUPERVISOR, report), now), Kind.SUPERVISOR)
        if turn:  # the first reports are full
            received[0] += sum(len(raw) for _, _, raw in sent)
            received[1] += sum(len(raw) for _, raw in merged)
        advance(1)
    case, rate = f"busy runners, {amounts.host_copies:,} adapters in host memory", 1e6 / REPORTS_A_SECOND
    for name, clock, n_bytes, target in zip(("supervisor", "scheduler"), clocks, received, (1500, 2000), strict=True):
        report_us = 1e6 * min(clock.seconds[1:]) / amounts.runners
        report_bytes = n_bytes / amounts.runners / amounts.rounds
        yield origin.line(case, f"{name}: CPU of a report, codec and handler", report_us, "us")
        yield origin.line(case, f"{name}: runners a core", rate / report_us, "", target=f">= {target}")
        yield origin.line(case, f"{name}: bytes received of a report", report_bytes, "B")


def engine(origin: Origin, amounts: Amounts, advance: Advance) -> Iterator[Line]:
    """Measure an end, a start and the reports of both, in a runner with 64 sequences and many host copies."""
    limits = PoolLimits(
        total_pages=20_000, page_tokens=16, max_sequences=BUSY, max_adapters=BUSY, max_context_tokens=4096,
        vocab_size=32_000, host_bytes=1 << 40,
    )  # fmt: skip
    core, now, fetched, clock = Runner(limits), 0.0, 0, cpu_clock()
    copies = range(amounts.host_copies)
    desired = tuple(DesiredAdapter(digest(i), 16, 10**7, pinned=False, tier=Tier.HOST) for i in copies)
    core.handle(Connected(GATEWAY, request.SessionHello("g", "i")), now)
    core.handle(Connected(SUPERVISOR), now)
    effects = core.handle(Received(SUPERVISOR, runner.RunnerOrder(DesiredChange(1, True, desired))), now)
    while fetches := [effect for effect in effects if isinstance(effect, Fetch)]:
        fetched += len(fetches)
        effects = [more for fetch in fetches for more in core.handle(Fetched(fetch.digest, None, 10**7), now)]
    assert fetched == len(copies), f"{fetched} adapters were fetched"
    for i in range(BUSY + 10 * amounts.rounds):
        now += 0.05
        start = request.Start(f"r{i}", Epoch(1, i + 1), tuple(range(1, 60)), (), 128, 64)
        if i < BUSY:
            core.handle(Received(GATEWAY, start), now)
            continue
        stop = request.Stop(f"r{i - BUSY}", Epoch(1, i - BUSY + 1))
        with clock:
            effects = [
                *core.handle(Received(GATEWAY, stop), now), *core.handle(Received(GATEWAY, start), now),
                *core.handle(TICK, now + 0.049),
            ]  # fmt: skip
        reported = (isinstance(each, Send) and isinstance(each.message, runner.RunnerReport) for each in effects)
        assert any(reported), "nothing was reported"
    advance(1)
    case = f"engine thread, {amounts.host_copies:,} host copies"
    yield origin.line(case, "a report", median_ms(clock), "ms", target="<= 0.2")


def adapter(origin: Origin, amounts: Amounts, advance: Advance) -> Iterator[Line]:
    """Measure one adapter more: the scheduler's and the gateway's part, medians; bytes of the messages, means."""
    scheduler, index, now = scheduler_of(map(adapter_of, range(amounts.adapters))), RouteIndex(), 1.0
    index.take(Routes(0, True))
    spec, report = spec_of(0), runner.RunnerReport(1, True, runner.RunnerFigures(PAGES))
    scheduler.handle(Received(SUPERVISOR, cluster_report(spec.runner, report, spec)), 0.1)
    for _ in range(amounts.adapters // 1_000 + 4):  # every status and route is published, some at a time
        scheduler.handle(TICK, now)
        now += 1.0
    index.take(scheduler.state.routes.full())
    clocks, sizes = (cpu_clock(), cpu_clock()), [0, 0]
    for i in range(amounts.adapters, amounts.adapters + amounts.rounds):
        with clocks[0]:
            effects = scheduler.handle(Received(REGISTRY, RegistryChange(False, (), (adapter_of(i),))), now)
            effects += scheduler.handle(TICK, now + 0.5)  # statuses are gathered for a while
            routes, orders = encoded(effects, Kind.GATEWAY), encoded(effects, Kind.SUPERVISOR)
        with clocks[1]:
            for raw in routes:
                if isinstance(change := to_gateway(raw), Routes):
                    index.take(change)
        assert len(index.routes) == i + 2, "every adapter and the base are routed"
        sizes[0] += sum(map(len, routes))
        sizes[1] += sum(map(len, orders))
        now += 1.0
        advance(1)
    case, (gateway_bytes, runner_bytes) = (
        f"one adapter more at {amounts.adapters:,}",
        (n / amounts.rounds for n in sizes),
    )
    yield origin.line(case, "scheduler, codec and handler", median_ms(clocks[0]), "ms", target="<= 5")
    yield origin.line(case, "stall of a gateway's loop", median_ms(clocks[1]), "ms", target="<= 2")
    yield origin.line(case, "bytes to a gateway", gateway_bytes, "B")
    yield origin.line(case, "bytes to a runner that does not use it", runner_bytes, "B", target="<= 0")


def full_table(adapters: int, version: int = 1) -> Routes:
    """Return the routes of adapters, a thousand of each tenant."""
    routes = tuple(adapter_of(i, max(adapters // 1_000, 1)).route for i in range(adapters))
    return Routes(version, True, routes=routes, pools=(POOL_ROUTE,))


def table(origin: Origin, amounts: Amounts, advance: Advance) -> Iterator[Line]:
    """Measure a full route table, as a new stream brings it, and tables that replace it: the slowest of them.

    In all, and for the message that keeps a gateway's loop longest, with the collector of garbage at work.
    """
    gateway, clock = Gateway(GatewayConfig(), "g", outcome_bytes), cpu_clock()
    gateway.handle(Connected(SCHEDULER), 0.0)
    gc.freeze()
    costs: list[tuple[float, float]] = []
    for version in range(1, TABLES + 1):
        parts = full_table(amounts.adapters, version).parts()
        sent = [SCHEDULER_TO_GATEWAY.encode(part).SerializeToString() for part in parts]
        clock.seconds.clear()
        for raw in sent:
            with clock:
                gateway.handle(Received(SCHEDULER, to_gateway(raw)), 0.0)
                gc.freeze()  # as the shell does
        gc.unfreeze()
        assert len(gateway.routes.routes) == amounts.adapters
        costs.append((1e3 * max(clock.seconds), 1e3 * sum(clock.seconds)))
        advance(1)
    case, (longest_ms, all_ms) = f"full table of {amounts.adapters:,} routes", max(costs)
    yield origin.line(case, "a gateway's loop, in all", all_ms, "ms")
    yield origin.line(case, "longest stall of a gateway's loop", longest_ms, "ms", target="<= 10")


def models(origin: Origin, amounts: Amounts, advance: Advance) -> Iterator[Line]:
    """Measure what a gateway's loop does for `GET /v1/models` of one tenant among many."""
    index, clock, tenants = RouteIndex(), cpu_clock(), max(amounts.adapters // 1_000, 1)
    index.take(full_table(amounts.adapters))
    for _ in range(amounts.rounds):
        with clock:
            listed = [_model({}, *route) for route in index.visible(Principal("ns0"))]
            orjson.dumps({"object": "list", "data": listed})
        assert len(listed) >= amounts.adapters // tenants
    advance(1)
    case = f"GET /v1/models, {amounts.adapters // tenants:,} of {amounts.adapters:,} adapters"
    yield origin.line(case, "CPU", median_ms(clock), "ms", target="<= 10")


def decisions(origin: Origin, amounts: Amounts, advance: Advance) -> Iterator[Line]:
    """Measure the scheduler's handler in full fleets: submissions, outcomes, reports of ends."""
    for name, (pool, tenants) in DECIDED.items():
        seconds = _decision_s(amounts, pool, tenants, advance)
        case = f"{amounts.fleet:,} runners, {amounts.adapters:,} adapters, {amounts.requests:,} requests{name}"
        yield origin.line(case, "decision, p50", 1e6 * median(seconds[""]), "us")
        for kind, values in seconds.items():
            p99_us = 1e6 * quantiles(values, n=100)[-1]
            yield origin.line(case, f"decision, p99{kind}", p99_us, "us", target=None if kind else "<= 300")
        if not name:  # the process's most: of the first
            memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            yield origin.line(case, "memory", memory_mib, "MiB")


def _decision_s(amounts: Amounts, pool: PoolSpec, tenants: int, advance: Advance) -> dict[str, list[float]]:
    """Return the CPU seconds of each event, of all kinds under "", and of each kind."""
    fleet, clocks = Fleet(amounts, pool, tenants), defaultdict[str, Clock](cpu_clock)
    for _ in range(amounts.requests):
        fleet.follow(fleet.handle(GATEWAY, fleet.submission()))
        advance(1)
    fleet.report_all()
    assert len(fleet.running) == amounts.fleet * BUSY, f"{len(fleet.running)} requests run"
    for _ in range(amounts.decisions):
        for kind, peer, message in fleet.next_messages():
            with clocks[kind]:
                effects = fleet.handle(peer, message)
            fleet.follow(effects)
        advance(1)
    seconds = {f": {kind}": clock.seconds for kind, clock in clocks.items()}
    return {"": [each for values in seconds.values() for each in values], **seconds}


class Fleet:
    """One pool of busy runners, as its scheduler hears of it. Adapters are Zipf-like."""

    def __init__(self, amounts: Amounts, pool: PoolSpec, tenants: int) -> None:
        self._chance, self._adapters, self._tenants = random.Random(0), amounts.adapters, tenants
        self._now, self._submitted = 0.0, 0
        self.running: dict[str, tuple[RunnerId, str]] = {}
        self._specs = {(spec := spec_of(i, total_pages=64 * BUSY)).runner: spec for i in range(amounts.fleet)}
        self._on: dict[RunnerId, dict[str, runner.SequenceState]] = {name: {} for name in self._specs}
        self._fresh: dict[RunnerId, list[runner.SequenceState]] = {name: [] for name in self._specs}  # not reported yet
        self._versions = {name: count(1) for name in self._specs}
        self._core = scheduler_of((adapter_of(i, tenants) for i in range(amounts.adapters)), pool)
        self.report_all()

    def handle(self, peer: Peer, message: object) -> Sequence[Any]:
        return self._core.handle(Received(peer, message), self._now)

    def next_messages(self) -> Iterator[tuple[str, Peer, object]]:
        """Let a request come, and another one end, as its gateway says and as its runner's next report does."""
        self._now += 1e-4
        request_id = next(iter(self.running))
        name, adapter = self.running.pop(request_id)
        del self._on[name][request_id]
        eos = request.FinishReason.EOS
        record = outcome_bytes(request.Outcome(request_id, POOL, "ns0", "m", adapter, 16, 64, eos, finished_unix_ms=1))
        yield "submission", GATEWAY, self.submission()
        yield "outcome", GATEWAY, request.OutcomeReport(request_id, POOL, adapter, 64, censored=False, record=record)
        fresh, self._fresh[name] = [each for each in self._fresh[name] if each.request_id in self._on[name]], []
        report = runner.RunnerReport(next(self._versions[name]), False, FIGURES, fresh, (request_id,))
        yield "report", SUPERVISOR, cluster_report(name, report)

    def follow(self, effects: Sequence[Any]) -> None:
        """Let what was assigned run from now on."""
        for effect in effects:
            if isinstance(effect, Send) and isinstance(assigned := effect.message, request.Assign):
                request_id, epoch, name = assigned.request_id, assigned.epoch, assigned.runner
                adapter = self._core.state.requests[request_id].adapter
                self.running[request_id] = (name, adapter)
                sequence = runner.SequenceState(request_id, epoch, "g", adapter, 1, assigned.reservation_tokens, 1)
                self._on[name][request_id] = sequence
                self._fresh[name].append(sequence)
                self.handle(GATEWAY, request.Started(request_id, epoch))

    def report_all(self) -> None:
        for name, running in self._on.items():
            sequences = list(running.values())
            used = sorted({sequence.adapter for sequence in sequences if sequence.adapter})
            resident = [AdapterState(each, Tier.DEVICE) for each in used]
            report = runner.RunnerReport(next(self._versions[name]), True, FIGURES, sequences, adapters=resident)
            self._fresh[name] = []
            self.handle(SUPERVISOR, cluster_report(name, report, self._specs[name]))

    def submission(self) -> request.Submit:
        self._submitted += 1
        number = min(self._adapters - 1, int(self._chance.paretovariate(0.5)) - 1)
        prompt, p90 = self._chance.randint(16, 256), self._chance.randint(16, 128)
        tenant = f"ns{number % self._tenants}"
        return request.Submit(f"r{self._submitted}", POOL, tenant, "m", digest(number), prompt, 512, p90_tokens=p90)

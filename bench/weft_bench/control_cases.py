"""What `weft bench control` measures: shipped cores and codecs, fed with what their peers would send."""

import asyncio
import gc
import random
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
import orjson

from weft.domain.adapter import AdapterState, DesiredAdapter, DesiredChange, Tier
from weft.domain.ids import Epoch, RunnerId
from weft.domain.machine import TICK, Connected, Kind, Peer, Received, Send
from weft.domain.request import (
    Assign,
    FinishReason,
    Outcome,
    OutcomeReport,
    ResubmitComplete,
    SessionHello,
    Start,
    Started,
    Stop,
    Submit,
)
from weft.domain.routes import AdapterSpec, Keys, PoolRoute, PoolSpec, RegistryChange, Routes
from weft.domain.runner import (
    ClusterReport,
    ReportedRunner,
    RunnerFigures,
    RunnerOrder,
    RunnerReport,
    RunnerSpec,
    SequenceState,
)
from weft.wire.codec.cluster import RUNNER_TO_SUPERVISOR, SCHEDULER_TO_SUPERVISOR, SUPERVISOR_TO_SCHEDULER
from weft.wire.codec.scheduling import SCHEDULER_TO_GATEWAY, outcome_bytes
from weft.wire.serving import SERVER_OPTIONS
from weft.wire.streams import channel
from weft.wire.v1 import scheduler_pb2, supervisor_pb2
from weft_gateway.core import Gateway, GatewayConfig, Principal, RouteIndex
from weft_gateway.openai.models import _model  # pyright: ignore[reportPrivateUsage]
from weft_runner.core import Fetch, Fetched, PoolLimits, Runner
from weft_scheduler.core import Scheduler, SchedulerConfig
from weft_supervisor.core import Supervisor, SupervisorConfig, runner_peer

REPORTS_A_SECOND = 20
BUSY = 64  # sequences of a busy runner
SLOTS = 16  # adapters on its device
PAGES = 1_000
SEQUENCE_PAGES = 8
POOL = "acme/p"
TENANTS = 100
BASE_POOL = PoolSpec(POOL, "sha256:base", "base", max_queue=10**9)
GATEWAY, SUPERVISOR = Peer(Kind.GATEWAY, "g"), Peer(Kind.SUPERVISOR, "s")
REGISTRY, SCHEDULER = Peer(Kind.REGISTRY, "r"), Peer(Kind.SCHEDULER, "s")
Advance = Callable[[int], None]


def digest(number: int) -> str:
    """A digest that nothing has."""
    return f"sha256:{number:064x}"


class CpuClock:
    """CPU seconds of this thread inside each `with` block."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __enter__(self) -> None:
        self._since = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.seconds.append(time.thread_time() - self._since)


def scheduler_of(adapters: Iterable[AdapterSpec] = (), pool: PoolSpec = BASE_POOL) -> Scheduler:
    """A scheduler whose registry has one pool with these adapters, and whose peers are all connected."""
    core = Scheduler(SchedulerConfig(), 1)
    core.handle(Connected(REGISTRY), 0.0)
    core.handle(Received(REGISTRY, RegistryChange(True, (pool,), tuple(adapters))), 0.0)
    core.handle(Connected(GATEWAY), 0.0)
    core.handle(Received(GATEWAY, ResubmitComplete()), 0.0)
    core.handle(Connected(SUPERVISOR), 0.0)
    core.handle(Received(SUPERVISOR, Keys(())), 0.0)
    return core


def publish_all(core: Scheduler, adapters: int, now: float) -> float:
    """Let every status and route be published, some adapters at a time; the time afterwards."""
    for _ in range(adapters // 1_000 + 4):
        core.handle(TICK, now)
        now += 1.0
    return now


def spec_of(runner: RunnerId, total_pages: int = PAGES) -> RunnerSpec:
    return RunnerSpec(runner, "a:1", POOL, 16, total_pages, BUSY, BUSY, 64, 4096)


def adapter_of(number: int, tenants: int = TENANTS) -> AdapterSpec:
    """An adapter on demand."""
    tenant = f"ns{number % tenants}"
    return AdapterSpec(f"{tenant}/a{number}", tenant, POOL, digest(number), 16, f"uid-{number}")


def encoded(effects: Sequence[Any], peer: Kind) -> list[bytes]:
    """The messages to peers of that kind, as they travel."""
    direction: Any = SCHEDULER_TO_GATEWAY if peer is Kind.GATEWAY else SCHEDULER_TO_SUPERVISOR
    return [
        direction.encode(effect.message).SerializeToString()
        for effect in effects
        if isinstance(effect, Send) and effect.peer.kind is peer
    ]


# ------------------------------------------------------------------------------------------------ reports


@dataclass(frozen=True, slots=True)
class ReportCost:
    """What one report costs its receiver: in the fastest of the rounds in which every runner reports once."""

    cpu_us: float
    received_bytes: float


class PlayedRunner:
    """A busy runner: with each report its oldest sequence has ended and another one has begun.

    Tokens in KV are reported once a second, as runners do.
    """

    def __init__(self, number: int, host_copies: int) -> None:
        self.spec = spec_of(RunnerId(f"acme.{number:032x}", "i"))
        self._version = self._admitted = self._tokens = 0
        self._sequences = [self._begin() for _ in range(BUSY)]
        self._progress = [60 + i for i in range(BUSY)]
        self._adapters = [
            AdapterState(digest(i), Tier.DEVICE if i < SLOTS else Tier.HOST, 4 if i < SLOTS else 0, 10**7, 16)
            for i in range(host_copies)
        ]

    def _begin(self) -> SequenceState:
        self._admitted += 1
        return SequenceState(
            f"{self.spec.runner.uuid}-{self._admitted:016x}", Epoch(1, self._admitted), "gateway-0123456789abcdef",
            digest(self._admitted % SLOTS), SEQUENCE_PAGES, 64, self._admitted,
        )  # fmt: skip

    def report(self) -> bytes:
        """The next report as it travels; the first one is full."""
        self._version += 1
        self._tokens += BUSY
        full = self._version == 1
        changed, ended, adapters = self._sequences, (), self._adapters
        if not full:
            ended, changed = (self._sequences.pop(0).request_id,), [self._begin()]
            self._sequences += changed
            self._progress = [tokens + 1 for tokens in self._progress[1:]] + [60]
            uses = {self._admitted % SLOTS, (self._admitted - BUSY) % SLOTS}
            adapters = [self._adapters[i] for i in uses if i < len(self._adapters)]
        free = PAGES - BUSY * SEQUENCE_PAGES
        figures = RunnerFigures(free, BUSY * 4, desired_version=1, iterations=self._version, tokens=self._tokens)
        progress = self._progress if self._version % REPORTS_A_SECOND == 1 else ()
        report = RunnerReport(self._version, full, figures, changed, ended, adapters=adapters, progress=progress)
        return RUNNER_TO_SUPERVISOR.encode(report).SerializeToString()


def report_costs(runners: int, host_copies: int, rounds: int, advance: Advance) -> tuple[ReportCost, ReportCost]:
    """Measure what a report costs supervisor (which merges what comes within its `merge_s`) and scheduler."""
    played = [PlayedRunner(i, host_copies) for i in range(runners)]
    supervisor, scheduler = Supervisor(SupervisorConfig()), scheduler_of(adapter_of(i) for i in range(host_copies))
    supervisor.handle(Connected(SCHEDULER), 0.0)
    for runner in played:
        supervisor.handle(Connected(runner_peer(runner.spec.runner), runner.spec), 0.0)
    clocks, size = (CpuClock(), CpuClock()), [0, 0]
    for turn in range(rounds + 1):
        reports = [
            (turn * 0.05 + i * 0.05 / runners, runner_peer(runner.spec.runner), runner.report())
            for i, runner in enumerate(played)
        ]
        sent: list[tuple[float, bytes]] = []
        with clocks[0]:  # each process does nothing else: a whole round goes through one, then through the other
            for now, peer, raw in reports:
                message = RUNNER_TO_SUPERVISOR.decode(supervisor_pb2.RunnerToSupervisor.FromString(raw))
                sent.extend(
                    (now, SUPERVISOR_TO_SCHEDULER.encode(effect.message).SerializeToString())
                    for effect in supervisor.handle(Received(peer, message), now)
                    if isinstance(effect, Send) and isinstance(effect.message, ClusterReport)
                )
        with clocks[1]:
            for now, raw in sent:
                report = SUPERVISOR_TO_SCHEDULER.decode(scheduler_pb2.SupervisorToScheduler.FromString(raw))
                encoded(scheduler.handle(Received(SUPERVISOR, report), now), Kind.SUPERVISOR)
        if turn:  # the first reports are full
            size[0] += sum(len(raw) for _, _, raw in reports)
            size[1] += sum(len(raw) for _, raw in sent)
        advance(1)
    first, second = (
        ReportCost(1e6 * min(clock.seconds[1:]) / runners, received / runners / rounds)
        for clock, received in zip(clocks, size, strict=True)
    )
    return first, second


# ------------------------------------------------------------------------------------------------ gRPC


def grpc_us(message_bytes: float, messages: int) -> float:
    """CPU microseconds of a server's process for each message of a stream, without decoding it."""
    return asyncio.run(_grpc_us(round(message_bytes), messages))


async def _grpc_us(message_bytes: int, messages: int) -> float:
    marks: list[float] = []

    async def receive(requests: Any, _context: Any) -> bytes:
        async for _ in requests:
            if not marks:
                marks.append(time.process_time())
        marks.append(time.process_time())
        return b""

    handler = grpc.stream_unary_rpc_method_handler(receive)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bench", {"Receive": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        command = [sys.executable, "-m", __name__, str(port), str(message_bytes), str(messages)]
        client = await asyncio.create_subprocess_exec(*command)
        if code := await client.wait():
            raise subprocess.CalledProcessError(code, command)
    finally:
        await server.stop(None)
    return 1e6 * (marks[1] - marks[0]) / (messages - 1)


async def _send(port: str, message_bytes: str, messages: str) -> None:
    """The client's process."""
    payload = bytes(int(message_bytes))

    async def requests() -> Any:
        for _ in range(int(messages)):
            yield payload

    async with channel(f"127.0.0.1:{port}") as opened:
        call: Any = opened.stream_unary
        await call("/bench.Bench/Receive")(requests())


# ------------------------------------------------------------------------------------------------ the engine thread


def engine_report_ms(host_copies: int, repetitions: int) -> float:
    """An end, a start and the reports of both, in a runner with 64 sequences and that many host copies; the median."""
    limits = PoolLimits(
        total_pages=20_000, page_tokens=16, max_sequences=BUSY, max_adapters=BUSY, max_context_tokens=4096,
        vocab_size=32_000, host_bytes=1 << 40,
    )  # fmt: skip
    runner, now = Runner(limits), 0.0
    desired = tuple(DesiredAdapter(digest(i), 16, 10**7, pinned=False, tier=Tier.HOST) for i in range(host_copies))
    runner.handle(Connected(GATEWAY, SessionHello("g", "i")), now)
    runner.handle(Connected(SUPERVISOR), now)
    effects = runner.handle(Received(SUPERVISOR, RunnerOrder(DesiredChange(1, True, desired))), now)
    fetched = 0
    while fetches := [effect for effect in effects if isinstance(effect, Fetch)]:
        fetched += len(fetches)
        effects = [more for one in fetches for more in runner.handle(Fetched(one.digest, None, 10**7), now)]
    assert fetched == host_copies, f"{fetched} adapters were fetched"
    clock = CpuClock()
    for i in range(BUSY + repetitions):
        now += 0.05
        start = Start(f"r{i}", Epoch(1, i + 1), tuple(range(1, 60)), (), 128, 64)
        if i < BUSY:
            runner.handle(Received(GATEWAY, start), now)
            continue
        stop = Stop(f"r{i - BUSY}", Epoch(1, i - BUSY + 1))
        with clock:
            effects = [
                *runner.handle(Received(GATEWAY, stop), now),
                *runner.handle(Received(GATEWAY, start), now),
                *runner.handle(TICK, now + 0.049),
            ]
        assert any(isinstance(e, Send) and isinstance(e.message, RunnerReport) for e in effects), "nothing was reported"
    return 1e3 * statistics.median(clock.seconds)


# ------------------------------------------------------------------------------------------------ one adapter more


@dataclass(frozen=True, slots=True)
class OneMore:
    scheduler_ms: float
    gateway_ms: float
    gateway_bytes: float
    runner_bytes: float


def one_adapter_more(adapters: int, repetitions: int, advance: Advance) -> OneMore:
    """Adapters that come one by one: the scheduler's and the gateway's part, medians; bytes of the messages, means."""
    scheduler, table = scheduler_of(map(adapter_of, range(adapters))), RouteIndex()
    table.take(Routes(0, True))
    report = RunnerReport(1, True, RunnerFigures(PAGES))
    runner = spec_of(RunnerId("u", "i"))
    scheduler.handle(Received(SUPERVISOR, ClusterReport((ReportedRunner(runner.runner, report, runner),))), 0.1)
    now, clocks, sizes = publish_all(scheduler, adapters, 1.0), (CpuClock(), CpuClock()), [0, 0]
    table.take(scheduler.state.routes.full())
    for i in range(repetitions):
        with clocks[0]:
            change = RegistryChange(False, (), (adapter_of(adapters + i),))
            effects = scheduler.handle(Received(REGISTRY, change), now + i)
            effects += scheduler.handle(TICK, now + i + 0.5)  # statuses are gathered for a while
            routes, orders = encoded(effects, Kind.GATEWAY), encoded(effects, Kind.SUPERVISOR)
        with clocks[1]:
            for raw in routes:
                change = SCHEDULER_TO_GATEWAY.decode(scheduler_pb2.SchedulerToGateway.FromString(raw))
                if isinstance(change, Routes):
                    table.take(change)
        assert len(table.routes) == adapters + i + 2, "every adapter and the base are routed"
        sizes[0] += sum(map(len, routes))
        sizes[1] += sum(map(len, orders))
        advance(1)
    medians = (1e3 * statistics.median(clock.seconds) for clock in clocks)
    return OneMore(*medians, *(size / repetitions for size in sizes))


def full_table(adapters: int, tenants: int, version: int = 1) -> Routes:
    routes = tuple(adapter_of(i, tenants).route for i in range(adapters))
    return Routes(version, True, routes=routes, pools=(PoolRoute(POOL, "sha256:base", "base"),))


@dataclass(frozen=True, slots=True)
class FullTable:
    """What a gateway's loop does for a full route table: in all, and for the message that keeps it longest."""

    cpu_ms: float
    longest_ms: float


def full_table_cost(adapters: int, repetitions: int, advance: Advance) -> FullTable:
    """The first table, and tables that replace it: the slowest of them, with the collector of garbage at work."""
    gateway, clock = Gateway(GatewayConfig(), "g", outcome_bytes), CpuClock()
    gateway.handle(Connected(SCHEDULER), 0.0)
    gc.freeze()
    costs: list[FullTable] = []
    for version in range(1, repetitions + 1):
        parts = full_table(adapters, max(adapters // 1_000, 1), version).parts()
        sent = [SCHEDULER_TO_GATEWAY.encode(part).SerializeToString() for part in parts]
        clock.seconds.clear()
        for raw in sent:
            with clock:
                change = SCHEDULER_TO_GATEWAY.decode(scheduler_pb2.SchedulerToGateway.FromString(raw))
                gateway.handle(Received(SCHEDULER, change), 0.0)
                gc.freeze()  # as the shell does
        gc.unfreeze()
        assert len(gateway.routes.routes) == adapters
        costs.append(FullTable(1e3 * sum(clock.seconds), 1e3 * max(clock.seconds)))
        advance(1)
    return max(costs, key=lambda cost: cost.longest_ms)


def models_ms(adapters: int, tenants: int, repetitions: int) -> float:
    """What the gateway's loop does for `GET /v1/models` of one tenant."""
    table, clock = RouteIndex(), CpuClock()
    table.take(full_table(adapters, tenants))
    for _ in range(repetitions):
        with clock:
            listed = [_model({}, *found) for found in table.visible(Principal("ns0"))]
            orjson.dumps({"object": "list", "data": listed})
        assert len(listed) >= adapters // tenants
    return 1e3 * statistics.median(clock.seconds)


# ------------------------------------------------------------------------------------------------ decisions


@dataclass(frozen=True, slots=True)
class Decisions:
    p50: float
    p99: float
    p99_by_kind: dict[str, float]
    memory_mib: float


def decision_us(
    runners: int, adapters: int, requests: int, decisions: int, advance: Advance, *, pool: PoolSpec, tenants: int
) -> Decisions:
    """CPU microseconds of the scheduler's handler in a full fleet: submissions, outcomes, reports of ends."""
    fleet = Fleet(runners, adapters, pool, tenants)
    for _ in range(requests):
        fleet.follow(fleet.handle(GATEWAY, fleet.submission()))
        advance(1)
    fleet.report_all()
    assert len(fleet.running) == runners * BUSY, f"{len(fleet.running)} requests run"
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(decisions):
        for kind, peer, message in fleet.next_messages():
            clock = CpuClock()
            with clock:
                effects = fleet.handle(peer, message)
            times[kind] += clock.seconds
            fleet.follow(effects)
        advance(1)
    together = sorted(1e6 * second for kind in times.values() for second in kind)
    return Decisions(
        statistics.median(together),
        statistics.quantiles(together, n=100)[-1],
        {kind: 1e6 * statistics.quantiles(seconds, n=100)[-1] for kind, seconds in times.items()},
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


class Fleet:
    """One pool of busy runners, as its scheduler hears of it. Adapters are Zipf-like."""

    def __init__(self, runners: int, adapters: int, pool: PoolSpec, tenants: int, seed: int = 0) -> None:
        self._chance, self._adapters, self._tenants, self.now = random.Random(seed), adapters, tenants, 0.0
        self._submitted = 0
        self.running: dict[str, tuple[RunnerId, str]] = {}
        self._on: dict[RunnerId, dict[str, SequenceState]] = {}
        self._fresh: dict[RunnerId, list[SequenceState]] = {}  # not yet reported
        self._version: dict[RunnerId, int] = {}
        self._core = scheduler_of((adapter_of(i, tenants) for i in range(adapters)), pool)
        for i in range(runners):
            runner = RunnerId(f"acme.{i:032x}", "i")
            self._on[runner], self._fresh[runner], self._version[runner] = {}, [], 0
        self.report_all()

    def handle(self, peer: Peer, message: object) -> Sequence[Any]:
        return self._core.handle(Received(peer, message), self.now)

    def next_messages(self) -> Iterable[tuple[str, Peer, object]]:
        """A request comes; another one ends, as its gateway says and as its runner's next report does."""
        self.now += 1e-4
        request_id = next(iter(self.running))
        runner, adapter = self.running.pop(request_id)
        del self._on[runner][request_id]
        record = outcome_bytes(
            Outcome(request_id, POOL, "ns0", "m", adapter, 16, 64, FinishReason.EOS, finished_unix_ms=1)
        )
        outcome = OutcomeReport(request_id, POOL, adapter, 64, censored=False, record=record)
        yield "submission", GATEWAY, self.submission()
        yield "outcome", GATEWAY, outcome
        fresh, self._fresh[runner] = [s for s in self._fresh[runner] if s.request_id in self._on[runner]], []
        report = RunnerReport(self._next(runner), False, self._figures(), fresh, (request_id,))
        yield "report", SUPERVISOR, ClusterReport((ReportedRunner(runner, report),))

    def follow(self, effects: Sequence[Any]) -> None:
        """What was assigned runs from now on."""
        for effect in effects:
            if isinstance(effect, Send) and isinstance(assigned := effect.message, Assign):
                request = self._core.state.requests[assigned.request_id]
                self.running[assigned.request_id] = (assigned.runner, request.adapter)
                sequence = SequenceState(
                    assigned.request_id, assigned.epoch, "g", request.adapter, 1, assigned.reservation_tokens, 1
                )
                self._on[assigned.runner][assigned.request_id] = sequence
                self._fresh[assigned.runner].append(sequence)
                self.handle(GATEWAY, Started(assigned.request_id, assigned.epoch))

    def report_all(self) -> None:
        for runner, sequences in self._on.items():
            used = {sequence.adapter for sequence in sequences.values() if sequence.adapter}
            resident = [AdapterState(adapter, Tier.DEVICE) for adapter in sorted(used)]
            report = RunnerReport(
                self._next(runner), True, self._figures(), list(sequences.values()), adapters=resident
            )
            self._fresh[runner] = []
            self.handle(
                SUPERVISOR, ClusterReport((ReportedRunner(runner, report, spec_of(runner, total_pages=64 * BUSY)),))
            )

    def submission(self) -> Submit:
        self._submitted += 1
        number = min(self._adapters - 1, int(self._chance.paretovariate(0.5)) - 1)
        prompt, p90 = self._chance.randint(16, 256), self._chance.randint(16, 128)
        tenant = f"ns{number % self._tenants}"
        return Submit(f"r{self._submitted}", POOL, tenant, "m", digest(number), prompt, 512, p90_tokens=p90)

    def _next(self, runner: RunnerId) -> int:
        self._version[runner] += 1
        return self._version[runner]

    def _figures(self) -> RunnerFigures:
        return RunnerFigures((64 - 32) * BUSY, desired_version=1)


if __name__ == "__main__":
    asyncio.run(_send(*sys.argv[1:]))

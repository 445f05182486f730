"""The shell over real gRPC on loopback: streams that come, go, are replaced, and say what they may not."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from harness.waiting import eventually, soon, until
from weft.domain.machine import TICK
from weft.domain.request import OutcomeReport
from weft.leadership.errors import LeadershipLost
from weft.leadership.standby import Turn
from weft.wire.streams import channel
from weft.wire.v1 import common_pb2 as cpb
from weft.wire.v1 import scheduler_pb2 as pb
from weft.wire.v1 import scheduler_pb2_grpc as rpc
from weft.wire.v1 import supervisor_pb2 as spb
from weft_scheduler.core import SchedulerConfig
from weft_scheduler.metrics import SchedulerMetrics
from weft_scheduler.server import Server
from weft_scheduler.term_file import TERM_EPOCH_S, TermFile

COMPLETE = pb.GatewayToScheduler(resubmit_complete=pb.ResubmitComplete())
R = cpb.RunnerId(uuid="u", incarnation="i")
BASE = pb.PoolRoute(name="n/p", base_digest="sha256:b", base_model_name="base")
# Nothing runs out by itself.
CONFIG = SchedulerConfig(status_s=0.01, first_routes_s=0.01, assign_s=600.0, absent_s=600.0)


class Peer:
    """A client's end of a stream: what it says, what it hears."""

    def __init__(self, open_stream: Any) -> None:
        self._call = open_stream()

    async def say(self, *messages: Any) -> None:
        for message in messages:
            await self._call.write(message)

    async def hear(self, what: str) -> Any:
        """Return the next message of that kind; others before it are passed over."""
        while True:
            message = await soon(self._call.read())
            assert message is not grpc.aio.EOF, f"the stream ended before {what}"
            if message.WhichOneof("message") == what:
                return getattr(message, what)

    async def end(self) -> grpc.StatusCode:
        """Hear until the stream ends."""
        try:
            while await soon(self._call.read()) is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:
            pass
        return await self._call.code()

    def cancel(self) -> None:
        self._call.cancel()


class Stack:
    """A served scheduler and its stub."""

    def __init__(self, server: Server, stub: Any, stop: asyncio.Event, registry: CollectorRegistry) -> None:
        self.server, self.stub, self.stop, self.registry = server, stub, stop, registry

    async def gateway(self, name: str = "g", complete: bool = True) -> Peer:
        peer = Peer(self.stub.Gateway)
        await peer.say(pb.GatewayToScheduler(hello=pb.GatewayHello(gateway=name)))
        if complete:
            await peer.say(COMPLETE)
        return peer

    async def supervisor(self, name: str = "s", highest_term: int = 0) -> Peer:
        peer = Peer(self.stub.Cluster)
        hello = pb.SupervisorHello(supervisor=name, highest_term=highest_term)
        await peer.say(pb.SupervisorToScheduler(hello=hello))
        return peer

    async def registry_stream(self, term: int = 0) -> Peer:
        peer = Peer(self.stub.Registry)
        pool = pb.PoolDesired(route=BASE)
        route = pb.Route(uid="1", namespace="n", model_name="n/a", pool="n/p", digest="sha256:1", rank=8)
        await peer.say(
            pb.RegistryToScheduler(snapshot=True, pools=[pool], adapters=[pb.AdapterDesired(route=route)], term=term)
        )
        await until(lambda: self.server.core.state.registry.is_known)  # other streams may be read before this stream
        return peer

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"weft_scheduler_{name}", labels) or 0.0


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    stop, registry = asyncio.Event(), CollectorRegistry()
    server = Server(CONFIG, TermFile(tmp_path, clock=lambda: TERM_EPOCH_S), stop, metrics=SchedulerMetrics(registry))
    grpc_server = grpc.aio.server()
    server.register(grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    connection = channel(f"127.0.0.1:{port}")
    try:
        yield Stack(server, rpc.SchedulerStub(connection), stop, registry)
    finally:
        await server.drain()
        await connection.close()
        await grpc_server.stop(0.2)
        server.close()


def report(
    *running: spb.SequenceState, sequence: int = 1, free: int = 100, runner: cpb.RunnerId = R
) -> pb.SupervisorToScheduler:
    hello = spb.RunnerHello(
        runner=runner, address="h:1", pool="n/p", page_tokens=16, total_pages=100, max_sequences=8, max_adapters=4,
        max_rank=64, max_context_tokens=1600,
    )  # fmt: skip
    full = spb.RunnerReport(version=sequence, full=True, free_pages=free, sequences=running, ready=True)
    reported = spb.ReportedRunner(runner=runner, spec=hello, report=full)
    return pb.SupervisorToScheduler(report=pb.ClusterReport(reports=[reported]))


def outcome_of(request_id: str, **fields: Any) -> pb.OutcomeReport:
    return pb.OutcomeReport(request_id=request_id, pool="n/p", record=b"not read", **fields)


def submit(request_id: str = "r") -> pb.GatewayToScheduler:
    message = pb.Submit(
        request_id=request_id, pool="n/p", model_name="n/a", adapter="sha256:1", prompt_tokens=20,
        max_tokens=50, p90_tokens=30,
    )  # fmt: skip
    return pb.GatewayToScheduler(submit=message)


async def assigned(stack: Stack) -> tuple[Peer, Peer, pb.Assign]:
    """Return a supervisor that reported a runner, a gateway, and where its request was sent."""
    await stack.registry_stream()
    supervisor, gateway = await stack.supervisor(), await stack.gateway()
    await supervisor.say(report())
    await supervisor.hear("orders")
    await gateway.hear("routes")
    await gateway.say(submit())
    return supervisor, gateway, await gateway.hear("assign")


async def test_a_request_goes_from_submit_to_a_stored_outcome(stack: Stack) -> None:
    registry, supervisor = await stack.registry_stream(), await stack.supervisor(highest_term=4)
    assert (await supervisor.hear("hello")).term == 5
    await supervisor.say(report())
    assert [a.digest for a in (await supervisor.hear("orders")).order.desired.adapters] == []
    gateway = await stack.gateway()
    assert [r.model_name for r in (await gateway.hear("routes")).routes] == ["base", "n/a"]
    await gateway.say(submit())
    assign = await gateway.hear("assign")
    assert (assign.epoch.term, assign.runner, assign.address, assign.reservation_tokens) == (5, R, "h:1", 30)
    await gateway.say(pb.GatewayToScheduler(started=pb.Started(request_id="r", epoch=assign.epoch)))
    outcome = outcome_of("r", completion_tokens=12)
    await gateway.say(pb.GatewayToScheduler(outcome_report=outcome))
    assert await supervisor.hear("outcome_report") == outcome, "its record is passed on unread"
    await supervisor.say(pb.SupervisorToScheduler(outcome_ack=pb.OutcomeAck(request_ids=["r"])))
    assert list((await gateway.hear("outcome_ack")).request_ids) == ["r"]
    assert (await registry.hear("adapter")).routed
    assert stack.metric("decisions_total", result="placed") == 1
    assert stack.metric("placement_seconds_count") == 1


async def test_a_request_that_a_runner_gives_back_is_placed_again_and_counted(stack: Stack) -> None:
    _, gateway, first = await assigned(stack)
    failed = pb.Failed(request_id="r", epoch=first.epoch, reason=pb.Failed.PREEMPTED)
    await gateway.say(pb.GatewayToScheduler(failed=failed))
    assert (await gateway.hear("assign")).epoch.counter > first.epoch.counter
    assert stack.metric("migrations_total", reason="preempted") == 1


async def test_a_registry_that_only_listens_gets_every_status_whoever_leads(stack: Stack) -> None:
    listener = Peer(stack.stub.Registry)
    await stack.registry_stream(term=5)
    assert (await listener.hear("pool")).pool == "n/p"
    assert (await Peer(stack.stub.Registry).hear("pool")).pool == "n/p"
    await stack.registry_stream(term=6)
    assert (await listener.hear("adapter")).uid == "1"


async def test_it_is_ready_with_a_registry_snapshot_and_a_supervisor(stack: Stack) -> None:
    assert stack.server.not_ready() == "no registry snapshot yet"
    await (await stack.registry_stream()).hear("pool")
    assert stack.server.not_ready() == "no supervisor connected"
    await (await stack.supervisor()).hear("hello")
    assert stack.server.not_ready() is None


async def test_a_gateway_that_connects_again_replaces_its_older_stream(stack: Stack) -> None:
    await stack.registry_stream()
    older = await stack.gateway()
    await older.hear("routes")
    await older.say(submit("old"))
    newer = await stack.gateway()
    await newer.hear("routes")
    assert await older.end() is grpc.StatusCode.OK
    await newer.say(submit("new"))
    supervisor = await stack.supervisor()
    await supervisor.say(report())
    assert (await newer.hear("assign")).request_id == "new"
    assert set(stack.server.core.state.requests) == {"new"}


async def test_the_end_of_a_stream_forgets_what_it_held(stack: Stack) -> None:
    await stack.registry_stream()
    gateway = await stack.gateway()
    await (await stack.gateway("other")).hear("routes")
    await gateway.say(submit())
    state = stack.server.core.state

    async def hold(count: int) -> None:
        async def so() -> bool:
            return len(state.requests) == count

        await eventually(so)

    await hold(1)
    gateway.cancel()
    await hold(0)
    assert set(state.gateways) == {"other"}


HELLO = [pb.SupervisorToScheduler(hello=pb.SupervisorHello(supervisor=name)) for name in ("s", "t")]


@pytest.mark.parametrize(
    ("opened", "messages"),
    [
        ("Gateway", [submit()]),
        ("Gateway", [pb.GatewayToScheduler(hello=pb.GatewayHello())]),
        ("Gateway", [pb.GatewayToScheduler(hello=pb.GatewayHello(gateway=name)) for name in ("g", "h")]),
        ("Gateway", [pb.GatewayToScheduler(hello=pb.GatewayHello(gateway="g")), pb.GatewayToScheduler()]),
        ("Cluster", [report()]),
        ("Cluster", HELLO),
    ],
    ids=["no hello", "no id", "two ids", "nothing said", "no supervisor's hello", "two supervisors"],
)
async def test_what_is_not_in_the_contract_ends_that_stream_alone(
    stack: Stack, opened: str, messages: list[Any]
) -> None:
    await stack.registry_stream()
    good, bad = await stack.gateway("good"), Peer(getattr(stack.stub, opened))
    await bad.say(*messages)
    assert await bad.end() is grpc.StatusCode.INVALID_ARGUMENT
    await good.hear("routes")
    assert set(stack.server.core.state.gateways) == {"good"}
    assert stack.server.failure is None


async def test_a_term_that_is_not_durable_ends_the_process_and_gives_no_order(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "term.tmp").mkdir()
    supervisor = await stack.supervisor(highest_term=41)
    await soon(stack.stop.wait())
    assert "not written" in str(stack.server.failure)
    assert await supervisor.end() is not grpc.StatusCode.OK


async def test_an_exception_of_the_machine_is_fatal(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(stack.server.core, "handle", broken)
    await stack.gateway(complete=False)  # the stream may be over before a second message
    await soon(stack.stop.wait())
    assert isinstance(stack.server.failure, KeyError)


async def test_draining_ends_every_stream(stack: Stack) -> None:
    peers = [await stack.registry_stream(), await stack.supervisor(), await stack.gateway()]
    await peers[0].hear("pool")
    await peers[1].hear("hello")
    await peers[2].hear("routes")
    await stack.server.drain()
    assert [await p.end() for p in peers] == [grpc.StatusCode.OK] * 3


@pytest.mark.slow
async def test_a_full_ledger_is_told_to_a_supervisor_on_one_stream(stack: Stack) -> None:
    """What has to be told beside the ledger finds room, too."""
    for number in range(CONFIG.max_outcomes):
        assert stack.server.core.state.outcomes.add(OutcomeReport(f"r{number}", "n/p", "", 1, False, b"r"), "g")
    await stack.registry_stream()
    supervisor = await stack.supervisor()
    await supervisor.hear("hello")
    for _ in range(CONFIG.max_outcomes):
        await supervisor.hear("outcome_report")
    supervisor.cancel()


async def test_a_registry_under_a_lower_term_is_ended_and_what_it_says_does_not_count(stack: Stack) -> None:
    old = await stack.registry_stream(term=3)
    assert (await old.hear("pool")).pool == "n/p"
    new = await stack.registry_stream(term=4)
    assert (await new.hear("pool")).pool == "n/p", "everything is told to who leads now"
    assert await old.end() is grpc.StatusCode.FAILED_PRECONDITION
    assert await (await stack.registry_stream(term=3)).end() is grpc.StatusCode.FAILED_PRECONDITION
    deleting = Peer(stack.stub.Registry)
    await deleting.say(pb.RegistryToScheduler(removed_pools=["n/p"]))
    assert await deleting.end() is grpc.StatusCode.FAILED_PRECONDITION, "none is a lower term too"
    assert stack.server.core.state.pools["n/p"].spec is not None
    pool = pb.PoolDesired(route=BASE, min_runners=7, max_runners=7)
    await new.say(pb.RegistryToScheduler(pools=[pool], term=4))
    while (await new.hear("pool")).wanted_runners != 7:
        pass


async def test_an_empty_data_directory_gives_no_order_below_what_anybody_has_seen(stack: Stack, tmp_path: Path) -> None:
    """Gateways, supervisor and runners live on from term 7; this scheduler's clock is wrong, too."""
    registry = await stack.registry_stream()
    gateway, seen = await stack.gateway(complete=False), cpb.Epoch(term=7, counter=12)
    for n in range(20):
        held = submit(f"held{n}")
        held.submit.epoch.CopyFrom(cpb.Epoch(term=6, counter=n + 1))
        held.submit.emitted_tokens = 5
        await gateway.say(held)
    running = submit("running")
    running.submit.epoch.CopyFrom(seen)
    running.submit.runner.CopyFrom(R)
    await gateway.say(running, COMPLETE)
    # The streams are independent: the supervisor could be answered before the epochs of the gateway are read.
    await until(lambda: stack.server.core.state.numbers.term > 7)
    supervisor = await stack.supervisor()
    told = report(spb.SequenceState(request_id="running", epoch=seen, adapter="sha256:1", reservation_tokens=30))
    told.report.reports[0].report.desired_version = 7 << 32
    await supervisor.say(told)
    order = await supervisor.hear("orders")
    assert order.order.desired.version > 7 << 32, "or the runner would be taken to know the list"
    for _ in range(7):  # 8 sequences in a runner
        assign = await gateway.hear("assign")
        assert assign.epoch.term > 7
        assert int((tmp_path / "term").read_text()) >= assign.epoch.term
    await registry.hear("pool")


async def test_once_its_turn_is_lost_nothing_more_is_decided(tmp_path: Path) -> None:
    turn, stop, terms = Turn(term=1 << 30), asyncio.Event(), TermFile(tmp_path)
    server = Server(CONFIG, terms, stop, turn=turn, metrics=SchedulerMetrics(CollectorRegistry()))
    assert terms.read() == 1 << 30, "the Lease's"
    server.feed(TICK)

    def lost() -> None:
        raise LeadershipLost("held by another")

    turn.require = lost
    with pytest.raises(LeadershipLost):
        server.feed(TICK)
    assert stop.is_set()
    assert isinstance(server.failure, LeadershipLost)
    with pytest.raises(LeadershipLost):
        server.feed(TICK)
    server.close()

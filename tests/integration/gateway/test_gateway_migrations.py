"""Whatever breaks, moves or restarts: the client's text is that of an undisturbed run."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from harness.certificates import Authority
from harness.gateway_peers import FakeRunner, runner_server
from harness.grpc_server import listening
from weft.domain.machine import Closed, Connected, Kind, Peer, Received
from weft.domain.request import SessionHello
from weft.wire.tls import Tls
from weft.wire.v1 import common_pb2, runner_pb2, scheduler_pb2
from weft.wire.v1.runner_pb2_grpc import add_RunnerServicer_to_server
from weft_gateway.core.events import OpenSession, SessionAlive
from weft_gateway.shell import RunnerSession

from .conftest import ANSWER, World, opened, serving, soon, until

BODY: dict[str, Any] = {"model": "acme/upper", "prompt": "hello", "stream": True}


@pytest.fixture
async def other() -> AsyncIterator[FakeRunner]:
    """A second runner."""
    async with runner_server(FakeRunner("runner-2")) as runner:
        yield runner


class Running:
    """A streamed completion that has its first tokens."""

    def __init__(self, world: World) -> None:
        self.world, self.tokens = world, world.tokens(ANSWER)
        self.request_id = ""
        self.text = asyncio.get_running_loop().create_future()

    async def begin(self) -> runner_pb2.Start:
        self.world.runner.autopilot = self.world.scheduler.autopilot = False
        self._task = asyncio.create_task(self._read())
        submit = await self.world.scheduler.next("submit")
        self.request_id = submit.request_id
        self.epoch = self.world.scheduler.assign(self.request_id)
        start = await self.world.runner.next("start")
        self.world.runner.step(start, 0, self.tokens[:2])
        await self.world.scheduler.next("started")
        return start

    async def _read(self) -> str:
        stream = await self.world.client().completions.create(model="acme/upper", prompt="hello", stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ends_well_on(self, runner: FakeRunner) -> runner_pb2.Start:
        """The runner continues after the tokens so far, and the whole text is the answer."""
        start = await runner.next("start")
        assert list(start.emitted) == self.tokens[: len(start.emitted)]
        runner.answer = lambda _: self.tokens
        runner.answer_whole(start)
        assert await soon(self._task) == ANSWER
        await self.world.settled()
        assert len(self.world.scheduler.outcomes) == 1
        return start

    async def failed(self, reason: Any) -> scheduler_pb2.Failed:
        failed = await self.world.scheduler.next("failed")
        assert (failed.request_id, failed.epoch, failed.reason) == (self.request_id, self.epoch, reason)
        assert failed.emitted_tokens == 2
        return failed


async def test_a_runner_that_dies_is_reported_at_once_and_another_continues(world: World, other: FakeRunner) -> None:
    running = Running(world)
    await running.begin()
    world.runner.break_sessions()
    await running.failed(scheduler_pb2.Failed.SESSION_LOST)
    world.scheduler.assign(running.request_id, other)
    start = await running.ends_well_on(other)
    assert len(start.emitted) == 2
    assert world.outcome().migrations == 1


async def test_a_new_incarnation_ends_the_session_to_the_old_one(world: World, other: FakeRunner) -> None:
    running = Running(world)
    await running.begin()
    other.id = common_pb2.RunnerId(uuid="runner-1", incarnation="runner-1-2")
    world.scheduler.assign(running.request_id, other)
    await until(lambda: world.runner.closed == 1)
    await running.ends_well_on(other)


async def test_a_client_is_woken_whatever_fails_at_its_requests_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug in a metric")

    monkeypatch.setattr(world.gateway.manager.metrics, "count_finish", broken)
    answer = await soon(world.client().completions.create(model="tiny", prompt="hello"))
    assert answer.choices[0].text == ANSWER


async def test_a_runner_under_another_name_is_refused(world: World, other: FakeRunner) -> None:
    world.scheduler.autopilot = False
    asked = asyncio.create_task(world.client().completions.create(model="tiny", prompt="hello"))
    submit = await world.scheduler.next("submit")
    imposter = FakeRunner("runner-3")
    imposter.address = other.address  # the address is that of runner-2 now
    world.scheduler.assign(submit.request_id, imposter)
    failed = await world.scheduler.next("failed")
    assert failed.reason == scheduler_pb2.Failed.SESSION_LOST
    assert "another runner answered" in failed.detail
    world.scheduler.assign(submit.request_id)
    assert (await soon(asked)).choices[0].text == ANSWER


async def test_a_session_without_requests_is_closed_and_opened_again(parts: World, tmp_path: Path) -> None:
    async with serving(parts, parts.settings(tmp_path), session_idle_s=0.05) as world:
        for sessions in (1, 2):
            await world.client().completions.create(model="tiny", prompt="hello")
            assert len(world.runner.outboxes) == sessions
            await until(lambda: not len(world.gateway.machine.sessions))


@pytest.mark.parametrize("by_the_runner", [True, False])
async def test_the_end_of_a_session_is_told_once_unless_the_gateway_ended_it(*, by_the_runner: bool) -> None:
    told = list[Connected | Received | Closed]()
    async with runner_server(FakeRunner("runner-1")) as runner:
        peer = Peer(Kind.RUNNER, "runner-1/runner-1-1")
        opened_session = OpenSession(peer, runner.address, SessionHello("gateway-1", runner.id.incarnation), "acme/p")
        session = RunnerSession(opened_session, told.append, told.append, None)
        await until(lambda: told == [Connected(peer)])
        if by_the_runner:
            runner.outboxes[-1].close()
        else:
            session.close()
        await soon(session.closed())
    assert told == [Connected(peer), *([Closed(peer, "closed by the runner")] if by_the_runner else [])]


@pytest.mark.parametrize("answers", [True, False])
async def test_a_checked_session_goes_on_where_the_runner_answers_and_ends_where_it_does_not(*, answers: bool) -> None:
    told = list[Connected | Received | Closed | SessionAlive]()
    runner = FakeRunner("runner-1")
    peer = Peer(Kind.RUNNER, "runner-1/runner-1-1")

    def serve(server: grpc.aio.Server) -> None:
        add_RunnerServicer_to_server(runner, server)
        if answers:
            add_HealthServicer_to_server(HealthServicer(), server)

    async with listening(serve) as address:
        session = RunnerSession(
            OpenSession(peer, address, SessionHello("gateway-1", runner.id.incarnation), "acme/p"),
            told.append,
            told.append,
            None,
        )
        await until(lambda: told == [Connected(peer)])
        session.check()
        await until(lambda: len(told) == 2)
        session.close()
        await soon(session.closed())
    detail = "its lease ran out, and it does not answer: UNIMPLEMENTED"
    assert told[1] == (SessionAlive(peer) if answers else Closed(peer, detail))


@pytest.mark.parametrize("namespaces", [(), ("globex",), ("acme", "globex")])
async def test_a_session_is_with_a_runner_of_the_pools_namespace_or_with_none(namespaces, tmp_path: Path) -> None:
    authority, told, runner = Authority(), list[Connected | Received | Closed](), FakeRunner("runner-1")
    certificate, key = authority.issue("runner.weft.internal", *(f"{one}.runner.weft.internal" for one in namespaces))
    credentials = grpc.ssl_server_credentials([(key, certificate)], authority.pem, require_client_auth=True)
    gateway, peer = Tls(authority.folder(tmp_path, "gateway"), "gateway"), Peer(Kind.RUNNER, "runner-1/runner-1-1")
    async with listening(lambda server: add_RunnerServicer_to_server(runner, server), credentials) as address:
        opened_session = OpenSession(peer, address, SessionHello("gateway-1", runner.id.incarnation), "acme/p")
        session = RunnerSession(opened_session, told.append, told.append, gateway)
        await until(lambda: bool(told))
        session.close()
        await soon(session.closed())
    if "acme" in namespaces:
        assert told == [Connected(peer)]
    else:
        assert isinstance(told[0], Closed)
        texts = "Hostname Verification Check failed", "acme.runner.weft.internal is not in peer certificate"  # gRPC's
        assert any(text in told[0].reason for text in texts), told[0].reason
    assert bool(runner.outboxes) == ("acme" in namespaces), "nothing of the request has reached it"


# ---------------------------------------------------------------- the scheduler goes and comes back


async def test_a_scheduler_that_restarts_gets_everything_and_the_stream_does_not_notice(
    parts: World, tmp_path: Path
) -> None:
    parts.scheduler.acknowledges = False
    async with serving(parts, parts.settings(tmp_path)) as world:
        await world.client().completions.create(model="tiny", prompt="hello")
        finished = await world.scheduler.next("outcome_report")
        await world.runner.next("start")
        running = Running(world)
        start = await running.begin()
        world.scheduler.outbox.close()  # the stream ends; the gateway comes back by itself
        hello = await world.scheduler.next("hello")
        assert hello.gateway == world.gateway.machine.gateway_id
        submit = await world.scheduler.next("submit")
        assert (submit.request_id, submit.epoch, submit.runner) == (running.request_id, start.epoch, world.runner.id)
        assert (submit.emitted_tokens, submit.reservation_tokens, submit.start_emitted_tokens) == (2, 8, 0)
        assert submit.numerics_class == "class of runner-1"
        assert await world.scheduler.next("outcome_report") == finished
        await world.scheduler.next("resubmit_complete")
        world.scheduler.acknowledges = True
        world.scheduler.send(outcome_ack=scheduler_pb2.OutcomeAck(request_ids=[finished.request_id]))
        world.runner.step(start, 2, running.tokens[2:], common_pb2.FINISH_REASON_EOS)
        assert await soon(running._task) == ANSWER
        await world.settled()


# ---------------------------------------------------------------- clients that go away


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("started", [True, False], ids=["with tokens", "before the first"])
async def test_a_client_that_goes_away_is_stopped_everywhere(world: World, stream: bool, started: bool) -> None:
    world.runner.autopilot = False
    http = world.http()
    posted = asyncio.create_task(opened(http, BODY | {"stream": stream}))
    start = await world.runner.next("start")
    if started:
        world.runner.step(start, 0, world.tokens("ab"))
        await world.scheduler.next("started")
    if started and stream:
        await (await soon(posted)).aclose()
    else:
        posted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await posted
    await http.aclose()
    stop = await world.runner.next("stop")
    assert (stop.request_id, stop.epoch) == (start.request_id, start.epoch)
    assert (await world.scheduler.next("cancel")).request_id == start.request_id
    await world.settled()
    outcome = world.outcome()
    assert (outcome.finish, outcome.censored) == (common_pb2.FINISH_REASON_CANCELLED, True)
    assert outcome.completion_tokens == (len(world.tokens("ab")) if started else 0)


async def test_a_runner_that_speaks_for_anothers_epoch_loses_its_own_requests_alone(
    world: World, other: FakeRunner
) -> None:
    running = Running(world)
    start = await running.begin()
    other.autopilot = False
    posted = asyncio.create_task(world.client().completions.create(model="tiny", prompt="hello"))
    submit = await world.scheduler.next("submit")
    world.scheduler.assign(submit.request_id, other)
    await other.next("start")
    other.step(start, 2, [5])
    failed = await world.scheduler.next("failed")
    assert (failed.request_id, "belongs to a different runner" in failed.detail) == (submit.request_id, True)
    world.scheduler.assign(submit.request_id, world.runner)
    for one, done in ((start, 2), (await world.runner.next("start"), 0)):
        world.runner.step(one, done, running.tokens[done:], common_pb2.FINISH_REASON_EOS)
    assert await soon(running._task) == ANSWER
    assert (await soon(posted)).choices[0].text == ANSWER


async def test_an_answer_ends_while_the_scheduler_is_away_and_its_outcome_waits(world: World) -> None:
    running = Running(world)
    start = await running.begin()
    world.gateway.manager.scheduler.close()
    await until(lambda: not world.gateway.manager.scheduler.up)
    world.runner.step(start, 2, running.tokens[2:], common_pb2.FINISH_REASON_EOS)
    assert await soon(running._task) == ANSWER
    assert [*world.gateway.machine.outcomes] == [running.request_id]


@pytest.mark.parametrize("fields", [{"finish": 77}, {"doublings": 2**32 - 1}], ids=str)
async def test_a_step_outside_the_contract_ends_the_session_and_the_request_goes_on_elsewhere(
    world: World, other: FakeRunner, fields: dict[str, int]
) -> None:
    running = Running(world)
    start = await running.begin()
    world.runner.step(start, 2, running.tokens[2:3], **fields)
    assert "broke the contract" in (await running.failed(scheduler_pb2.Failed.SESSION_LOST)).detail
    world.scheduler.assign(running.request_id, other)
    await running.ends_well_on(other)


async def test_a_runner_that_does_not_say_who_it_is_first_is_not_listened_to(world: World, other: FakeRunner) -> None:
    running, world.runner.silent = Running(world), True
    world.runner.autopilot = other.autopilot = world.scheduler.autopilot = False
    running._task = asyncio.create_task(running._read())
    running.request_id = (await world.scheduler.next("submit")).request_id
    running.epoch = world.scheduler.assign(running.request_id)
    world.runner.step(await world.runner.next("start"), 0, running.tokens[:2])
    failed = await world.scheduler.next("failed")
    assert (failed.reason, failed.emitted_tokens) == (scheduler_pb2.Failed.SESSION_LOST, 0)
    assert "before SessionReady" in failed.detail
    world.scheduler.assign(running.request_id, other)
    await running.ends_well_on(other)

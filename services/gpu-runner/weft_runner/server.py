"""The shell: sessions of gateways, reports to the supervisor, drain. No decision is made here.

A session belongs to one gateway stream; when it ends, however, its sequences are cancelled. What an iteration produced
leaves as one Step message a gateway.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio

from weft.telemetry.logs import kv
from weft.wire.channels import Outbox, both_ways
from weft.wire.errors import PeerError, peer_errors
from weft.wire.v1 import common_pb2, runner_pb2, runner_pb2_grpc
from weft.wire.v1.runner_pb2 import GatewayToRunner, RunnerToGateway
from weft_runner.core.events import Ended, NoRoom, PoolState, Tokens
from weft_runner.engine import Drain, Engine, Iteration, OwnerLost, Stop, TellState
from weft_runner.identity import Identity
from weft_runner.metrics import Metrics
from weft_runner.report import Reporter
from weft_runner.wire import epoch_of, refusal_to, request_of, step_to

log = logging.getLogger(__name__)
DRAIN_S = 10.0  # a forward that is under way ends first
FLUSH_S = 2.0
# Commands that wait for the engine: each of the most sequences that a runner takes (1,024) started and stopped nine
# times, which the scheduler does not come to before the lease of an engine that stands still is over.
MAX_BACKLOG = 20_000


class Overrun(PeerError):
    """Gateways ask for more than the engine looks at."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


@dataclass(frozen=True, slots=True)
class GatewaySession:
    """One gateway's stream; `owner` names it inside the engine."""

    owner: int
    gateway_id: str
    outbox: Outbox[RunnerToGateway]
    over: asyncio.Event


class RunnerServer(runner_pb2_grpc.RunnerServicer):
    """Hands messages to the engine and its iterations to the gateways. One event loop."""

    def __init__(self, engine: Engine, identity: Identity, metrics: Metrics) -> None:
        self._engine, self._identity, self._metrics = engine, identity, metrics
        self._loop = asyncio.get_running_loop()
        self._owners = itertools.count(1)
        self._sessions: dict[int, GatewaySession] = {}
        self._first_state = asyncio.Event()
        self._drained = asyncio.Event()
        self._draining = False
        self._announcing: asyncio.Task[None] | None = None
        self.state: PoolState | None = None
        self.reporter: Reporter | None = None

    # ---- from gateways

    async def Session(  # noqa: N802 (the contract's name)
        self,
        request_iterator: AsyncIterator[GatewayToRunner],
        context: "grpc.aio.ServicerContext[GatewayToRunner, RunnerToGateway]",
    ) -> AsyncIterator[RunnerToGateway]:
        """See runner.proto. The first message is a hello to this incarnation."""
        requests = aiter(request_iterator)
        session = await self._greet(await anext(requests, None), context)
        self._sessions[session.owner] = session
        log.info("session opened", extra=kv(gateway=session.gateway_id))
        try:
            async with peer_errors("gateway", context):
                async for message in both_ways(requests, context, session.outbox, lambda m: self._take(session, m)):
                    yield message
        finally:
            del self._sessions[session.owner]
            self._engine.post(OwnerLost(session.owner))
            session.over.set()
            log.info("session closed", extra=kv(gateway=session.gateway_id))

    async def _greet(
        self, first: GatewayToRunner | None, context: "grpc.aio.ServicerContext[GatewayToRunner, RunnerToGateway]"
    ) -> GatewaySession:
        if first is None or first.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a session is its hello")
        hello = first.hello
        if hello.incarnation != self._identity.incarnation:
            detail = f"this is incarnation {self._identity.incarnation} of runner {self._identity.uuid}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, detail)
        session = GatewaySession(next(self._owners), hello.gateway_id, Outbox(), asyncio.Event())
        runner = common_pb2.RunnerId(uuid=self._identity.uuid, incarnation=self._identity.incarnation)
        session.outbox.put(RunnerToGateway(ready=runner_pb2.SessionReady(runner=runner)))
        if self._draining:
            session.outbox.put(RunnerToGateway(draining=runner_pb2.Draining()))
        return session

    def _take(self, session: GatewaySession, message: GatewayToRunner) -> None:
        if self._engine.backlog >= MAX_BACKLOG:
            raise Overrun(f"{MAX_BACKLOG} commands wait for the engine")
        match message.WhichOneof("message"):
            case "start":
                request = request_of(message.start, owner=session.owner, gateway_id=session.gateway_id)
                log.info("request started", extra=started(message.start))
                self._engine.post(request)
            case "stop":
                self._engine.post(Stop(message.stop.request_id, epoch_of(message.stop.epoch), session.owner))
            case _:
                pass  # a second hello changes nothing; unknown messages are a newer gateway's

    # ---- from the engine

    def deliver(self, iteration: Iteration) -> None:
        """What an iteration produced, on the loop."""
        self._metrics.observe(iteration)
        produced: dict[int, list[Tokens]] = {}
        for event in iteration.events:
            match event:
                case Tokens():
                    produced.setdefault(event.owner, []).append(event)
                case NoRoom() | Ended():
                    self._log(event)
                    self._send(event.owner, refusal_to(event))
        for owner, tokens in produced.items():
            self._send(owner, step_to(iteration.number, tokens))
        if iteration.state is not None:
            self._tell(iteration.state)
        elif self.reporter is not None:
            self.reporter.changed()

    def _send(self, owner: int, message: RunnerToGateway) -> None:
        """A session that is over needs no message: its sequences are being cancelled."""
        if (session := self._sessions.get(owner)) is not None:
            session.outbox.put(message)

    def _tell(self, state: PoolState) -> None:
        self.state = state
        self._first_state.set()
        if state.draining:
            self._drained.set()
        if self.reporter is not None:
            self.reporter.deliver(state)

    def _log(self, event: NoRoom | Ended) -> None:
        if isinstance(event, Ended):
            fields = kv(request_id=event.request_id, reason=event.reason.value, detail=event.detail)
            log.warning("sequence given up", extra=fields)
        else:
            log.info("no room", extra=kv(request_id=event.request_id, reason=event.reason, free_pages=event.free_pages))

    # ---- life

    async def first_state(self) -> None:
        """Wait until the engine has told its state once, or has failed."""
        self._engine.post(TellState())
        await self._first_state.wait()

    def drain(self, on: bool) -> None:
        """Give every sequence back at the next iteration boundary, or serve again."""
        self._draining = on
        self._drained.clear()
        self._engine.post(Drain(on))
        if self._announcing is not None:
            self._announcing.cancel()
        self._announcing = self._loop.create_task(self._announce()) if on else None

    async def drain_and_close(self) -> None:
        """On SIGTERM: every sequence is given back, every gateway told, then the streams end."""
        self.drain(on=True)
        assert self._announcing is not None
        done, _ = await asyncio.wait([self._announcing], timeout=DRAIN_S)
        if not done:
            log.warning("the engine did not give its sequences back in time", extra=kv(seconds=DRAIN_S))
        sessions = list(self._sessions.values())
        for session in sessions:
            session.outbox.close()
        try:
            async with asyncio.timeout(FLUSH_S):
                for session in sessions:
                    await session.over.wait()
        except TimeoutError:
            log.warning("gateways did not read their last messages in time", extra=kv(sessions=len(self._sessions)))

    def abort(self) -> None:
        """The engine is gone: streams end at once, so that every gateway moves its requests now."""
        self._first_state.set()
        for session in self._sessions.values():
            session.outbox.close()

    async def _announce(self) -> None:
        """Draining follows the last Ended(DRAINED) of each session."""
        await self._drained.wait()
        for session in self._sessions.values():
            session.outbox.put(RunnerToGateway(draining=runner_pb2.Draining()))

    def not_ready(self) -> str | None:
        """Why `/readyz` says no."""
        if self._draining:
            return "draining"
        return "starting" if self.state is None else self.state.not_ready or None


def started(start: runner_pb2.Start) -> dict[str, dict[str, object]]:
    """A Start's key-values for the log: the request's id as in the gateway's log, the client's own, what will run."""
    return kv(
        request_id=start.request_id,
        client_request_id=start.gateway_request_id,
        epoch=f"{start.epoch.term}.{start.epoch.counter}",
        adapter=start.adapter_digest or "base",
        prompt_tokens=len(start.prompt_tokens),
        emitted_tokens=len(start.emitted_tokens),
    )

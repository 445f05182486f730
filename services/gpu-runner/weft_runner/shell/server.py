"""Sessions of gateways, drain, and where the engine's output goes. No decision is made here.

A session belongs to one gateway stream; when it ends, however, its sequences are cancelled.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio

from weft.domain.ids import BASE, RunnerId
from weft.domain.machine import Closed, Connected, Kind, Peer, Received
from weft.domain.request import Ended, NoCapacity, SessionHello, SessionReady, Start
from weft.domain.runner import RunnerOrder
from weft.telemetry.logs import kv
from weft.telemetry.tracing import Tracer
from weft.wire.codec.session import GATEWAY_TO_RUNNER, RUNNER_TO_GATEWAY
from weft.wire.errors import PeerError, peer_errors
from weft.wire.streams import SendQueue, serve_stream
from weft.wire.v1 import runner_pb2_grpc
from weft.wire.v1.runner_pb2 import GatewayToRunner, RunnerToGateway
from weft_runner.core.events import Drain, RunnerStatus, SequenceEnded
from weft_runner.core.transfer.hand_over import MIGRATE_S
from weft_runner.shell.engine import Engine, Output
from weft_runner.shell.metrics import RunnerMetrics
from weft_runner.shell.supervisor_link import SupervisorLink

log = logging.getLogger(__name__)
DRAIN_S = MIGRATE_S + 2.0  # a forward that is under way ends first
FLUSH_S = 2.0
# Events that wait for the engine: each of the most sequences that a runner takes (1,024) started and stopped nine
# times, which the scheduler does not come to before the lease of an engine that stands still is over.
MAX_BACKLOG = 20_000


class EngineOverloaded(PeerError):
    """Peers ask for more than the engine handles."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


@dataclass(frozen=True, slots=True)
class GatewaySession:
    """One gateway's stream. `peer` is the machine's name for it: another stream of the same gateway has another one."""

    peer: Peer
    outbox: SendQueue[RunnerToGateway]
    over: asyncio.Event


class RunnerServer(runner_pb2_grpc.RunnerServicer):
    """Hands messages to the engine and its output to the peers. One event loop."""

    def __init__(self, engine: Engine, runner: RunnerId, metrics: RunnerMetrics, tracer: Tracer | None = None) -> None:
        self._engine, self._runner, self._metrics, self._tracer = engine, runner, metrics, tracer
        self._numbers = itertools.count(1)
        self._sessions: dict[Peer, GatewaySession] = {}
        self._first_status, self._drained = asyncio.Event(), asyncio.Event()
        self._draining = False
        self.status: RunnerStatus | None = None
        self.supervisor: SupervisorLink | None = None

    # ---- from gateways

    async def Session(  # noqa: N802 (the contract's name)
        self,
        request_iterator: AsyncIterator[GatewayToRunner],
        context: "grpc.aio.ServicerContext[GatewayToRunner, RunnerToGateway]",
    ) -> AsyncIterator[RunnerToGateway]:
        """Serve a gateway's session (runner.proto). The first message is a hello to this incarnation."""
        requests = aiter(request_iterator)
        async with peer_errors("gateway", context):
            hello = await self._hello(await anext(requests, None), context)
            session = GatewaySession(
                Peer(Kind.GATEWAY, f"{hello.gateway}/{next(self._numbers)}"), SendQueue(), asyncio.Event()
            )
            session.outbox.put(RUNNER_TO_GATEWAY.encode(SessionReady(self._runner)))
            self._sessions[session.peer] = session
            self._engine.post(Connected(session.peer, hello))
            log.info("session opened", extra=kv(gateway=hello.gateway))
            try:
                take = partial(self._take, session)
                async for message in serve_stream(requests, context, session.outbox, take, joins=True):
                    yield message
            finally:
                del self._sessions[session.peer]
                self._engine.post(Closed(session.peer))
                session.over.set()
                log.info("session closed", extra=kv(gateway=hello.gateway))

    async def _hello(
        self, first: GatewayToRunner | None, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> SessionHello:
        hello = GATEWAY_TO_RUNNER.decode(first) if first is not None else None
        if not isinstance(hello, SessionHello):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a session is its hello")
        runner = self._runner
        if hello.incarnation != runner.incarnation:
            detail = f"this is incarnation {runner.incarnation} of runner {runner.uuid}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, detail)
        return hello

    def _take(self, session: GatewaySession, envelope: GatewayToRunner) -> None:
        check_backlog(self._engine)
        message = GATEWAY_TO_RUNNER.decode(envelope)
        if isinstance(message, Start):
            log.info("request started", extra=started(message))
            if message.adapter != BASE:
                self._metrics.adapters.name(message.adapter, message.model_name)
        self._engine.post(Received(session.peer, message))

    # ---- from the engine

    def deliver(self, output: Output) -> None:
        """What leaves the engine, on the loop."""
        self._metrics.observe(output)
        if self._tracer is not None:
            for fact in output.facts:
                if isinstance(fact, SequenceEnded):
                    record_spans(self._tracer, fact, self._runner.uuid)
        message: Any
        for peer, message in output.sends:
            if peer.kind is Kind.SUPERVISOR:
                if self.supervisor is not None:
                    self.supervisor.send(message)
                continue
            if isinstance(message, Ended | NoCapacity):
                _log(message)
            if (session := self._sessions.get(peer)) is not None:  # else its sequences are being cancelled
                session.outbox.put(RUNNER_TO_GATEWAY.encode(message))
        if output.status is not None:
            self.status = output.status
            self._first_status.set()
            if output.status.drained:
                self._drained.set()

    # ---- start and end

    async def first_status(self) -> None:
        """Wait until the engine has reported once, or has failed."""
        await self._first_status.wait()

    def on_order(self, order: RunnerOrder) -> None:
        self._draining = order.drain
        if order.desired is not None:
            self._metrics.adapters.hold(order.desired)

    async def drain_and_close(self) -> None:
        """On SIGTERM: sequences move to other runners or are given back, sessions receive Draining and end."""
        self._draining = True
        self._drained.clear()
        self._engine.post(Drain(on=True, migrate_s=MIGRATE_S))
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._drained.wait()
        except TimeoutError:
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
        self._first_status.set()
        for session in self._sessions.values():
            session.outbox.close()

    def not_ready(self) -> str | None:
        """Why `/readyz` says no."""
        if self._draining:
            return "draining"
        return "starting" if self.status is None else self.status.not_ready or None


def check_backlog(engine: Engine) -> None:
    """Before a peer's message is posted. Raises EngineOverloaded."""
    if engine.backlog >= MAX_BACKLOG:
        raise EngineOverloaded(f"{MAX_BACKLOG} events wait for the engine")


def started(start: Start) -> dict[str, dict[str, object]]:
    """A Start's key-values for the log: the request's id as in the gateway's log, the client's own, what will run."""
    return kv(
        request_id=start.request_id, client_request_id=start.client_request_id,
        epoch=f"{start.epoch.term}.{start.epoch.counter}", adapter="base" if start.adapter == BASE else start.adapter,
        prompt_tokens=len(start.prompt), emitted_tokens=len(start.emitted),
    )  # fmt: skip


def _log(message: Ended | NoCapacity) -> None:
    if isinstance(message, Ended):
        fields = kv(request_id=message.request_id, reason=message.reason.value, detail=message.detail)
        log.warning("sequence ended by the runner", extra=fields)
    else:
        fields = kv(request_id=message.request_id, reason=message.reason, free_pages=message.free_pages)
        log.info("no capacity", extra=fields)


def record_spans(tracer: Tracer, ended: SequenceEnded, runner: str) -> None:
    """Record the spans of a sequence that has left, if its request is sampled: where it ended, or moved."""
    start, times = ended.start, ended.times
    scheduled, first = times.scheduled_at, times.first_token_at
    if not start.traceparent:
        return
    about = {
        "gen_ai.request.model": start.model_name,
        "gen_ai.usage.input_tokens": len(start.prompt),
        "gen_ai.usage.output_tokens": ended.answer_tokens - len(start.emitted),
        "weft.request_id": start.request_id,
        "weft.epoch": f"{start.epoch.term}.{start.epoch.counter}",
        "weft.adapter": start.adapter or "base",
        "weft.runner": runner,
        "weft.finish": ended.finish.value if ended.finish else "moved",
    }
    parent = tracer.record("sequence", start.traceparent, times.admitted_at, ended.ended_at, about)
    if times.joined_at is not None and times.joined_at > times.admitted_at:
        tracer.record("adapter_load", parent, times.admitted_at, times.joined_at, {"weft.adapter": start.adapter})
    if scheduled is None:
        return
    tracer.record("prefill", parent, scheduled, first or ended.ended_at)
    if first is not None:
        tracer.record("decode", parent, first, ended.ended_at)

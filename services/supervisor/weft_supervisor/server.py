"""The shell: runner streams, the link to the scheduler, the link to the predictor, one loop around the core."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from sqlalchemy.ext.asyncio import AsyncEngine

from weft.domain.text import quoted
from weft.identities import MAX_TERM
from weft.telemetry.invariants import IdleCheck, InvariantViolated, violation
from weft.telemetry.logs import kv
from weft.wire.bounds import check_hello
from weft.wire.channels import Link, Outbox, both_ways
from weft.wire.errors import PeerError, peer_errors
from weft.wire.gate import peer_names
from weft.wire.roles import pool_namespaces_of
from weft.wire.v1 import common_pb2, predictor_pb2, scheduler_pb2, supervisor_pb2
from weft.wire.v1.predictor_pb2_grpc import PredictorStub
from weft.wire.v1.scheduler_pb2_grpc import SchedulerStub
from weft.wire.v1.supervisor_pb2_grpc import SupervisorServicer
from weft_supervisor import metrics, wire
from weft_supervisor.core.events import (
    Beat,
    Effect,
    EndStream,
    Event,
    Note,
    PersistTerm,
    RunnerId,
    SchedulerDown,
    SchedulerUp,
    SendOrder,
    SendReport,
    TermSeen,
    Tick,
)
from weft_supervisor.core.leases import check_leases
from weft_supervisor.core.supervisor import Supervisor, check_supervisor
from weft_supervisor.errors import NotItsOwn, Superseded
from weft_supervisor.feedback import Journal, Pending, chunks

log = logging.getLogger(__name__)
ToRunner = supervisor_pb2.SupervisorToRunner
DRAIN_S = 2.0
SHOW_EVERY_S = 1.0


@dataclass(slots=True, eq=False)
class RunnerStream:
    """One connection of a runner; nothing is known of it before its hello."""

    namespaces: frozenset[str]  # whose pools it may belong to, by its certificate; none: any
    outbox: Outbox[ToRunner] = field(default_factory=Outbox[ToRunner])
    hello: supervisor_pb2.RunnerHello | None = None
    runner: RunnerId | None = None


class SupervisorServer(SupervisorServicer):
    """Owns the core. Everything runs in one event loop; `handle` is the only way in."""

    def __init__(
        self, core: Supervisor, engine: AsyncEngine, scheduler: grpc.aio.Channel, predictor: grpc.aio.Channel
    ) -> None:
        self.core, self._engine = core, engine
        self.journal = Journal(engine, on_stored=self._stored, on_room=lambda: self.scheduler.renew())
        self.pending = Pending()
        self._keys = scheduler_pb2.Keys()
        self._id = f"supervisor-{time.time_ns():x}"
        self._streams: dict[RunnerId, RunnerStream] = {}
        self._open: set[RunnerStream] = set()
        self._wake, self._closed = asyncio.Event(), asyncio.Event()
        self._idle = IdleCheck()
        self.scheduler: Link[scheduler_pb2.SupervisorToScheduler, scheduler_pb2.SchedulerToSupervisor] = Link(
            "scheduler",
            SchedulerStub(scheduler).Cluster,
            hello=self._hello,
            on_message=self._from_scheduler,
            on_up=lambda: self.handle(SchedulerUp()),
            on_down=lambda _reason: self.handle(SchedulerDown()),
        )
        self.predictor: Link[predictor_pb2.ObserveRequest, predictor_pb2.ObserveAck] = Link(
            "predictor", PredictorStub(predictor).Observe, hello=self.pending.messages, on_message=self._learned
        )

    def handle(self, event: Event) -> None:
        """Let the core decide, and do what it says."""
        if not isinstance(event, Beat | Tick):
            self._idle.active()
        for effect in self.core.handle(event, time.monotonic()):
            self._do(effect)
        self._wake.set()  # the next deadline may have moved

    async def run(self, *, keep_days: int) -> None:
        """Links, writer and timers, until drained or one of them fails."""
        links, writer = (self.scheduler.run(), self.predictor.run()), self.journal.run(keep_days=keep_days)
        async with asyncio.TaskGroup() as tasks:
            for work in (*links, writer, self._tick(), self._show()):
                tasks.create_task(work)

    async def drain(self) -> None:
        """Store what was taken (within `DRAIN_S`; the scheduler tells the rest again), then end streams and `run`."""
        try:
            async with asyncio.timeout(DRAIN_S):
                await self.journal.drained()
        except TimeoutError:
            log.warning("outcomes left unstored: the scheduler keeps them", extra=kv(reason=self.journal.trouble))
        for stream in self._open:
            stream.outbox.close()  # runners reconnect to whoever serves next; their sequences run on
        for part in (self.journal, self.scheduler, self.predictor):
            part.close()
        self._closed.set()
        self._wake.set()

    def set_keys(self, keys: Iterable[scheduler_pb2.KeyRoute]) -> None:
        """The complete list of keys in force, told to the scheduler now and on every new stream."""
        self._keys = scheduler_pb2.Keys(keys=keys)
        self.scheduler.send(scheduler_pb2.SupervisorToScheduler(keys=self._keys))

    def _stored(self, batch: Sequence[common_pb2.Outcome]) -> None:
        """Committed: the scheduler may forget them, the predictor learns them.

        Repeats are passed on too (a crash may have come between commit and feedback); the predictor knows their ids.
        """
        ack = scheduler_pb2.OutcomeAck(request_ids=[outcome.request_id for outcome in batch])
        self.scheduler.send(scheduler_pb2.SupervisorToScheduler(outcome_ack=ack))
        self.pending.add(batch)
        for message in chunks(batch):
            self.predictor.send(message)

    # ---------------------------------------------------------------------------------------------- runners

    async def Runner(  # noqa: N802 (the contract's name)
        self,
        request_iterator: AsyncIterator[supervisor_pb2.RunnerToSupervisor],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[ToRunner]:
        stream = RunnerStream(pool_namespaces_of(peer_names(context)))
        self._open.add(stream)
        try:
            async with peer_errors("runner", context):
                async for message in both_ways(
                    request_iterator, context, stream.outbox, lambda message: self._from_runner(stream, message)
                ):
                    yield message
        finally:
            self._open.discard(stream)
            if stream.runner and self._streams.get(stream.runner) is stream:
                del self._streams[stream.runner]  # the lease runs on: the runner may be back within it

    def _from_runner(self, stream: RunnerStream, message: supervisor_pb2.RunnerToSupervisor) -> None:
        kind = message.WhichOneof("message")
        if kind == "hello":
            self._runner_up(stream, message.hello)
            return
        if stream.hello is None or stream.runner is None:
            raise PeerError(f"{kind or 'an empty message'} before the hello")
        if kind == "state":
            self.handle(wire.report(stream.runner, stream.hello, message.state))
        elif kind == "heartbeat":
            self.handle(Beat(stream.runner))

    def _runner_up(self, stream: RunnerStream, hello: supervisor_pb2.RunnerHello) -> None:
        if stream.hello is not None:
            raise PeerError("a runner says hello once in a stream")
        check_hello(hello)
        runner = wire.runner_id(hello.runner)
        if stream.namespaces:
            _check_identity(hello, stream.namespaces)
        if self.core.leases.replaced(runner):
            raise Superseded(f"runner {runner.uuid} has a newer incarnation than {runner.incarnation}")
        if (older := self._streams.get(runner)) is not None:
            older.outbox.close()
        stream.hello, stream.runner = hello, runner
        self._streams[runner] = stream
        config = self.core.config
        registered = supervisor_pb2.Registered(
            lease_ms=round(config.lease_s * 1000), report_ms=round(config.report_s * 1000)
        )
        stream.outbox.put(ToRunner(registered=registered))
        self.handle(wire.runner_up(hello))

    # ---------------------------------------------------------------------------------------------- scheduler

    def _hello(self) -> list[scheduler_pb2.SupervisorToScheduler]:
        hello = scheduler_pb2.SupervisorHello(supervisor_id=self._id, highest_term=self.core.highest_term)
        return [
            scheduler_pb2.SupervisorToScheduler(hello=hello),
            scheduler_pb2.SupervisorToScheduler(keys=self._keys),
        ]

    def _from_scheduler(self, message: scheduler_pb2.SchedulerToSupervisor) -> None:
        match message.WhichOneof("message"):
            case "hello":
                self.handle(TermSeen(min(message.hello.term, MAX_TERM - 1)))
            case "orders":
                self.handle(wire.order_given(message.orders))
            case "outcome":
                self.journal.put(message.outcome)  # refused when full: the journal asks for a new stream later
            case _:
                log.warning("unknown message from the scheduler: ignored")

    def _learned(self, ack: predictor_pb2.ObserveAck) -> None:
        self.pending.acknowledge(ack)

    # ---------------------------------------------------------------------------------------------- effects, time

    def _do(self, effect: Effect) -> None:
        match effect:
            case SendReport():
                for message in wire.cluster_reports(effect):
                    self.scheduler.send(message)
            case SendOrder():
                if stream := self._streams.get(effect.runner):
                    stream.outbox.put(wire.order(effect))
            case EndStream():
                if stream := self._streams.pop(effect.runner, None):
                    stream.outbox.close()
            case PersistTerm():
                self.journal.raise_term(effect.term)
            case Note():
                runner = f"{effect.runner.uuid}/{effect.runner.incarnation}"
                log.info(effect.text, extra=kv(runner=runner, **dict(effect.fields)))

    async def _tick(self) -> None:
        while not self._closed.is_set():
            deadline = self.core.next_deadline()
            self._wake.clear()
            try:
                async with asyncio.timeout(None if deadline is None else max(deadline - time.monotonic(), 0.0)):
                    await self._wake.wait()
            except TimeoutError:
                self.handle(Tick())

    def _check(self) -> None:
        """Leases decide who is alive, and runners tell theirs to the next process. Raises InvariantViolated."""
        broken = violation(check_leases, self.core.leases) or violation(check_supervisor, self.core)
        if broken:
            raise InvariantViolated(broken)

    async def _show(self) -> None:
        shown = self.core.counters()
        while not self._closed.is_set():
            shown = metrics.show(self.core, shown)
            metrics.FEEDBACK_PENDING.set(len(self.pending))
            if self._idle.due():
                self._check()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), SHOW_EVERY_S)


def _check_identity(hello: supervisor_pb2.RunnerHello, namespaces: frozenset[str]) -> None:
    """A runner's uuid begins with the namespace of its pool, so nobody else's certificate can name it. NotItsOwn."""
    mine = f"the certificate is for runners of namespace {', '.join(sorted(namespaces))}"
    namespace = hello.pool.partition("/")[0]
    if namespace not in namespaces:
        raise NotItsOwn(f"{mine}, not of pool {quoted(hello.pool)}")
    if not hello.runner.uuid.startswith(f"{namespace}."):
        raise NotItsOwn(f"{mine}: uuid {quoted(hello.runner.uuid)} does not begin with {quoted(namespace + '.')}")

"""The shell: runner streams and the links to scheduler and predictor, in a loop around the machine."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio
from sqlalchemy.ext.asyncio import AsyncEngine

from weft.domain.machine import Close, Closed, Connected, Kind, Peer, PersistTerm, Received, Send, Tick
from weft.domain.request import OutcomeAck, OutcomeReport
from weft.domain.routes import KeyRoute, Keys, KeysConfirmed
from weft.domain.runner import ClusterReport, Heartbeat, RunnerSpec, SupervisorHello
from weft.domain.text import quoted
from weft.machine_shell import MachineShell
from weft.telemetry.invariants import InvariantViolated
from weft.telemetry.logs import kv
from weft.wire.auth_interceptor import peer_names
from weft.wire.codec.cluster import (
    RUNNER_TO_SUPERVISOR,
    SCHEDULER_TO_SUPERVISOR,
    SUPERVISOR_TO_RUNNER,
    SUPERVISOR_TO_SCHEDULER,
)
from weft.wire.errors import PeerError, peer_errors, report_peer_error
from weft.wire.roles import pool_namespaces_of
from weft.wire.streams import ClientStream, Opener, SendQueue, serve_stream
from weft.wire.v1 import predictor_pb2, scheduler_pb2, supervisor_pb2
from weft.wire.v1.predictor_pb2_grpc import PredictorStub
from weft.wire.v1.scheduler_pb2_grpc import SchedulerStub
from weft.wire.v1.supervisor_pb2_grpc import SupervisorServicer
from weft_supervisor import metrics
from weft_supervisor.core.supervisor import Effect, LogEvent, Supervisor, runner_peer
from weft_supervisor.outcome_writer import OutcomeWriter, UnackedFeedback, chunks

log = logging.getLogger(__name__)
DRAIN_S = 2.0
UPDATE_EVERY_S = 1.0
MAX_MESSAGE_BYTES = 32 << 20  # reports' bytes in a message to the scheduler; gRPC takes 64 MiB
MAX_STREAMS = 2_000  # per certificate: all runners of a namespace share it
HELLOS_PER_S, HELLO_BURST = 20.0, 4_000.0  # per certificate: all its runners may reconnect at once, twice
REPORTS_PER_S, REPORT_BURST = 500.0, 1_000.0  # per stream: 20 a second, and a report for each step that ends a sequence
SCHEDULER = Peer(Kind.SCHEDULER, "scheduler")


class NotItsOwn(PeerError):
    """A runner's certificate is for another namespace."""

    code = grpc.StatusCode.PERMISSION_DENIED


class ReplacedIncarnation(PeerError):
    """A newer incarnation of this runner's uuid is registered."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class TooMany(PeerError):
    """A certificate has reached its limit of streams or hellos."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Rate:
    """A token bucket."""

    def __init__(self, per_s: float, burst: float) -> None:
        self.per_s, self.burst, self._tokens, self._at = per_s, burst, burst, 0.0

    def take(self, now: float) -> float:
        """Take a token. Return the seconds until the bucket is out of debt; 0 if it had a token."""
        self._tokens = max(-1.0, min(self.burst, self._tokens + (now - self._at) * self.per_s) - 1)
        self._at = now
        return max(0.0, -self._tokens / self.per_s)


@dataclass(slots=True, eq=False)
class RunnerStream:
    """A connection of a runner, unidentified until its hello."""

    namespaces: frozenset[str]  # namespaces of its possible pools, by its certificate; empty: any
    outbox: SendQueue[Any] = field(default_factory=SendQueue[Any])
    reports: Rate = field(default_factory=lambda: Rate(REPORTS_PER_S, REPORT_BURST))
    spec: RunnerSpec | None = None
    peer: Peer | None = None
    refusal: str | None = None


class SupervisorServer(SupervisorServicer):
    """The shell that owns the machine. Everything runs in an event loop; `handle` is the only entry."""

    def __init__(
        self, core: Supervisor, engine: AsyncEngine, scheduler: grpc.aio.Channel, predictor: grpc.aio.Channel
    ) -> None:
        self.core, self._engine = core, engine
        self.writer = OutcomeWriter(
            engine,
            on_stored=self._stored,
            on_dropped=lambda request_id: self.scheduler.send(OutcomeAck((request_id,))),
            on_space=lambda: self.scheduler.reconnect(),
        )
        self.feedback = UnackedFeedback()
        metrics.FEEDBACK_PENDING.set_function(self.feedback.__len__)
        self._keys, self._counters = Keys(()), core.counters()
        self._id = f"supervisor-{time.time_ns():x}"
        self._streams: dict[Peer, RunnerStream] = {}
        self._open: set[RunnerStream] = set()
        self._streams_of: Counter[frozenset[str]] = Counter()
        self._hellos_of: dict[frozenset[str], Rate] = {}  # an entry for each certificate
        self._speaking: RunnerStream | None = None  # the sender of the message being handled
        self._closed = asyncio.Event()
        self._shell = MachineShell(core, self._perform, quiet=(Tick, Heartbeat), on_failure=self._closed.set)
        self.handle = self._shell.feed
        self._cluster: Opener = SchedulerStub(scheduler).Cluster
        self.scheduler: ClientStream[Any, scheduler_pb2.SchedulerToSupervisor] = ClientStream(
            "scheduler",
            self._open_cluster,
            hello=lambda: (SupervisorHello(self._id, self.core.highest_term), self._keys),
            on_message=self._from_scheduler,
            on_up=lambda: self.handle(Connected(SCHEDULER)),
            on_down=lambda reason: self.handle(Closed(SCHEDULER, reason)),
        )
        self.predictor: ClientStream[predictor_pb2.ObserveRequest, predictor_pb2.ObserveAck] = ClientStream(
            "predictor",
            PredictorStub(predictor).Observe,
            hello=self.feedback.messages,
            on_message=lambda ack: self.feedback.acknowledge(ack.request_ids),
        )

    async def run(self) -> None:
        """Run links, writer and metrics until drained, or until a link, the writer or the machine fails."""
        async with asyncio.TaskGroup() as tasks:
            for work in (self.scheduler.run(), self.predictor.run(), self.writer.run(), self._watch_machine()):
                tasks.create_task(work)

    async def drain(self) -> None:
        """Store the outcomes taken (within `DRAIN_S`; the scheduler sends the rest again), then end streams and
        `run`."""
        try:
            async with asyncio.timeout(DRAIN_S):
                await self.writer.drained()
        except TimeoutError:
            log.warning("outcomes left unstored: the scheduler keeps them", extra=kv(reason=self.writer.trouble))
        for stream in self._open:
            stream.outbox.close()  # runners reconnect to the next supervisor; their sequences run on
        for part in (self.writer, self.scheduler, self.predictor, self._shell):
            part.close()
        self._closed.set()

    def set_keys(self, keys: Sequence[KeyRoute], version: int) -> None:
        """Set the complete list of keys in force, for the scheduler now and on every new stream."""
        self._keys = Keys(tuple(keys), version)
        self.scheduler.send(self._keys)

    def confirm_keys(self) -> None:
        """Confirm that the store still has the keys sent last."""
        self.scheduler.send(KeysConfirmed(self._keys.version))

    def _stored(self, batch: Sequence[OutcomeReport]) -> None:
        """Report a committed batch: the scheduler may forget it, and the predictor learns it.

        Repeats are passed on too (a crash may have come between commit and feedback); the predictor knows their ids.
        """
        self.scheduler.send(OutcomeAck(tuple([outcome.request_id for outcome in batch])))
        self.feedback.add(batch)
        for message in chunks([outcome.record for outcome in batch]):
            self.predictor.send(message)

    # ---------------------------------------------------------------------------------------------- runners

    async def Runner(  # noqa: N802 (the contract's name)
        self,
        request_iterator: AsyncIterator[supervisor_pb2.RunnerToSupervisor],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[supervisor_pb2.SupervisorToRunner]:
        stream = RunnerStream(pool_namespaces_of(peer_names(context)))
        self._open.add(stream)
        self._streams_of[stream.namespaces] += 1
        try:
            async with peer_errors("runner", context):
                if stream.namespaces and self._streams_of[stream.namespaces] > MAX_STREAMS:
                    raise TooMany(f"more than {MAX_STREAMS} streams with the same certificate")
                messages = _paced(request_iterator, stream.reports)
                on_message = partial(self._from_runner, stream)
                async for message in serve_stream(messages, context, stream.outbox, on_message):
                    yield SUPERVISOR_TO_RUNNER.encode(message)
        finally:
            self._open.discard(stream)
            self._streams_of[stream.namespaces] -= 1
            if stream.peer and self._streams.get(stream.peer) is stream:
                del self._streams[stream.peer]
                self.handle(Closed(stream.peer))

    def _from_runner(self, stream: RunnerStream, envelope: supervisor_pb2.RunnerToSupervisor) -> None:
        message = RUNNER_TO_SUPERVISOR.decode(envelope)
        if isinstance(message, RunnerSpec):
            event = self._hello(stream, message)
        elif stream.peer is None:
            raise PeerError(f"{envelope.WhichOneof('message')} before the hello")
        else:
            event = Received(stream.peer, message)
        self._speaking = stream
        try:
            self.handle(event)
        finally:
            self._speaking = None
        if stream.refusal is not None:
            raise PeerError(stream.refusal)

    def _hello(self, stream: RunnerStream, spec: RunnerSpec) -> Connected:
        if stream.spec is not None:
            raise PeerError("a runner sends one hello in a stream")
        if "/" in spec.runner.uuid:
            raise PeerError(f"uuid {quoted(spec.runner.uuid)} has a slash")
        if stream.namespaces:
            _check_identity(spec, stream.namespaces)
            rate = self._hellos_of.setdefault(stream.namespaces, Rate(HELLOS_PER_S, HELLO_BURST))
            if rate.take(time.monotonic()):
                raise TooMany(f"more than {HELLOS_PER_S:.0f} hellos a second with the same certificate")
        if self.core.leases.replaced(spec.runner):
            raise ReplacedIncarnation(
                f"runner {spec.runner.uuid} has a newer incarnation than {spec.runner.incarnation}"
            )
        stream.spec, stream.peer = spec, runner_peer(spec.runner)
        if (older := self._streams.get(stream.peer)) is not None:
            older.outbox.close()
        self._streams[stream.peer] = stream
        return Connected(stream.peer, spec)

    # ---------------------------------------------------------------------------------------------- scheduler

    def _from_scheduler(self, envelope: scheduler_pb2.SchedulerToSupervisor) -> None:
        message = SCHEDULER_TO_SUPERVISOR.decode(envelope)
        if isinstance(message, OutcomeReport):
            self.writer.put(message)  # refused when full: the writer asks for a new stream later
        else:
            self.handle(Received(SCHEDULER, message))

    def _open_cluster(self, messages: Any, /, *, metadata: Any = None) -> Any:
        return self._cluster(self._encoded(messages), metadata=metadata)

    async def _encoded(self, messages: AsyncIterable[Any]) -> AsyncIterator[scheduler_pb2.SupervisorToScheduler]:
        """Encode each message when gRPC asks for it, so that full reports of many runners do not block the loop."""
        async for message in messages:
            for envelope in self._envelopes(message):
                yield envelope

    def _envelopes(self, message: Any) -> Iterator[scheduler_pb2.SupervisorToScheduler]:
        """Yield an envelope, or several for a large report; losses and decisions come last."""
        envelope = SUPERVISOR_TO_SCHEDULER.encode(message)
        if not (isinstance(message, ClusterReport) and message.reports and envelope.ByteSize() > MAX_MESSAGE_BYTES):
            yield envelope
            return
        half = len(message.reports) // 2
        if half:
            yield from self._envelopes(ClusterReport(message.reports[:half]))
        else:
            runner = message.reports[0].runner
            report_peer_error("runner", PeerError("full report too large for a message"), runner=runner.uuid)
        yield from self._envelopes(ClusterReport(message.reports[max(half, 1) :], message.lost, message.preempts))

    # ---------------------------------------------------------------------------------------------- effects, time

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send():
                if effect.peer == SCHEDULER:
                    self.scheduler.send(effect.message)
                elif (stream := self._streams.get(effect.peer)) is not None:
                    stream.outbox.put(effect.message)
            case Close():
                if (stream := self._streams.pop(effect.peer, None)) is None:
                    return
                if stream is self._speaking:
                    stream.refusal = effect.reason  # the refusal answers the runner's current message
                stream.outbox.close()
            case PersistTerm():
                self.writer.raise_term(effect.term)
            case LogEvent():
                runner = f"{effect.runner.uuid}/{effect.runner.incarnation}"
                log.info(effect.text, extra=kv(runner=runner, **dict(effect.fields)))

    async def _watch_machine(self) -> None:
        """Keep metrics and checks up to date until closed, or until the machine fails."""
        self._shell.observe_after(UPDATE_EVERY_S, self._observe)
        await self._closed.wait()
        if self._shell.failure is not None:
            raise self._shell.failure

    def _observe(self) -> None:
        self._counters = metrics.update(self.core, self._counters)
        if broken := self._shell.check_idle():
            # Leases decide which runners live: the next process hears of all of them anew.
            self._shell.fail(InvariantViolated(broken))


async def _paced(messages: AsyncIterator[Any], rate: Rate) -> AsyncIterator[Any]:
    """Read no faster than the rate: gRPC's flow control slows the sender down."""
    async for message in messages:
        if wait_s := rate.take(time.monotonic()):
            await asyncio.sleep(wait_s)
        yield message


def _check_identity(spec: RunnerSpec, namespaces: frozenset[str]) -> None:
    """Check that a runner's uuid begins with the namespace of its pool: another certificate then cannot name it. Raises
    NotItsOwn."""
    mine = f"the certificate is for runners of namespace {', '.join(sorted(namespaces))}"
    namespace = spec.pool.partition("/")[0]
    if namespace not in namespaces:
        raise NotItsOwn(f"{mine}, not of pool {quoted(spec.pool)}")
    if not spec.runner.uuid.startswith(f"{namespace}."):
        raise NotItsOwn(f"{mine}: uuid {quoted(spec.runner.uuid)} does not begin with {quoted(namespace + '.')}")

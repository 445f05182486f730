"""The shell: three stream servicers around one pure machine, one event loop, one timer. No work per token, ever.

Crash-only: an exception out of the machine, or a term that cannot be made durable, ends the process; the next one is
sent again what this one knew. A peer that breaks its contract, or does not read fast enough, loses its stream and
nothing else ends; its next hello repairs it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio

from weft.domain.machine import Close, Kind, PersistTerm, Received, Send
from weft.domain.request import Reject, Submit
from weft.leadership.errors import LeadershipLost
from weft.leadership.standby import Turn
from weft.machine_shell import MachineShell
from weft.telemetry.invariants import InvariantViolated
from weft.telemetry.logs import kv
from weft.telemetry.tracing import Tracer
from weft.wire.errors import peer_errors
from weft.wire.streams import serve_stream
from weft.wire.v1 import scheduler_pb2 as pb
from weft.wire.v1 import scheduler_pb2_grpc as rpc
from weft_scheduler.core import effects
from weft_scheduler.core.check import OWNERSHIP, size
from weft_scheduler.core.config import SchedulerConfig
from weft_scheduler.core.effects import Effect, Event
from weft_scheduler.core.scheduler import Scheduler
from weft_scheduler.errors import SupersededRegistry
from weft_scheduler.metrics import SchedulerMetrics
from weft_scheduler.queue_spans import QueueSpans
from weft_scheduler.sessions import Session, Sessions
from weft_scheduler.term_file import TermFile

SERVICE = "weft.v1.Scheduler"
GAUGES_S = 1.0  # age that a gauge may have, and time in which nothing happens before the state is checked
MAX_CHECKED = 20_000  # maximum `size` of a checked state: checking more would delay the next request by over 50 ms
log = logging.getLogger(__name__)


class Server(rpc.SchedulerServicer):
    """The service: feeds the machine and executes its effects in order."""

    def __init__(
        self,
        config: SchedulerConfig,
        terms: TermFile,
        stop: asyncio.Event,
        *,
        turn: Turn | None = None,
        metrics: SchedulerMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
    ) -> None:
        """Take the next term. `stop` is set when the process must not go on.

        Once `turn` is lost the server decides nothing more. Raises TermNotDurable.
        """
        self._turn = turn or Turn()
        self._terms, self._stop = terms, stop
        self._metrics = metrics or SchedulerMetrics()
        term = terms.next(self._turn.term)
        self.core = Scheduler(config, term)
        self._shell = MachineShell(self.core, self._perform, clock=clock, handle=self._handle, on_failure=self._end)
        self._spans = QueueSpans(tracer, clock) if tracer else None
        self._sessions = Sessions()
        self._registries = 0
        log.info("term taken", extra=kv(term=term))

    # ------------------------------------------------------------ process

    @property
    def failure(self) -> Exception | None:
        """Failure that ends this process."""
        return self._shell.failure

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to a server of the running loop."""
        rpc.add_SchedulerServicer_to_server(self, server)
        self._shell.observe_after(GAUGES_S, self._observe)

    def not_ready(self) -> str | None:
        """Return why the server is not ready; None once a registry snapshot and a supervisor are there."""
        if not self.core.state.registry.is_known:
            return "no registry snapshot yet"
        return None if self.core.state.supervisors else "no supervisor connected"

    async def drain(self) -> None:
        """End every stream (gRPC does not inform streams of a shutdown): peers keep what they hold and come again."""
        self._sessions.close_all()

    def close(self) -> None:
        """Cancel the timers."""
        self._shell.close()

    # ------------------------------------------------------------ streams

    async def Gateway(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.SchedulerToGateway]:  # noqa: N802
        session = Session(Kind.GATEWAY, self._sessions, self.feed)
        async for message in _serve_stream(request_iterator, context, session, "gateway"):
            yield message

    async def Cluster(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.SchedulerToSupervisor]:  # noqa: N802
        max_outcomes = self.core.config.max_outcomes
        session = Session(Kind.SUPERVISOR, self._sessions, self.feed, max_outcomes=max_outcomes)
        async for message in _serve_stream(request_iterator, context, session, "supervisor"):
            yield message

    async def Registry(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.SchedulerToRegistry]:  # noqa: N802
        self._registries += 1
        session = Session(Kind.REGISTRY, self._sessions, self.feed, name=f"registry-{self._registries}")
        async for message in _serve_stream(request_iterator, context, session, "registry"):
            yield message
        if session.close_reason:
            async with peer_errors("registry", context):
                raise SupersededRegistry(session.close_reason)

    # ------------------------------------------------------------ the machine

    def feed(self, event: Event) -> None:
        """Feed the machine an event. What it or an effect raises is fatal: the process ends with it."""
        try:
            self._shell.feed(event)
        except Exception as error:
            self._shell.fail(error)
            raise

    def _handle(self, event: Event, now: float) -> Sequence[Effect]:
        """Return the effects of an event, in this process's turn."""
        self._turn.require()
        if self._spans is not None and isinstance(event, Received):
            self._spans.received(event.message)
        submit = isinstance(event, Received) and isinstance(event.message, Submit)
        with self._metrics.placement.time() if submit else contextlib.nullcontext():
            return self.core.handle(event, now)

    def _observe(self) -> None:
        self._metrics.observe(self.core.state)
        broken = self._shell.check_idle() if size(self.core.state) <= MAX_CHECKED else None
        if broken in OWNERSHIP:  # it has to be beyond doubt; wrong accounts only place badly
            self._shell.fail(InvariantViolated(broken))

    def _end(self) -> None:
        """End the process; peers send the next one everything again, and no request is migrated."""
        if not isinstance(self.failure, LeadershipLost | InvariantViolated):
            log.error("fatal: the process ends", exc_info=self.failure, extra=kv(reason=self.failure))
        self._stop.set()

    def _perform(self, effect: Effect) -> None:
        self._metrics.count(effect)
        match effect:
            case Send():
                self._sessions.send(effect.peer, effect.message)
                if self._spans is not None:
                    self._spans.sent(effect.message)
                if isinstance(effect.message, Reject):
                    reject = effect.message
                    about = kv(request_id=reject.request_id, reason=reject.reason.value, detail=reject.message)
                    log.info("request rejected", extra=about)
            case Close():
                self._sessions.close(effect.peer, effect.reason)
            case PersistTerm():
                self._terms.write(effect.term)
                log.info("term raised", extra=kv(term=effect.term))
            case _:
                _log(effect)


async def _serve_stream(requests: Any, context: Any, session: Session, kind: str) -> AsyncIterator[Any]:
    """Yield the messages of one stream to its end."""
    about = kv(kind=kind, peer=context.peer())  # now: asking a call that is over crashes the interpreter (grpcio 1.85)
    log.info("stream opened", extra=about)
    async with peer_errors(kind, context):
        try:
            joins = kind == "supervisor"
            async for message in serve_stream(requests, context, session.outbox, session.on_message, joins=joins):
                yield message
        finally:
            session.on_close()
            log.info("stream ended", extra=about)


def _log(effect: Effect) -> None:
    match effect:
        case effects.Queued() | effects.Requeued():
            about = kv(request_id=effect.request_id, pool=effect.pool, reason=effect.reason)
            if isinstance(effect, effects.Requeued):
                log.info("request queued again", extra=about)
            else:
                log.debug("request queued", extra=about)
        case effects.Resumed():
            old_class, now = effect.from_class, effect.to_class
            about = kv(request_id=effect.request_id, runner=effect.runner.uuid, from_class=old_class, to_class=now)
            log.log(logging.DEBUG if old_class == now else logging.INFO, "request resumed at a runner", extra=about)
        case effects.Consolidated():
            about = kv(pool=effect.pool, runner=effect.runner.uuid, requests=len(effect.request_ids))
            log.info("lightly loaded runner emptied", extra=about)
        case effects.BatchPreempted():
            about = kv(pool=effect.pool, runner=effect.runner.uuid, requests=len(effect.request_ids))
            log.info("batch requests leave for interactive ones", extra=about)
        case effects.SequencesParked():
            about = kv(request_id=effect.request_id, runner=effect.runner.uuid, sequences=len(effect.parks))
            log.debug("sequences parked for a tenant within its share", extra=about)
        case effects.RoleChanged():
            about = kv(pool=effect.pool, runner=effect.runner.uuid, role=effect.role, reason=effect.reason)
            log.info("role of a runner changed", extra=about)
        case effects.RunnerDoubted():
            about = kv(runner=effect.runner.uuid, reason=effect.reason)
            log.warning("runner not reported: its gateways say whether it is there", extra=about)
        case effects.RunnerLost():
            log.info("runner lost", extra=kv(runner=effect.runner.uuid, reason=effect.reason))
        case effects.Stale():
            log.debug("stale event", extra=kv(event=effect.event, subject=effect.subject, reason=effect.reason))
        case _:
            pass  # counted

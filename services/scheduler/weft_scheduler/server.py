"""The shell: three stream servicers around one pure machine, one event loop, one timer. No work per token, ever.

Crash-only: an exception out of the machine, or a term that cannot be made durable, ends the process; what it knew is
told again to the next one. A peer that breaks its contract, or does not read fast enough, loses its stream and nothing
else ends; its next hello repairs it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc.aio

from weft.telemetry.invariants import IdleCheck, InvariantViolated, violation
from weft.telemetry.logs import kv
from weft.wire.channels import Outbox, both_ways
from weft.wire.errors import peer_errors
from weft.wire.v1 import scheduler_pb2 as pb
from weft.wire.v1 import scheduler_pb2_grpc as rpc
from weft_scheduler import wire
from weft_scheduler.core import effects as ef
from weft_scheduler.core import events as ev
from weft_scheduler.core.invariants import OWNERSHIP, check_all, size
from weft_scheduler.core.scheduler import Scheduler
from weft_scheduler.core.values import Config
from weft_scheduler.errors import Superseded
from weft_scheduler.metrics import Metrics
from weft_scheduler.streams import GatewayStream, Leadership, Peers, RegistryStream, Stream, SupervisorStream
from weft_scheduler.term import TermFile

SERVICE = "weft.v1.Scheduler"
GAUGES_S = 1.0  # how old a gauge may be, and how long nothing happens before the state is checked
MAX_CHECKED = 20_000  # in `size` of the state: checking more would delay the next request by over 50 ms
In = TypeVar("In")
Out = TypeVar("Out")
log = logging.getLogger(__name__)


class Server(rpc.SchedulerServicer):
    """Feeds the machine and executes what it orders, in order."""

    def __init__(
        self,
        config: Config,
        terms: TermFile,
        stop: asyncio.Event,
        *,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the next term. Raises TermNotDurable. `stop` is set when the process must not go on."""
        self._terms, self._stop, self._clock = terms, stop, clock
        self._metrics = metrics or Metrics()
        term = terms.next()
        self.core = Scheduler(config, term)
        self.failure: Exception | None = None
        self._max_outcomes = config.max_outcomes
        self._gateways: Peers[pb.SchedulerToGateway] = Peers()
        self._supervisors: Peers[pb.SchedulerToSupervisor] = Peers()
        self._registries: Peers[pb.SchedulerToRegistry] = Peers()
        self._registry_streams = 0
        self._leadership = Leadership()
        self._idle = IdleCheck()
        self._timer: asyncio.TimerHandle | None = None
        self._gauges: asyncio.TimerHandle | None = None
        log.info("term taken", extra=kv(term=term))

    # ------------------------------------------------------------ life

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to a server of the running loop."""
        rpc.add_SchedulerServicer_to_server(self, server)
        self._observe()

    def not_ready(self) -> str | None:
        """None once a registry snapshot and a supervisor are there."""
        if not self.core.state.registry_known:
            return "no registry snapshot yet"
        return None if self.core.state.supervisors else "no supervisor connected"

    async def drain(self) -> None:
        """End every stream (gRPC does not tell streams of a shutdown): peers keep what they hold and come again."""
        for peers in (self._gateways, self._supervisors, self._registries):
            peers.close()

    def close(self) -> None:
        """No more timers."""
        for timer in (self._timer, self._gauges):
            if timer is not None:
                timer.cancel()

    # ------------------------------------------------------------ streams

    async def Gateway(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.SchedulerToGateway]:  # noqa: N802
        stream = GatewayStream(self._gateways, self.feed)
        async for message in _converse(request_iterator, context, stream.outbox, stream, "gateway"):
            yield message

    async def Cluster(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.SchedulerToSupervisor]:  # noqa: N802
        stream = SupervisorStream(self._supervisors, self.feed, self._max_outcomes)
        async for message in _converse(request_iterator, context, stream.outbox, stream, "supervisor"):
            yield message

    async def Registry(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.SchedulerToRegistry]:  # noqa: N802
        self._registry_streams += 1
        name = f"registry-{self._registry_streams}"
        stream = RegistryStream(self._registries, self.feed, self._leadership, name)
        async for message in _converse(request_iterator, context, stream.outbox, stream, "registry", stream.over):
            yield message

    # ------------------------------------------------------------ the machine

    def feed(self, event: ev.Event) -> None:
        """One event through the machine."""
        if isinstance(event, ev.Submit):
            with self._metrics.placement.time():
                effects = self._guarded(lambda: self.core.handle(event, self._clock()))
        else:
            effects = self._guarded(lambda: self.core.handle(event, self._clock()))
        self._perform(effects)

    def _tick(self) -> None:
        self._timer = None
        self._perform(self._guarded(lambda: self.core.tick(self._clock())))

    def _perform(self, effects: list[ef.Effect]) -> None:
        for effect in effects:
            self._metrics.count(effect)
            self._guarded(lambda effect=effect: self._execute(effect))
        self._set_timer()

    def _guarded(self, step: Callable[[], Any]) -> Any:
        """A step of the machine. What it raises is fatal: the process ends with it."""
        if self.failure is not None:
            raise self.failure
        self._idle.active()
        try:
            return step()
        except Exception as error:
            log.exception("fatal: the process ends", extra=kv(reason=error))
            self._fail(error)
            raise

    def _set_timer(self) -> None:
        """One timer, never later than the next deadline; one that fires early finds nothing due and is set again."""
        deadline = self.core.next_deadline()
        if deadline is None:
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + max(0.0, deadline - self._clock())
        if self._timer is None or self._timer.when() > when:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(when, self._tick)

    def _observe(self) -> None:
        self._metrics.observe(self.core.state)
        if self._idle.due() and size(self.core.state) <= MAX_CHECKED:
            self._check()
        self._gauges = asyncio.get_running_loop().call_later(GAUGES_S, self._observe)

    def _check(self) -> None:
        """Between two events. Who owns a request has to be beyond doubt; accounts that are wrong only place badly."""
        broken = violation(check_all, self.core.context)
        if broken in OWNERSHIP:
            self._fail(InvariantViolated(broken))

    def _fail(self, error: Exception) -> None:
        """The process ends with this; the next one is told everything again, and nobody moves."""
        self.failure = error
        self._stop.set()

    def _execute(self, effect: ef.Effect) -> None:
        match effect:
            case ef.Assign() | ef.Preempt() | ef.SendRoutes() | ef.TellGone() | ef.AckOutcomes():
                self._gateways.send(effect.gateway, wire.to_gateway(effect))
            case ef.Reject():
                self._gateways.send(effect.gateway, wire.to_gateway(effect))
                _log(effect)
            case ef.HangUp():
                self._gateways.hang_up(effect.gateway)
            case ef.Order() | ef.ForwardOutcome() | ef.TellTerm():
                self._supervisors.send(effect.supervisor, wire.to_supervisor(effect))
            case ef.PoolStatus() | ef.AdapterStatus():
                self._registries.send_all(wire.to_registry(effect))
            case ef.RaiseTerm():
                self._terms.write(effect.term)
                log.info("term raised", extra=kv(term=effect.term))
            case ef.Queued() | ef.Requeued() | ef.Resumed() | ef.Ignored() | ef.RunnerEnded():
                _log(effect)


async def _converse(
    requests: AsyncIterator[In],
    context: Any,
    outbox: Outbox[Out],
    stream: Stream[In],
    kind: str,
    over: Callable[[], str | None] = lambda: None,
) -> AsyncIterator[Out]:
    """One stream to its end; `over`: another leads."""
    about = kv(kind=kind, peer=context.peer())  # now: asking a call that is over crashes the interpreter (grpcio 1.85)
    log.info("stream opened", extra=about)
    async with peer_errors(kind, context):
        try:
            async for message in both_ways(requests, context, outbox, stream.heard):
                yield message
            if (reason := over()) is not None:
                raise Superseded(reason)
        finally:
            stream.ended()  # before its end is told
            log.info("stream ended", extra=about)


def _log(effect: ef.Reject | ef.Queued | ef.Requeued | ef.Resumed | ef.Ignored | ef.RunnerEnded) -> None:
    match effect:
        case ef.Reject():
            pairs = kv(request_id=effect.request_id, reason=effect.reason.value, detail=effect.message)
            log.info("request rejected", extra=pairs)
        case ef.Requeued():
            log.info(
                "request queued again", extra=kv(request_id=effect.request_id, pool=effect.pool, reason=effect.reason)
            )
        case ef.Resumed():
            about = kv(
                request_id=effect.request_id,
                runner=effect.runner.uuid,
                from_class=effect.from_class,
                to_class=effect.to_class,
            )
            across = effect.from_class != effect.to_class
            log.log(logging.INFO if across else logging.DEBUG, "request goes on at a runner", extra=about)
        case ef.RunnerEnded():
            log.info("runner ended", extra=kv(runner=effect.runner.uuid, reason=effect.reason))
        case ef.Queued():
            log.debug("request queued", extra=kv(request_id=effect.request_id, pool=effect.pool, reason=effect.reason))
        case ef.Ignored():
            log.debug("event ignored", extra=kv(event=effect.what, request_id=effect.request_id, reason=effect.reason))

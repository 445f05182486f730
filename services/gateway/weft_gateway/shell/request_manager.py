"""The shell around the gateway's machine: it feeds events and performs effects.

Everything happens in callbacks of one event loop and never blocks, so a message is handled whole before the next one. A
step wakes a request at most once; what a slow client has not read yet gathers into the next chunk.
"""

import asyncio
import gc
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import cast

from prometheus_client import REGISTRY, CollectorRegistry

from weft.domain.fleet import FleetQuery, FleetReport
from weft.domain.limits import LimitReport
from weft.domain.machine import Close, Closed, Connected, Kind, Peer, Received, Send
from weft.domain.prediction import PredictItem
from weft.domain.request import Failed, Freeze, GatewayHello, Priority, Start, Started, Stop, TokenLogprob
from weft.domain.routes import Routes
from weft.machine_shell import MachineShell
from weft.telemetry.invariants import holds
from weft.telemetry.logs import kv
from weft.telemetry.probes import Shortages
from weft.wire.codec.scheduling import GATEWAY_TO_SCHEDULER, SCHEDULER_TO_GATEWAY, GatewayMessage, outcome_bytes
from weft.wire.errors import PeerError, report_peer_error
from weft.wire.streams import ClientStream, channel
from weft.wire.tls import Tls
from weft.wire.v1 import scheduler_pb2, scheduler_pb2_grpc
from weft_gateway.core import events
from weft_gateway.core.config import GatewayConfig
from weft_gateway.core.events import SCHEDULER, Effect, Emit, Event, Finish, PreparedRequest
from weft_gateway.core.gateway import BUG, Gateway
from weft_gateway.core.history import History
from weft_gateway.core.limits import REPORT_S
from weft_gateway.errors import from_failure
from weft_gateway.settings import GatewaySettings
from weft_gateway.shell.chunk_pacing import ChunkPacing
from weft_gateway.shell.fleet_view import FleetView
from weft_gateway.shell.metrics import GatewayMetrics
from weft_gateway.shell.predictor_client import PredictorClient
from weft_gateway.shell.rate_limits import RateLimits
from weft_gateway.shell.runner_session import RunnerSession

CHECK_S = 1.0  # between two checks of the machine's invariants
STARTED_PATIENCE_S = 0.25  # for the word that a request began, until another message goes to the scheduler
log = logging.getLogger(__name__)


class PendingAnswer:
    """An answer's side towards the client: the text since the last chunk, and the end.

    `wake`: called where there is something new; it is the same for the answers to one call. `model`: for the log.
    `prompt_logprobs`: of every token of the prompt, None for the first one; empty if they are not asked for, not
    here yet, or another answer's: they come with the first one. `cached_tokens`: tokens of the prompt that were reused;
    None: the answer has not begun.
    """

    def __init__(self, wake: Callable[[], None], model: str) -> None:
        self.wake, self.model = wake, model
        self.finish: Finish | None = None
        self.prompt_logprobs: Sequence[TokenLogprob | None] = ()
        self.cached_tokens: int | None = None
        self._pending: list[Emit] = []

    def begin(self, cached_tokens: int) -> None:
        self.cached_tokens = cached_tokens
        self.wake()

    def add(self, emit: Emit) -> None:
        if emit.prompt_logprobs:
            self.prompt_logprobs = emit.prompt_logprobs
        else:
            self._pending.append(emit)

    def take(self) -> Emit | None:
        """Return all output since the last call as one; None without new output."""
        pending, self._pending = self._pending, []
        if len(pending) <= 1:
            return pending[0] if pending else None
        logprobs = tuple(logprob for event in pending for logprob in event.logprobs)
        tokens = tuple(token for event in pending for token in event.tokens)
        text = "".join([event.text for event in pending])
        starts = [start for emit in pending for start in emit.token_starts]
        return Emit(pending[0].request_id, text, logprobs, pending[-1].answer_tokens, tokens, token_starts=starts)


class RequestManager:
    """The process's machine, its streams and its clients' requests. One event loop owns it.

    `on_routes` is called when the route table has changed; True: rows of pools, too.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        on_routes: Callable[[bool], None] = lambda _: None,
        registry: CollectorRegistry = REGISTRY,
        clock: Callable[[], float] = time.monotonic,
        tls: Tls | None = None,
    ) -> None:
        config = GatewayConfig(
            max_in_flight=settings.max_in_flight, hold_s=settings.hold_seconds, predict_s=settings.predict_ms / 1000
        )
        self.machine = Gateway(config, f"gateway-{secrets.token_hex(8)}", outcome_bytes)
        self.settings, self.clock = settings, clock
        self.metrics = GatewayMetrics(self.machine, registry)
        self.limits = RateLimits(self.machine.gateway_id, clock)
        self.shortages, self.history, self.fleet = Shortages(), History(), FleetView(self._ask_for_fleet, clock)
        self._on_routes, self._tls = on_routes, tls
        self._shell = MachineShell[Event, Effect](self.machine, self._perform, clock=clock)
        self.feed = self._shell.feed
        self._steps: dict[str, asyncio.Future[None]] = {}  # of requests that are not submitted yet
        self._answers: dict[str, PendingAnswer] = {}
        self._pacing = ChunkPacing(clock)
        self._sessions: dict[Peer, RunnerSession] = {}
        self._predictor = PredictorClient(settings.predictor, config.predict_s, self.feed, tls)
        self._drained = asyncio.Event()
        self._channel = channel(settings.scheduler, tls, "scheduler")
        self.scheduler: ClientStream[scheduler_pb2.GatewayToScheduler, scheduler_pb2.SchedulerToGateway] = ClientStream(
            "scheduler",
            scheduler_pb2_grpc.SchedulerStub(self._channel).Gateway,
            hello=lambda: [GATEWAY_TO_SCHEDULER.encode(GatewayHello(self.machine.gateway_id, applies_routes=True))],
            on_message=self._on_scheduler,
            on_up=self._on_scheduler_up,
            on_down=lambda reason: self.feed(Closed(SCHEDULER, reason)),
            joins=True,
        )

    # ---------------------------------------------------------------- what handlers use

    async def arrive(self, request_id: str, priority: Priority = Priority.INTERACTIVE) -> None:
        """Count a request until its submission or `client_gone`, and wait for the route table. Raises ApiError."""
        answer = self.machine.admission.arrive(request_id, priority, self.clock())
        if not isinstance(answer, events.Proceed):
            await self._send_held(answer)

    async def resolve(self, request_id: str, pool: str, n: int, priority: Priority) -> None:
        """Count the answers of a request that has arrived, and wait for its pool's tokenizer. Raises ApiError."""
        answer = self.machine.admission.resolve(request_id, pool, n, priority, self.clock())
        if not isinstance(answer, events.Proceed):
            await self._send_held(answer)

    async def _send_held(self, answer: events.Refuse | events.RequestHeld) -> None:
        """Wait until the request may take its next step. Raises ApiError."""
        if isinstance(answer, events.Refuse):
            raise from_failure(answer.failure)
        future = self._steps[answer.request_id] = asyncio.get_running_loop().create_future()
        try:
            self.feed(answer)
            await future
        finally:
            del self._steps[answer.request_id]

    def submit(self, requests: Sequence[PreparedRequest], answers: Sequence[PendingAnswer]) -> None:
        """Submit the prompts of a call; from here on each answer has exactly one outcome."""
        ids = [answer for request in requests for answer in request.answers]
        self._answers.update(zip(ids, answers, strict=True))
        self.feed(events.RequestReady(requests))

    def client_gone(self, request_id: str) -> None:
        """Nothing reads the request's answers any more. Harmless after the end."""
        self.feed(events.ClientGone(request_id))

    def count_answer(self, model: str | None, namespace: str | None, status: int, code: str) -> None:
        """Count one answer to a client. `None` stands for an unknown model or an unknown caller."""
        self.metrics.count_request(model, status, code)
        if status == HTTPStatus.INSUFFICIENT_STORAGE:
            self.shortages.note(code)
        self.history.answered(namespace, status, code, self.clock())

    async def drain(self, limit_s: float) -> None:
        """Take no more requests, let running answers finish within `limit_s`, then end the rest by name."""
        log.info("draining", extra=kv(in_flight=self.machine.admission.in_flight, limit_s=limit_s))
        self.feed(events.DrainStarted(limit_s))
        await self._drained.wait()

    async def run(self) -> None:
        """Keep the streams until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.scheduler.run(), name="scheduler link")
                tasks.create_task(self._check(), name="invariants")
                tasks.create_task(self._report_limits(), name="limits")
        finally:
            sessions, self._sessions = list(self._sessions.values()), {}
            for session in sessions:
                session.close()
            for session in sessions:
                await session.closed()
            await self._predictor.close()
            await self._channel.close(None)
            self._shell.close()

    async def _check(self) -> None:
        while True:
            holds(check_gateway, self.machine)  # streams exist nowhere else: the process goes on whatever is found
            await asyncio.sleep(CHECK_S)

    async def _report_limits(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            if self.scheduler.up and self.machine.routes.limited:
                self.scheduler.send(GATEWAY_TO_SCHEDULER.encode(self.limits.report()))

    # ---------------------------------------------------------------- the machine

    def _perform(self, effect: Effect) -> None:
        """Perform an effect. A failing effect ends only its request, with the trace in the log."""
        try:
            self._dispatch(effect)
        except Exception:
            request_id: str = getattr(effect.message if isinstance(effect, Send) else effect, "request_id", "")
            log.exception("request failed inside the gateway", extra=self._log_fields(request_id))
            self.feed(events.RequestAborted(request_id, BUG))

    def _dispatch(self, effect: Effect) -> None:
        match effect:
            case events.Emit():
                if answer := self._answers.get(effect.request_id):
                    answer.add(effect)
                    self._pacing.add(answer.wake)
            case Send():
                self._send(effect)
            case events.FirstToken(request_id, cached_tokens):
                if answer := self._answers.get(request_id):
                    answer.begin(cached_tokens)
            case events.Finish():
                self._finish(effect)
            case events.Proceed(request_id):
                if (step := self._steps.get(request_id)) and not step.done():
                    step.set_result(None)
            case events.Refuse(request_id, failure):
                if (step := self._steps.get(request_id)) and not step.done():
                    step.set_exception(from_failure(failure))
            case events.Submitted(request, predicted):
                self.metrics.predict_failures.inc(not predicted)
                if log.isEnabledFor(logging.DEBUG):
                    for answer_id in request.answers:
                        log.debug("submitted", extra=self._log_fields(answer_id, prompt_tokens=len(request.prompt)))
            case events.RoutesChanged(pools):
                routes = self.machine.routes
                level = logging.INFO if pools else logging.DEBUG  # adapters come and go by the thousand
                log.log(level, "route table", extra=kv(version=routes.version, models=len(routes.routes)))
                self.metrics.on_routes()
                self._on_routes(pools)
            case events.OpenSession():
                self._sessions[effect.peer] = RunnerSession(effect, self.feed, self._on_session_end, self._tls)
            case events.CheckSession(peer):
                if session := self._sessions.get(peer):  # else its end is on the way, which answers, too
                    session.check()
            case Close(peer, reason):
                if session := self._sessions.pop(peer, None):
                    session.close()
                    log.info("session down", extra=kv(runner=peer.name, reason=reason))
            case events.PeerViolation(peer, reason):
                report_peer_error("runner", PeerError(reason), runner=peer.name)
            case events.OutcomeDropped(request_id):
                self.metrics.outcomes_dropped.inc()
                log.warning("outcome dropped: too many are unacknowledged", extra=kv(request_id=request_id))
            case events.RequestFailed(request_id, error):
                fields = self._log_fields(request_id)
                log.error("request failed inside the gateway", exc_info=error, extra=fields)
            case events.Drained():
                self._drained.set()

    def _send(self, send: Send) -> None:
        peer, message = send
        if peer.kind is Kind.RUNNER:
            if isinstance(message, Start) and log.isEnabledFor(logging.DEBUG):
                fields = self._log_fields(message.request_id, epoch=tuple(message.epoch), runner=peer.name)
                log.debug("assigned", extra=fields)
            if session := self._sessions.get(peer):
                session.send(cast(Start | Stop | Freeze, message))
        elif isinstance(message, PredictItem):
            self._predictor.ask(message)
        else:
            if isinstance(message, Failed):
                about = {"epoch": tuple(message.epoch), "reason": message.reason.name, "detail": message.detail}
                log.info("epoch over", extra=self._log_fields(message.request_id, **about))
            if self.scheduler.up:  # without a stream the next one begins with everything that counts
                patience_s = patience_of(message)
                self.scheduler.send(GATEWAY_TO_SCHEDULER.encode(cast(GatewayMessage, message)), patience_s=patience_s)

    def _finish(self, finish: events.Finish) -> None:
        """End the request once. The client is woken even if a step here fails."""
        if answer := self._answers.pop(finish.request_id, None):
            answer.finish = finish
            answer.wake()
        self.metrics.count_finish(finish)
        self._count_hour(finish)

    def _count_hour(self, finish: events.Finish) -> None:
        outcome, now = finish.outcome, self.clock()
        namespace, tokens = outcome.namespace, outcome.completion_tokens
        self.history.used(namespace, outcome.prompt_tokens * (outcome.choice == 0), tokens, now)
        if finish.priority is not Priority.BATCH:
            token_s = (
                (finish.total_s - finish.ttft_s) / (tokens - 1) if finish.ttft_s is not None and tokens > 1 else None
            )
            self.history.timed(namespace, finish.ttft_s, token_s, finish.total_s, now)

    def _on_scheduler_up(self) -> None:
        self.limits.reconnected()
        self.feed(Connected(SCHEDULER))

    def _on_scheduler(self, envelope: scheduler_pb2.SchedulerToGateway) -> None:
        """Raises PeerError."""
        message = SCHEDULER_TO_GATEWAY.decode(envelope)
        if isinstance(message, LimitReport):
            return self.limits.take(message)
        if isinstance(message, FleetReport):  # for people: the machine has no use for it
            self.fleet.take(message)
            return None
        self.feed(Received(SCHEDULER, message))
        if isinstance(message, Routes) and message.more:
            gc.freeze()  # a large table lives long: to visit 100,000 routes takes the collector 50 ms
        return None

    def _ask_for_fleet(self) -> bool:
        if up := self.scheduler.up:
            self.scheduler.send(GATEWAY_TO_SCHEDULER.encode(FleetQuery()))
        return up

    def _on_session_end(self, closed: Closed) -> None:
        del self._sessions[closed.peer]
        log.info("session down", extra=kv(runner=closed.peer.name, reason=closed.reason))
        self.feed(closed)

    def _log_fields(self, request_id: str, **fields: object) -> dict[str, dict[str, object]]:
        """Key-values of a log event about an answer, as `kv` makes them: twice a request."""
        answer = self._answers.get(request_id)
        model = {"model": answer.model} if answer else {}
        return {"kv": {"request_id": request_id, **model, **fields}}


def patience_of(message: object) -> float:
    """Return how long a message to the scheduler may wait for another one to go with.

    That a request began is noted there, and its runner reports it, too; what a prompt runner has handed over, and what
    has ended, makes room for others.
    """
    return STARTED_PATIENCE_S if isinstance(message, Started) and not message.handed_off else 0.0


def check_gateway(machine: Gateway) -> None:
    """The machine's invariants, by a name that reports can show. Raises AssertionError."""
    machine.check()

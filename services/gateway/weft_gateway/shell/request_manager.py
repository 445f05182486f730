"""One request from submit to outcome: the shell around `core.stream`.

`Serving` owns every live request of the process and performs what their streams want done. Everything happens in
callbacks of one event loop and never blocks, so a message is dealt with whole before the next one. A step wakes a
request at most once; what a slow client has not read yet gathers into the next chunk.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import REGISTRY, CollectorRegistry

from weft.domain.text import quoted
from weft.telemetry.invariants import holds
from weft.telemetry.logs import kv
from weft.wire.errors import PeerError
from weft.wire.tls import Tls
from weft.wire.v1 import runner_pb2, scheduler_pb2
from weft_gateway.core.events import (
    Aborted,
    Cancel,
    ClientGone,
    Effect,
    Emit,
    EpochEnded,
    Event,
    Failed,
    Failure,
    Finish,
    HoldExpired,
    PoolAvailability,
    RunnerId,
    RunnerLost,
    Start,
    Started,
    StepTokens,
    Stop,
)
from weft_gateway.core.routes import RouteTable, table_of
from weft_gateway.core.stream import Stream, check_stream
from weft_gateway.errors import Overloaded, ParameterError
from weft_gateway.settings import Settings
from weft_gateway.shell import wire
from weft_gateway.shell.active_request import Choices, LiveRequest, Prepared
from weft_gateway.shell.clients import FromScheduler, Predicted, PredictorClient, SchedulerClient, ToScheduler
from weft_gateway.shell.messages import outcome_of, predict_item_of, start_of, submit_of
from weft_gateway.shell.metrics import Metrics
from weft_gateway.shell.outcomes import Outcomes
from weft_gateway.shell.runner_sessions import FromRunner, RunnerSessions, ToRunner

log = logging.getLogger(__name__)


class Serving:
    """The process's live requests, its streams and its route table. One event loop owns it."""

    def __init__(
        self,
        settings: Settings,
        *,
        registry: CollectorRegistry = REGISTRY,
        clock: Callable[[], float] = time.monotonic,
        tls: Tls | None = None,
    ) -> None:
        self.settings, self.clock = settings, clock
        self.gateway_id = f"gateway-{secrets.token_hex(8)}"
        self.table: RouteTable | None = None
        self.on_table: Callable[[RouteTable], None] = lambda _: None
        self.live: dict[str, LiveRequest] = {}
        self.preparing = 0  # requests that are not submitted yet
        self.draining = False
        self._mean_s = 1.0  # of a request, exponentially weighted: what Retry-After is computed from
        self.metrics = Metrics(self, registry, max_models=settings.max_adapters)
        self.outcomes = Outcomes(on_dropped=self.metrics.outcomes_dropped.inc)
        self.scheduler = SchedulerClient(
            settings.scheduler,
            hello=self._hello,
            on_message=self._on_scheduler,
            on_change=self._tell_served,
            tls=tls,
        )
        self.sessions = RunnerSessions(
            self.gateway_id,
            on_message=self._on_runner,
            on_lost=self._on_lost,
            connect_s=settings.connect_seconds,
            idle_s=settings.session_idle_seconds,
            tls=tls,
        )
        self._predictor = PredictorClient(settings.predictor, settings.predict_ms / 1000, tls)

    # ---------------------------------------------------------------- what handlers use

    @property
    def in_flight(self) -> int:
        return len(self.live) + self.preparing

    @property
    def held(self) -> int:
        """Requests that no runner has."""
        return sum(live.stream.running is None for live in self.live.values())

    def check_admission(self, choices: int = 1) -> None:
        """Raises Overloaded when too many requests are in flight: one leaves every mean / limit seconds (Little).

        A choice counts as a request; more of them than the limit could never be taken: ParameterError.
        """
        limit = self.settings.max_in_flight
        if choices > limit:
            raise ParameterError(f"n: this gateway takes {limit} requests at once, and each choice is one.", param="n")
        if self.in_flight > limit:  # the caller is counted already
            leaving = self.in_flight - limit
            wait_ms = min(60_000, max(50, round(1000 * self._mean_s * leaving / limit)))
            raise Overloaded(f"This gateway is at its limit of {limit} requests at once.", retry_after_ms=wait_ms)

    async def submit(self, choices: Sequence[Prepared]) -> Choices:
        """Predict, once, then hand every choice to the scheduler. From here on each has exactly one outcome."""
        predicted = await self._predictor.predict(predict_item_of(choices[0]))
        if predicted is None:
            self.metrics.predict_failures.inc()
        answer = Choices()
        try:
            for one in choices:
                answer.add(self._submit(one, predicted or Predicted(), answer))
        except BaseException:
            self.client_gone(answer)  # nobody would read those that run already
            raise
        return answer

    def _submit(self, prepared: Prepared, predicted: Predicted, choices: Choices) -> LiveRequest:
        stream = Stream(
            max_tokens=prepared.max_tokens,
            bytes_of=prepared.model_text.bytes_of,
            stops=prepared.stops,
            logprobs=prepared.sampling.top_logprobs is not None,
            hold_s=self.hold_s(prepared.route.pool),
            now=self.clock(),
            served=self._serves(prepared.route.pool),
        )
        live = LiveRequest(prepared, predicted, stream, choices)
        self.live[live.request_id] = live
        live.arm(self.clock(), self._hold_expired)
        self.scheduler.send(submit_of(live, self.clock()))
        log.info("submitted", extra=live.about(prompt_tokens=len(prepared.prompt_tokens)))
        return live

    def client_gone(self, choices: Choices) -> None:
        """Nobody reads any more: stop at the runner and the scheduler, now. Harmless after the end."""
        for live in choices:
            self._apply(live, ClientGone())

    def abort(self, live: LiveRequest, failure: Failure) -> None:
        """End a request for a reason of our own."""
        self._apply(live, Aborted(failure))

    # ---------------------------------------------------------------- life of the process

    async def run(self) -> None:
        """Keep the streams until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.scheduler.run(), name="scheduler link")
                tasks.create_task(self._housekeep(), name="housekeeping")
        finally:
            await self.sessions.close()
            await self._predictor.close()

    async def _housekeep(self) -> None:
        """Now and then: close idle sessions, check what must always hold."""
        pause_s = min(1.0, self.settings.session_idle_seconds)
        while True:
            used = {live.stream.running.runner for live in self.live.values() if live.stream.running}
            self.sessions.close_idle(used, self.clock())
            holds(check_serving, self)  # streams exist nowhere else: it goes on whatever is found
            await asyncio.sleep(pause_s)

    def _hello(self) -> Iterator[ToScheduler]:
        """Everything that counts, told again: what is held, what has ended."""
        yield ToScheduler(hello=scheduler_pb2.GatewayHello(gateway_id=self.gateway_id))
        for live in self.live.values():
            yield submit_of(live, self.clock())
        for outcome in self.outcomes:
            yield ToScheduler(outcome=outcome)
        yield ToScheduler(hello=scheduler_pb2.GatewayHello(gateway_id=self.gateway_id, resubmit_complete=True))

    # ---------------------------------------------------------------- messages in

    def _on_scheduler(self, message: FromScheduler) -> None:
        match message.WhichOneof("message"):
            case "assign":
                self._to(message.assign.request_id, wire.assigned_in(message.assign))
            case "preempt":
                self._to(message.preempt.request_id, wire.preempted_in(message.preempt))
            case "reject":
                self._to(message.reject.request_id, wire.rejected_in(message.reject))
            case "routes":
                self._on_routes(message.routes)
            case "outcome_ack":
                self.outcomes.acknowledge(message.outcome_ack.request_ids)
            case "runner_gone":
                self.sessions.drop(wire.runner_in(message.runner_gone.runner), "its lease ran out")
            case _:
                log.warning("unknown message of the scheduler")

    def _on_routes(self, message: scheduler_pb2.Routes) -> None:
        self.table = table_of(message)
        log.info("route table", extra=kv(version=self.table.version, models=len(self.table.models)))
        self.on_table(self.table)
        self._tell_served()

    def _serves(self, pool: str) -> bool:
        """Whether a scheduler and a ready runner of that pool are there."""
        known = self.table.pools.get(pool) if self.table else None
        return self.scheduler.up and known is not None and known.ready_runners > 0

    def hold_s(self, pool: str) -> float:
        """How long a request of that pool may be without a runner: by its route, else by this gateway's settings."""
        known = self.table.pools.get(pool) if self.table else None
        return (known.hold_s if known else 0.0) or self.settings.hold_seconds

    def _tell_served(self) -> None:
        for live in list(self.live.values()):
            self._to(live.request_id, PoolAvailability(self._serves(live.prepared.route.pool)))

    def _on_runner(self, runner: RunnerId, message: FromRunner) -> None:
        """A message of a session; a step carries every sequence of this gateway there. Raises PeerError."""
        match message.WhichOneof("message"):
            case "step":
                for sequence in message.step.sequences:
                    self._from(runner, sequence.request_id, wire.tokens_in(sequence))
            case "no_room":
                self._from(runner, message.no_room.request_id, wire.no_room_in(message.no_room))
            case "ended":
                self._from(runner, message.ended.request_id, wire.ended_in(message.ended))
            case _:
                log.warning("unknown message of a runner")

    def _from(self, runner: RunnerId, request_id: str, event: StepTokens | EpochEnded) -> None:
        """An epoch is spoken for by the runner that it was assigned to, and by nobody else. Raises PeerError."""
        live = self.live.get(request_id)
        if live is None:
            return
        running = live.stream.running
        if running and running.epoch == event.epoch and running.runner != runner:
            raise PeerError(f"it speaks for request {quoted(request_id)}, whose epoch another runner has")
        self._apply(live, event)

    def _on_lost(self, runner: RunnerId, detail: str) -> None:
        for live in list(self.live.values()):
            self._apply(live, RunnerLost(runner, detail))

    def _hold_expired(self, live: LiveRequest) -> None:
        seconds = f"{live.stream.hold_s:g} s"
        if self.scheduler.up:
            failure = Failure("no_runner_available", f"No runner took the request within {seconds}.", 1000)
        else:
            failure = Failure("no_scheduler", f"The scheduler could not be reached for {seconds}.", 1000)
        live.armed_for = None  # should the timer be early, it is armed again
        self._apply(live, HoldExpired(failure))

    def _to(self, request_id: str, event: Event) -> None:
        if live := self.live.get(request_id):
            self._apply(live, event)

    # ---------------------------------------------------------------- effects out

    def _apply(self, live: LiveRequest, event: Event) -> None:
        """One event, whole. A bug ends this request, with its trace in the log, and no other."""
        try:
            self._handle(live, event)
        except Exception:
            log.exception("request failed inside the gateway", extra=live.about())
            self._handle(live, Aborted(Failure("internal_error", "The gateway failed on this request.")))

    def _handle(self, live: LiveRequest, event: Event) -> None:
        for effect in live.stream.handle(event, self.clock()):
            self._perform(live, effect)
        if live.stream.hold_deadline != live.armed_for:
            live.arm(self.clock(), self._hold_expired)

    def _perform(self, live: LiveRequest, effect: Effect) -> None:
        match effect:
            case Emit():
                live.deliver(effect)
            case Started():
                self._started(live, effect)
            case Start(epoch, runner, address):
                log.info("assigned", extra=live.about(epoch=tuple(epoch), runner=runner.uuid))
                self.sessions.send(runner, address, start_of(live, effect))
            case Stop(epoch, runner):
                stop = runner_pb2.Stop(request_id=live.request_id, epoch=wire.epoch_out(epoch))
                self.sessions.tell(runner, ToRunner(stop=stop))
            case Failed(epoch, reason, _, _, detail):
                log.info("epoch over", extra=live.about(epoch=tuple(epoch), reason=reason.name, detail=detail))
                self.scheduler.send(wire.failed_out(live.request_id, effect))
            case Cancel():
                self.scheduler.send(ToScheduler(cancel=scheduler_pb2.Cancel(request_id=live.request_id)))
            case Finish():
                self._finish(live, effect)

    def _started(self, live: LiveRequest, effect: Started) -> None:
        if live.first_token_at is None:
            live.first_token_at = self.clock()
        started = scheduler_pb2.Started(request_id=live.request_id, epoch=wire.epoch_out(effect.epoch))
        self.scheduler.send(ToScheduler(started=started))
        live.wake()

    def _finish(self, live: LiveRequest, finish: Finish) -> None:
        """The one end: out of the live ones, its outcome kept and told, its client woken."""
        now = self.clock()
        del self.live[live.request_id]
        try:
            self._mean_s += 0.05 * (now - live.prepared.arrived - self._mean_s)
            outcome = outcome_of(live, finish, now)
            self.outcomes.keep(outcome)
            self.scheduler.send(ToScheduler(outcome=outcome))
            self.metrics.count_outcome(live, now)
            about = live.about(
                reason=finish.reason.name,
                tokens=len(live.stream.tokens),
                duration_ms=round(1000 * (now - live.prepared.arrived)),
            )
            log.info("finished", extra=about)
        finally:
            live.wake()  # whatever fails here: nobody else would wake the client
            if finish.failure:
                self.client_gone(live.choices)  # half an answer is none: the other choices end with it


def check_serving(serving: Serving) -> None:
    """What must hold between two events. Raises AssertionError."""
    for request_id, live in serving.live.items():
        assert live.request_id == request_id, "a request under another's id"
        assert live.finish is None, "an ended request is live"
        check_stream(live.stream)
        assert live.armed_for == live.stream.hold_deadline, "a held request without a timer"
    assert not serving.live.keys() & serving.outcomes.ids(), "a live request has an outcome"

"""A gateway as a machine (weft.domain.machine): requests, admission, routes, holds, sessions, outcomes.

A request on its way:

    Admission.arrive  ─(routes are there)─▶ the shell authenticates, reads and parses it
    Admission.resolve ─(tokenizer is there)─▶ the shell tokenises it
    RequestReady ─▶ predictor ─(prediction, or its deadline)─▶ Submit, Submitted ─▶ Emit ... Finish

The first two steps are answered at once. A missing part holds the request for a bounded time: RequestHeld begins the
wait, Proceed or Refuse ends it. On a new stream the scheduler gets the full state (`_resubmit`): held and running
answers, and outcomes not stored yet.

Only the runner assigned to an epoch speaks for it. A bug at a request ends only this request. The cost of a step is the
cost of its tokens: it touches no deadline and no index.
"""

from collections.abc import Callable, Iterator

from weft.domain.ids import RunnerId
from weft.domain.machine import TICK, Closed, Connected, Kind, Peer, Received, Send
from weft.domain.prediction import Prediction
from weft.domain.request import (
    Assign,
    Cancel,
    Ended,
    FinishReason,
    Frozen,
    NoCapacity,
    Outcome,
    OutcomeAck,
    OutcomeReport,
    PooledState,
    Preempt,
    Priority,
    PromptLogprobs,
    Reject,
    ResubmitComplete,
    RunnerChecked,
    RunnerGone,
    Step,
)
from weft.domain.routes import ResyncRoutes, Routes, RoutesApplied, RoutesGap
from weft_gateway.core import events
from weft_gateway.core.admission import Admission, Arrival
from weft_gateway.core.config import Deadline, GatewayConfig, Timers
from weft_gateway.core.events import SCHEDULER, Effect, Event, Failure
from weft_gateway.core.routes import RouteIndex
from weft_gateway.core.sessions import SessionEntry, SessionTable
from weft_gateway.core.stream import HoldExpired, PoolAvailability, RequestStream, SessionLost, StreamEvent, runner_peer

ACK_S = 1.0  # for outcomes to be stored before the process ends
BUG = Failure("internal_error", "The gateway failed on this request.")
_STOPPED = Failure("shutting_down", "The gateway stopped before the answer was complete.", 1000)
_DRAIN = (Deadline.DRAIN, "")


class Gateway:
    """The gateway's machine. `encode_outcome` makes the record of an outcome (`weft.wire.codec.outcome_bytes`)."""

    def __init__(self, config: GatewayConfig, gateway_id: str, encode_outcome: Callable[[Outcome], bytes]) -> None:
        self.config, self.gateway_id, self._encode_outcome = config, gateway_id, encode_outcome
        self.routes = RouteIndex()
        self.requests: dict[str, RequestStream] = {}  # by the answer's id
        self.outcomes: dict[str, OutcomeReport] = {}  # not acknowledged yet, the oldest first
        self.scheduler_up = False
        self._timers = Timers()
        self.next_deadline = self._timers.next
        self.admission = Admission(config, self.routes, self._timers, self.requests)
        self.sessions = SessionTable(gateway_id, config, self._timers)
        self._answers: dict[str, tuple[str, ...]] = {}  # answer ids of each unfinished submitted request
        self._by_pool: dict[str, dict[str, None]] = {}  # ordered sets of answers
        self._resyncing = False
        self._acking = False  # draining after the end of every answer

    @property
    def n_held(self) -> int:
        """Return the number of answers without a runner."""
        return sum(stream.running is None for stream in self.requests.values())

    # ---------------------------------------------------------------- the machine

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(peer, message):
                if peer.kind is Kind.RUNNER:
                    effects = self._on_runner(peer, message, now)
                else:
                    effects = self._on_control(message, now)
            case events.RequestHeld(request_id):
                effects = self.admission.hold(request_id, now)
            case events.RequestReady(requests):
                effects = self.admission.predict(requests, now)
            case events.ClientGone(request_id):
                arrival = self.admission.take_predicted(request_id)  # from RequestReady on it has an outcome
                effects = self._submit(arrival, Prediction(request_id), now) if arrival else []
                self.admission.drop(request_id)
                effects += self._abandon(request_id, now)
            case events.RequestAborted(request_id):
                effects = self._apply(request_id, event, now)
            case events.SessionAlive(peer):
                effects = self._on_session_alive(peer)
            case Connected(peer) | Closed(peer) if peer.kind is Kind.SCHEDULER:
                effects = self._on_scheduler(isinstance(event, Connected), now)
            case Connected(peer) | Closed(peer):
                effects = self._on_session(event, now)
            case events.TokenizerChanged():
                effects = self.admission.on_tokenizer(event)
            case events.DrainStarted(limit_s):
                effects = self.admission.drain()
                self._timers.set(_DRAIN, now + limit_s)
            case _:
                assert event is TICK
                effects = []
                # Each is taken singly: the handling of a deadline may clear a further deadline.
                while (key := self._timers.take_due(now)) is not None:
                    effects += self._on_deadline(key, now)
        if self.admission.draining:
            effects += self._drained(now)
        return effects

    def _on_deadline(self, key: tuple[Deadline, str], now: float) -> list[Effect]:
        match key:
            case (Deadline.ARRIVAL, request_id):
                over = self.admission.on_deadline(request_id, now)
                if isinstance(over, Arrival):
                    return self._submit(over, Prediction(request_id), now)
                return [over] if over else []
            case (Deadline.HOLD, request_id):
                return self._apply(request_id, HoldExpired(self._hold_failure()), now)
            case (Deadline.SESSION, name):
                session = self.sessions.get(Peer(Kind.RUNNER, name))
                assert session is not None
                reason = "idle" if session.ready else f"no session: no answer within {self.config.connect_s:g} s"
                return self._close(session, reason, now)
            case _:
                return self._end_all(now)

    # ---------------------------------------------------------------- submission

    def _submit(self, arrival: Arrival, prediction: Prediction, now: float) -> list[Effect]:
        """Hand every answer to the scheduler. From here on each answer has exactly a single outcome."""
        request = arrival.request
        assert request is not None
        pool = request.route.pool
        effects: list[Effect] = [events.Submitted(request, prediction.p90_tokens > 0)]
        self._answers[request.request_id] = request.answers
        for index in range(request.n):
            stream = RequestStream(
                request,
                index,
                hold_s=self.config.hold_s,
                arrived=arrival.arrived,
                now=now,
                available=self._is_available(pool),
                priority=arrival.priority,
                prediction=prediction,
            )
            self.requests[stream.request_id] = stream
            self._by_pool.setdefault(pool, {})[stream.request_id] = None
            if stream.hold_deadline is not None:
                self._set_hold_timer(stream)
            effects.append(Send(SCHEDULER, stream.submit(now)))
        return effects

    def _abandon(self, request_id: str, now: float) -> list[Effect]:
        """End the remaining answers of a request. Harmless after the end."""
        event = events.ClientGone(request_id)
        return [effect for answer in self._answers.get(request_id, ()) for effect in self._apply(answer, event, now)]

    def _resubmit(self, now: float) -> Iterator[Effect]:
        """Yield the full state: held and running answers, then unacknowledged outcomes."""
        for stream in self.requests.values():
            yield Send(SCHEDULER, stream.submit(now))
        for report in self.outcomes.values():
            yield Send(SCHEDULER, report)
        yield Send(SCHEDULER, ResubmitComplete())

    # ---------------------------------------------------------------- scheduler and predictor

    def _on_control(self, message: object, now: float) -> list[Effect]:
        match message:
            case Assign() | Preempt() | Reject():
                return self._apply(message.request_id, message, now)
            case OutcomeAck(request_ids):
                for request_id in request_ids:
                    self.outcomes.pop(request_id, None)
                return []
            case Routes():
                return self._on_routes(message, now)
            case RunnerGone():
                return self._on_runner_gone(message, now)
            case Prediction():
                arrival = self.admission.take_predicted(message.request_id)
                return self._submit(arrival, message, now) if arrival else []  # too late
            case _:
                raise TypeError(f"no message for a gateway: {message!r}")

    def _on_routes(self, change: Routes, now: float) -> list[Effect]:
        first = not self.routes.is_known
        try:
            pools = self.routes.take(change)
        except RoutesGap:
            was_resyncing, self._resyncing = self._resyncing, True
            return [] if was_resyncing else [Send(SCHEDULER, ResyncRoutes())]
        self._resyncing = False
        effects: list[Effect] = []
        if pools or not change.more:
            effects.append(events.RoutesChanged(first or bool(pools)))
        if self.routes.is_known:
            effects += self.admission.on_routes()
        for pool in pools:
            effects += self._on_availability(pool, now)
        if not change.more:
            effects.append(Send(SCHEDULER, RoutesApplied(change.version)))
        return effects

    def _is_available(self, pool: str) -> bool:
        """Whether the scheduler is connected and the pool has a ready runner."""
        row = self.routes.pools.get(pool)
        return self.scheduler_up and row is not None and row.ready_runners > 0

    def _on_availability(self, pool: str, now: float) -> list[Effect]:
        event = PoolAvailability(self._is_available(pool))
        return [effect for answer in list(self._by_pool.get(pool, ())) for effect in self._apply(answer, event, now)]

    def _on_scheduler(self, up: bool, now: float) -> list[Effect]:
        self.scheduler_up, self._resyncing = up, False
        effects = list(self._resubmit(now)) if up else []
        for pool in list(self._by_pool):
            effects += self._on_availability(pool, now)
        return effects

    # ---------------------------------------------------------------- runners

    def _on_runner(self, peer: Peer, message: object, now: float) -> list[Effect]:
        """Handle a message of a session; a step carries every sequence of this gateway there."""
        session = self.sessions.get(peer)
        if session is None:
            return []  # the session is closed already
        match message:
            case Step(_, spoken):
                pass
            case NoCapacity() | Ended() | Frozen() | PromptLogprobs() | PooledState():
                spoken = (message,)
            case _:
                return []  # Draining: Ended follows for each sequence
        effects: list[Effect] = []
        for part in spoken:
            stream = self.requests.get(part.request_id)
            if stream is None:
                continue
            running = stream.running
            foreign = running and running.epoch == part.epoch and running.runner != session.runner
            if foreign and not stream.speaks(session.runner):
                reason = f"it speaks for request {part.request_id!r}, but its epoch belongs to a different runner"
                effects.append(events.PeerViolation(peer, reason))
                return effects + self._close(session, f"it broke the contract: {reason}", now)
            effects += self._advance(stream, part, now, session.runner)
        return effects

    def _on_session(self, event: Connected | Closed, now: float) -> list[Effect]:
        session = self.sessions.get(event.peer)
        if session is None:
            return []
        if isinstance(event, Connected):
            self.sessions.connected(session, now)
            return []
        self.sessions.remove(session)
        return self._lose(session, event.reason if session.ready else f"no session: {event.reason}", now)

    def _on_runner_gone(self, event: RunnerGone, now: float) -> list[Effect]:
        """End the session to a runner without a lease, unless the runner may be alive and answers."""
        session = self.sessions.get(runner_peer(event.runner))
        if session is None:
            return [Send(SCHEDULER, RunnerChecked(event.runner, alive=False))] if event.unless_alive else []
        session.checking = event.unless_alive
        if session.checking and session.ready:
            return [events.CheckSession(session.peer)]
        return self._close(session, "its lease ran out", now)

    def _on_session_alive(self, peer: Peer) -> list[Effect]:
        session = self.sessions.get(peer)
        if session is None or not session.checking:
            return []
        session.checking = False
        return [Send(SCHEDULER, RunnerChecked(session.runner, alive=True))]

    def _close(self, session: SessionEntry, reason: str, now: float) -> list[Effect]:
        """End a session. A later assignment opens a new session."""
        return [self.sessions.close(session, reason), *self._lose(session, reason, now)]

    def _lose(self, session: SessionEntry, reason: str, now: float) -> list[Effect]:
        """Take the runner from every request of an ended session."""
        lost = SessionLost(session.runner, reason)
        effects = [effect for answer in list(session.requests) for effect in self._apply(answer, lost, now)]
        if session.checking:
            effects.append(Send(SCHEDULER, RunnerChecked(session.runner, alive=False)))
        return effects

    # ---------------------------------------------------------------- one answer

    def _apply(self, request_id: str, event: StreamEvent, now: float) -> list[Effect]:
        """Apply an event to an answer; do nothing after its end."""
        stream = self.requests.get(request_id)
        return [] if stream is None else self._advance(stream, event, now)

    def _advance(
        self, stream: RequestStream, event: StreamEvent, now: float, runner: RunnerId | None = None
    ) -> list[Effect]:
        """Apply an event to a stream; `runner`: its sender. A bug ends only this answer."""
        request_id, old_runners, deadline = stream.request_id, stream.runners, stream.hold_deadline
        try:
            effects: list[Effect] = stream.handle(event, now, runner)  # pyright: ignore[reportAssignmentType] (a new list)
            runners = stream.runners
            if runners is old_runners and runners:
                return effects  # nothing but tokens
            for located in old_runners:
                if located not in runners:
                    self.sessions.leave(located.peer, request_id, now)
            opened: list[Effect] = []
            for located in runners:
                for old in self.sessions.replaced_by(located):
                    opened += self._close(old, "a new incarnation took its place", now)
                opened += self.sessions.enter(located, request_id, stream.request.route.pool, now)
            effects = [*opened, *effects]
            if stream.hold_deadline != deadline:
                self._set_hold_timer(stream)
            if stream.end:
                effects += self._finish(stream, now)
        except Exception as error:
            if isinstance(event, events.RequestAborted):
                raise
            aborted = self._apply(request_id, events.RequestAborted(request_id, BUG), now)
            return [events.RequestFailed(request_id, error), *aborted]
        return effects

    def _set_hold_timer(self, stream: RequestStream) -> None:
        deadline, key = stream.hold_deadline, (Deadline.HOLD, stream.request_id)
        if deadline is None:
            self._timers.clear(key)
        else:
            self._timers.set(key, deadline)

    def _hold_failure(self) -> Failure:
        seconds = f"{self.config.hold_s:g} s"
        if self.scheduler_up:
            return Failure("no_runner_available", f"No runner took the request within {seconds}.", 1000)
        return Failure("no_scheduler", f"The scheduler could not be reached for {seconds}.", 1000)

    def _finish(self, stream: RequestStream, now: float) -> list[Effect]:
        """End an answer: keep and report the outcome. A failed answer ends the rest of the request's answers."""
        request, end, request_id, pool = stream.request, stream.end, stream.request_id, stream.pool
        assert end is not None
        del self.requests[request_id]
        del self._by_pool[pool][request_id]
        if not self._by_pool[pool]:
            del self._by_pool[pool]
        total_s = now - stream.arrived
        ttft_s = None if stream.first_token_at is None else stream.first_token_at - stream.arrived
        self.admission.finished(stream.priority, total_s)
        outcome = stream.outcome(total_s, ttft_s)
        finish = events.Finish(request_id, end, outcome, ttft_s, total_s, stream.priority, stream.draft_use)
        effects: list[Effect] = [finish]
        assert request_id not in self.outcomes, "a second outcome"
        try:
            record = self._encode_outcome(outcome)
        except Exception as error:  # noqa: BLE001 (the shell logs it; the client gets its end all the same)
            effects += [events.RequestFailed(request_id, error), Send(SCHEDULER, Cancel(request_id))]
        else:
            report = OutcomeReport(
                request_id,
                outcome.pool,
                outcome.adapter,
                outcome.completion_tokens,
                outcome.censored,
                record,
                0 if ttft_s is None else max(1, outcome.ttft_ms),
                outcome.total_ms,
                outcome.model_name,
                outcome.finish is FinishReason.FAILED,
            )
            self.outcomes[request_id] = report
            effects.append(Send(SCHEDULER, report))
        if len(self.outcomes) > self.config.max_unacked:
            oldest = next(iter(self.outcomes))
            del self.outcomes[oldest]
            effects.append(events.OutcomeDropped(oldest))
        if end.failure:
            effects += self._abandon(request.request_id, now)
        if not any(answer in self.requests for answer in self._answers.get(request.request_id, ())):
            self._answers.pop(request.request_id, None)
        return effects

    # ---------------------------------------------------------------- the end of the process

    def _end_all(self, now: float) -> list[Effect]:
        """End running answers by name after the drain's time, then wait for the storage of the outcomes."""
        if self._acking:
            return [events.Drained()]
        self._acking = True
        self._timers.set(_DRAIN, now + ACK_S)
        aborted = [events.RequestAborted(request_id, _STOPPED) for request_id in self.requests]
        return [effect for stream in aborted for effect in self._apply(stream.request_id, stream, now)]

    def _drained(self, now: float) -> list[Effect]:
        if _DRAIN not in self._timers:
            return []  # Drained was returned already
        effects: list[Effect] = []
        if not self._acking and not self.admission.in_flight:
            effects += self._end_all(now)
        if self._acking and not (self.outcomes and self.scheduler_up):
            self._timers.clear(_DRAIN)
            effects.append(events.Drained())
        return effects

    # ---------------------------------------------------------------- invariants

    def check(self) -> None:
        """Check the invariants between two events. Raises AssertionError."""
        running: dict[Peer, set[str]] = {}
        by_pool: dict[str, set[str]] = {}
        groups = set[str]()
        for request_id, stream in self.requests.items():
            assert stream.request_id == request_id, "a request under another's id"
            assert stream.end is None, "an ended request is active"
            stream.check()
            assert stream.hold_deadline == self._timers.get((Deadline.HOLD, request_id)), "a hold without a deadline"
            assert request_id in self._answers[stream.request.request_id], "an answer of no request"
            groups.add(stream.request.request_id)
            by_pool.setdefault(stream.pool, set()).add(request_id)
            for located in stream.runners:
                running.setdefault(located.peer, set()).add(request_id)
        assert groups == self._answers.keys(), "a request without an answer"
        self.sessions.check(running)
        self.admission.check(sum(stream.priority is Priority.BATCH for stream in self.requests.values()))
        assert by_pool == {pool: set(answers) for pool, answers in self._by_pool.items()}, "requests by pool"
        assert not self.requests.keys() & self.outcomes.keys(), "an active request has an outcome"

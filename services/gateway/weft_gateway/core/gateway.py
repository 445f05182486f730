"""A gateway as a machine (weft.domain.machine): requests, admission, routes, holds, sessions, outcomes.

A request on its way:

    RequestArrived ─(routes are there)─▶ Proceed ─ the shell authenticates, reads and parses it
    ModelResolved ─(tokenizer is there)─▶ Proceed ─ the shell tokenises it
    RequestReady ─▶ predictor ─(prediction, or its deadline)─▶ Submit, Submitted ─▶ Emit ... Finish

What is missing at a step holds the request for a bounded time; Refuse ends it there. On a new stream the scheduler gets
everything that counts (`_resubmit`): what is held, what runs, which outcomes are not stored.

An epoch is spoken for by the runner that it was assigned to, and by no other. A bug that one request hits ends this
request alone. A step costs what its tokens cost: it touches no deadline and no index.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from weft.domain.ids import Epoch, RunnerId
from weft.domain.machine import TICK, Close, Closed, Connected, Kind, Peer, Received, Send
from weft.domain.prediction import Prediction, PredictItem
from weft.domain.request import (
    Assign,
    Ended,
    FinishReason,
    NoCapacity,
    Outcome,
    OutcomeAck,
    OutcomeReport,
    Preempt,
    Reject,
    ResubmitComplete,
    RunnerGone,
    SessionHello,
    Step,
    Submit,
)
from weft.domain.routes import ResyncRoutes, Routes, RoutesGap
from weft_gateway.core.deadlines import Deadlines
from weft_gateway.core.events import (
    PREDICTOR,
    SCHEDULER,
    ClientGone,
    Drained,
    DrainStarted,
    Effect,
    Event,
    Failure,
    Finish,
    ModelResolved,
    OpenSession,
    OutcomeDropped,
    PeerViolation,
    Proceed,
    Refuse,
    Request,
    RequestAborted,
    RequestArrived,
    RequestFailed,
    RequestReady,
    RoutesChanged,
    Submitted,
    TokenizerChanged,
    TokenizerState,
)
from weft_gateway.core.routes import RouteTable
from weft_gateway.core.stream import (
    Abandon,
    Abort,
    HoldExpired,
    PoolAvailability,
    RequestStream,
    RunnerLost,
    StreamEvent,
    check_stream,
    runner_peer,
)

MAX_UNACKED = 10_000  # outcomes
TOKENIZER_SHARE = 4  # at most a quarter of all requests waits for one tokenizer: a broken one leaves the others theirs
ACK_S = 1.0  # for outcomes to be stored before the process ends
MEAN_WEIGHT = 0.05  # of the newest request in the mean duration
_STOPPING = Failure("shutting_down", "This gateway is stopping.", 1000)
_STOPPED = Failure("shutting_down", "The gateway stopped before the answer was complete.", 1000)


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Durations in seconds."""

    max_in_flight: int = 2000  # answers at once; beyond it requests are refused
    hold_s: float = 30.0  # without a runner, where the pool has no hold time of its own
    predict_s: float = 0.05  # for a prediction
    connect_s: float = 5.0  # for a runner's session to come up
    session_idle_s: float = 60.0  # a session without requests closes
    drain_s: float = 10.0  # for running answers to finish before the process ends
    max_unacked: int = MAX_UNACKED


class _Step(Enum):
    """What a request that is not submitted yet waits for."""

    SHELL = auto()
    ROUTES = auto()
    TOKENIZER = auto()
    PREDICTION = auto()


@dataclass(slots=True)
class _Arrival:
    """A request before its submission."""

    request_id: str
    arrived: float
    n: int = 1
    step: _Step = _Step.SHELL
    pool: str = ""
    digest: str = ""  # of the base model whose tokenizer it waits for
    request: Request | None = None


@dataclass(slots=True)
class ActiveRequest:
    """One answer from its submission to its outcome."""

    stream: RequestStream
    prediction: Prediction
    arrived: float
    hold_deadline: float | None = None  # that `Deadlines` has

    @property
    def pool(self) -> str:
        return self.stream.request.route.pool


@dataclass(slots=True)
class _Session:
    """A stream to a runner's incarnation, and the requests that run there."""

    peer: Peer
    runner: RunnerId
    ready: bool = False
    requests: dict[str, None] = field(default_factory=dict[str, None])  # an ordered set


class _Timer(Enum):
    ARRIVAL = auto()
    HOLD = auto()
    SESSION = auto()  # connecting, or idle
    DRAIN = auto()


_Key = tuple[_Timer, str | Peer]
_DRAIN: _Key = (_Timer.DRAIN, "")


class Gateway:
    """`encode_outcome` makes the record of an outcome (`weft.wire.codec.outcome_bytes`)."""

    def __init__(self, config: GatewayConfig, gateway_id: str, encode_outcome: Callable[[Outcome], bytes]) -> None:
        self.config, self.gateway_id, self._encode_outcome = config, gateway_id, encode_outcome
        self.routes = RouteTable()
        self.requests: dict[str, ActiveRequest] = {}  # by the answer's id
        self.outcomes: dict[str, OutcomeReport] = {}  # not acknowledged yet, the oldest first
        self.scheduler_up = False
        self.draining = False
        self.arriving = 0  # answers of requests that are not submitted yet
        self._arrivals: dict[str, _Arrival] = {}
        self._answers: dict[str, tuple[str, ...]] = {}  # of each submitted request that is not over
        self._by_pool: dict[str, dict[str, None]] = {}  # ordered sets of answers
        self._tokenizers: dict[str, TokenizerChanged] = {}
        self._waiting: dict[str, dict[str, None]] = {}  # requests by the digest whose tokenizer they wait for
        self._sessions: dict[Peer, _Session] = {}
        self._deadlines: Deadlines[_Key] = Deadlines()
        self._resyncing = False
        self._acking = False  # draining, and every answer has ended
        self._mean_s = 1.0  # of a request, exponentially weighted

    # ---------------------------------------------------------------- for the shell to read

    @property
    def in_flight(self) -> int:
        return len(self.requests) + self.arriving

    @property
    def held(self) -> int:
        """Answers that no runner has."""
        return sum(active.stream.running is None for active in self.requests.values())

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def waiting_for_tokenizer(self, digest: str) -> int:
        return len(self._waiting.get(digest, ()))

    def refusal(self) -> Failure | None:
        """Why no request is taken now. At the bound one leaves every mean duration / limit seconds (Little's law).

        The caller counts already.
        """
        if self.draining:
            return _STOPPING
        limit = self.config.max_in_flight
        if self.in_flight <= limit:
            return None
        wait_ms = min(60_000, max(50, round(1000 * self._mean_s * (self.in_flight - limit) / limit)))
        return Failure("rate_limit_exceeded", f"This gateway is at its limit of {limit} requests at once.", wait_ms)

    def not_ready_reason(self) -> str | None:
        """Why requests should go to another gateway, if there is one; None when they can be served here.

        One tokenizer is enough: requests for the others are held, and a new pool must not take a serving gateway away.
        """
        if self.draining:
            return "draining"
        if not self.routes.known:
            return "no route table from the scheduler yet"
        digests = sorted({pool.base_digest for pool in self.routes.pools.values() if pool.base_digest})
        states = [self._tokenizer(digest) for digest in digests]
        coming = [one for one in states if one.state is TokenizerState.LOADING]
        if not coming or any(one.state is TokenizerState.READY for one in states):
            return None
        digest, problem = coming[0].digest, coming[0].problem
        return f"no tokenizer could be loaded: {problem}" if problem else f"loading the tokenizer of {digest}"

    def hold_s(self, pool: str) -> float:
        """How long a request of that pool may be without a runner."""
        row = self.routes.pools.get(pool)
        return (row.hold_s if row else 0) or self.config.hold_s

    # ---------------------------------------------------------------- the machine

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(peer, message):
                if peer.kind is Kind.RUNNER:
                    effects = self._on_runner(peer, message, now)
                else:
                    effects = self._on_control(message, now)
            case RequestArrived():
                effects = self._arrive(event, now)
            case ModelResolved():
                effects = self._resolve(event, now)
            case RequestReady():
                effects = self._predict(event.request, now)
            case ClientGone(request_id):
                effects = self._client_gone(request_id, now)
            case RequestAborted(request_id, failure):
                active = self.requests.get(request_id)
                effects = self._apply(active, Abort(failure), now) if active else []
            case Connected(peer):
                effects = self._on_connected(peer, now)
            case Closed(peer, reason):
                effects = self._on_closed(peer, reason, now)
            case TokenizerChanged():
                effects = self._on_tokenizer(event)
            case DrainStarted():
                effects = self._start_drain(now)
            case _:
                assert event is TICK
                effects = []
                while (key := self._deadlines.pop_due(now)) is not None:  # what one ends may have had another
                    effects += self._on_deadline(key, now)
        if self.draining:
            effects += self._drained(now)
        return effects

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def _on_deadline(self, key: _Key, now: float) -> list[Effect]:
        match key:
            case (_Timer.ARRIVAL, str(request_id)):
                return self._on_wait_over(self._arrivals[request_id], now)
            case (_Timer.HOLD, str(request_id)):
                active = self.requests[request_id]
                active.hold_deadline = None
                return self._apply(active, HoldExpired(self._hold_failure(active.stream)), now)
            case (_Timer.SESSION, Peer() as peer):
                session = self._sessions[peer]
                reason = "idle" if session.ready else f"no session: no answer within {self.config.connect_s:g} s"
                return self._close(session, reason, now)
            case _:
                return self._end_all(now)

    # ---------------------------------------------------------------- before the submission

    def _arrive(self, event: RequestArrived, now: float) -> list[Effect]:
        arrival = self._arrivals[event.request_id] = _Arrival(event.request_id, now)
        self.arriving += 1
        if self.routes.known:
            return [Proceed(event.request_id)]  # the shell asks for `refusal` once it knows the caller
        if failure := self.refusal():
            return self._refuse(arrival, failure)
        return self._wait(arrival, _Step.ROUTES, now + self.config.hold_s)

    def _resolve(self, event: ModelResolved, now: float) -> list[Effect]:
        arrival = self._arrivals[event.request_id]
        self.arriving += event.n - arrival.n
        arrival.n, arrival.pool = event.n, event.pool
        pool = self.routes.pools.get(event.pool)
        arrival.digest = pool.base_digest if pool else ""
        if failure := self.refusal():
            return self._refuse(arrival, failure)
        tokenizer = self._tokenizer(arrival.digest)
        if tokenizer.state is TokenizerState.READY:
            return [Proceed(arrival.request_id)]
        waiting = self._waiting.get(arrival.digest, {})
        if tokenizer.state is not TokenizerState.LOADING or len(waiting) * TOKENIZER_SHARE >= self.config.max_in_flight:
            return self._refuse(arrival, _no_tokenizer(arrival.pool, tokenizer))
        self._waiting.setdefault(arrival.digest, {})[arrival.request_id] = None
        return self._wait(arrival, _Step.TOKENIZER, now + self.hold_s(arrival.pool))

    def _predict(self, request: Request, now: float) -> list[Effect]:
        """One prediction for all answers, under the request's own id."""
        arrival = self._arrivals[request.request_id]
        arrival.request = request
        item = PredictItem(
            request_id=request.request_id,
            prompt_text=request.prompt_text,
            pool=request.route.pool,
            model_name=request.route.model_name,
            prompt_tokens=len(request.prompt),
            max_tokens=request.max_tokens,
        )
        return [*self._wait(arrival, _Step.PREDICTION, now + self.config.predict_s), Send(PREDICTOR, item)]

    def _wait(self, arrival: _Arrival, step: _Step, until: float) -> list[Effect]:
        arrival.step = step
        self._deadlines.set((_Timer.ARRIVAL, arrival.request_id), until)
        return []

    def _proceed(self, arrival: _Arrival) -> list[Effect]:
        """The wait is over."""
        self._end_wait(arrival)
        return [Proceed(arrival.request_id)]

    def _end_wait(self, arrival: _Arrival) -> None:
        self._deadlines.set((_Timer.ARRIVAL, arrival.request_id), None)
        if arrival.step is _Step.TOKENIZER:
            waiting = self._waiting[arrival.digest]
            del waiting[arrival.request_id]
            if not waiting:
                del self._waiting[arrival.digest]
        arrival.step = _Step.SHELL

    def _leave(self, arrival: _Arrival) -> None:
        self._end_wait(arrival)
        del self._arrivals[arrival.request_id]
        self.arriving -= arrival.n

    def _refuse(self, arrival: _Arrival, failure: Failure) -> list[Effect]:
        self._leave(arrival)
        return [Refuse(arrival.request_id, failure)]

    def _on_wait_over(self, arrival: _Arrival, now: float) -> list[Effect]:
        if arrival.step is _Step.PREDICTION:
            return self._submit(arrival, Prediction(arrival.request_id), now)
        if arrival.step is _Step.TOKENIZER:
            return self._refuse(arrival, _no_tokenizer(arrival.pool, self._tokenizer(arrival.digest)))
        failure = Failure("no_scheduler", "The scheduler has not sent any route yet.", 1000)
        return self._refuse(arrival, failure)

    def _tokenizer(self, digest: str) -> TokenizerChanged:
        """One that the shell has not reported yet is on its way: the shell follows the routes."""
        unknown = TokenizerState.LOADING if digest else TokenizerState.REMOVED
        return self._tokenizers.get(digest) or TokenizerChanged(digest, unknown)

    def _on_tokenizer(self, event: TokenizerChanged) -> list[Effect]:
        if event.state is TokenizerState.REMOVED:
            self._tokenizers.pop(event.digest, None)
        else:
            self._tokenizers[event.digest] = event
        if event.state is TokenizerState.LOADING:
            return []
        effects: list[Effect] = []
        for request_id in list(self._waiting.get(event.digest, ())):
            arrival = self._arrivals[request_id]
            if event.state is TokenizerState.READY:
                effects += self._proceed(arrival)
            else:
                effects += self._refuse(arrival, _no_tokenizer(arrival.pool, event))
        return effects

    def _client_gone(self, request_id: str, now: float) -> list[Effect]:
        """Stop at runner and scheduler, now. Harmless after the end."""
        if arrival := self._arrivals.get(request_id):
            self._leave(arrival)
        return self._abandon(request_id, now)

    def _abandon(self, request_id: str, now: float) -> list[Effect]:
        active = [self.requests[answer] for answer in self._answers.get(request_id, ()) if answer in self.requests]
        return [effect for one in active for effect in self._apply(one, Abandon(), now)]

    # ---------------------------------------------------------------- submission

    def _submit(self, arrival: _Arrival, prediction: Prediction, now: float) -> list[Effect]:
        """Hand every answer to the scheduler. From here on each has exactly one outcome."""
        self._leave(arrival)
        request = arrival.request
        assert request is not None
        pool = request.route.pool
        effects: list[Effect] = [Submitted(request, prediction.p90_tokens > 0)]
        self._answers[request.request_id] = tuple(request.id_of(index) for index in range(request.n))
        for index in range(request.n):
            stream = RequestStream(
                request, index, hold_s=self.hold_s(pool), now=now, available=self._is_available(pool)
            )
            active = ActiveRequest(stream, prediction, arrival.arrived)
            self.requests[stream.request_id] = active
            self._by_pool.setdefault(pool, {})[stream.request_id] = None
            self._update_hold_deadline(active)
            effects.append(Send(SCHEDULER, _submit_of(active, now)))
        return effects

    def _resubmit(self, now: float) -> Iterator[Effect]:
        """Everything that counts: what is held or runs, what has ended."""
        for active in self.requests.values():
            yield Send(SCHEDULER, _submit_of(active, now))
        for report in self.outcomes.values():
            yield Send(SCHEDULER, report)
        yield Send(SCHEDULER, ResubmitComplete())

    # ---------------------------------------------------------------- scheduler and predictor

    def _on_control(self, message: object, now: float) -> list[Effect]:
        match message:
            case Assign() | Preempt() | Reject():
                active = self.requests.get(message.request_id)
                return self._apply(active, message, now) if active else []
            case OutcomeAck(request_ids):
                for request_id in request_ids:
                    self.outcomes.pop(request_id, None)
                return []
            case Routes():
                return self._on_routes(message, now)
            case RunnerGone(runner):
                session = self._sessions.get(runner_peer(runner))
                return self._close(session, "its lease ran out", now) if session else []
            case Prediction():
                arrival = self._arrivals.get(message.request_id)
                if arrival is None or arrival.step is not _Step.PREDICTION:
                    return []  # too late
                return self._submit(arrival, message, now)
            case _:
                raise TypeError(f"no message for a gateway: {message!r}")

    def _on_routes(self, change: Routes, now: float) -> list[Effect]:
        first = not self.routes.known
        try:
            pools = self.routes.apply(change)
        except RoutesGap:
            asked, self._resyncing = self._resyncing, True
            return [] if asked else [Send(SCHEDULER, ResyncRoutes())]
        self._resyncing = False
        effects: list[Effect] = [RoutesChanged(first or bool(pools))]
        for arrival in [one for one in self._arrivals.values() if one.step is _Step.ROUTES]:
            effects += self._proceed(arrival)
        for pool in pools:
            effects += self._on_availability(pool, now)
        return effects

    def _is_available(self, pool: str) -> bool:
        """Whether a scheduler and a ready runner of that pool are there."""
        row = self.routes.pools.get(pool)
        return self.scheduler_up and row is not None and row.ready_runners > 0

    def _on_availability(self, pool: str, now: float) -> list[Effect]:
        event = PoolAvailability(self._is_available(pool))
        active = [self.requests[answer] for answer in self._by_pool.get(pool, ())]
        return [effect for one in active for effect in self._apply(one, event, now)]

    def _on_connected(self, peer: Peer, now: float) -> list[Effect]:
        if session := self._sessions.get(peer):
            session.ready = True
            self._arm_idle(session, now)
            return []
        return self._on_scheduler(True, now) if peer.kind is Kind.SCHEDULER else []

    def _on_closed(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        if session := self._sessions.get(peer):
            return self._lose(session, reason if session.ready else f"no session: {reason}", now)
        return self._on_scheduler(False, now) if peer.kind is Kind.SCHEDULER else []

    def _on_scheduler(self, up: bool, now: float) -> list[Effect]:
        self.scheduler_up, self._resyncing = up, False
        effects = list(self._resubmit(now)) if up else []
        for pool in list(self._by_pool):
            effects += self._on_availability(pool, now)
        return effects

    # ---------------------------------------------------------------- runners

    def _on_runner(self, peer: Peer, message: object, now: float) -> list[Effect]:
        """A message of a session; a step carries every sequence of this gateway there."""
        session = self._sessions.get(peer)
        if session is None:
            return []  # the session is closed already
        match message:
            case Step(_, spoken):
                pass
            case NoCapacity() | Ended():
                spoken = (message,)
            case _:
                return []  # Draining: Ended follows for each sequence
        effects: list[Effect] = []
        for one in spoken:
            active = self.requests.get(one.request_id)
            if active is None:
                continue
            if active.stream.running is not None and not self._may_speak(active, session, one.epoch):
                reason = f"it speaks for request {one.request_id!r}, whose epoch another runner has"
                effects.append(PeerViolation(peer, reason))
                return effects + self._close(session, f"it broke the contract: {reason}", now)
            effects += self._apply(active, one, now)
        return effects

    def _may_speak(self, active: ActiveRequest, session: _Session, epoch: Epoch) -> bool:
        running = active.stream.running
        return running is None or running.epoch != epoch or running.runner == session.runner

    def _session_for(self, assign: Assign, now: float) -> list[Effect]:
        """Open a session where there is none. A new incarnation ends the sessions to older ones of its device."""
        peer, runner = runner_peer(assign.runner), assign.runner
        if peer in self._sessions:
            return []
        effects: list[Effect] = []
        for old in [one for one in self._sessions.values() if one.runner.uuid == runner.uuid]:
            effects += self._close(old, "a new incarnation took its place", now)
        self._sessions[peer] = _Session(peer, runner)
        self._deadlines.set((_Timer.SESSION, peer), now + self.config.connect_s)
        return [*effects, OpenSession(peer, assign.address, SessionHello(self.gateway_id, runner.incarnation))]

    def _leave_session(self, assign: Assign, request_id: str, now: float) -> None:
        if session := self._sessions.get(runner_peer(assign.runner)):
            session.requests.pop(request_id, None)
            self._arm_idle(session, now)

    def _arm_idle(self, session: _Session, now: float) -> None:
        if session.ready:
            idle = not session.requests
            self._deadlines.set((_Timer.SESSION, session.peer), now + self.config.session_idle_s if idle else None)

    def _close(self, session: _Session, reason: str, now: float) -> list[Effect]:
        """End a session. A later assignment opens another one."""
        return [Close(session.peer, reason), *self._lose(session, reason, now)]

    def _lose(self, session: _Session, reason: str, now: float) -> list[Effect]:
        """Every request on a session that is over has lost its runner."""
        del self._sessions[session.peer]
        self._deadlines.set((_Timer.SESSION, session.peer), None)
        lost = RunnerLost(session.runner, reason)
        active = [self.requests[request_id] for request_id in session.requests]
        return [effect for one in active for effect in self._apply(one, lost, now)]

    # ---------------------------------------------------------------- one answer

    def _apply(self, active: ActiveRequest, event: StreamEvent, now: float) -> list[Effect]:
        """One event, whole. A bug ends this request, and no other."""
        try:
            return self._advance(active, event, now)
        except Exception as error:  # noqa: BLE001 (the shell logs it)
            failure = Failure("internal_error", "The gateway failed on this request.")
            request_id = active.stream.request_id
            return [RequestFailed(request_id, error), *self._advance(active, Abort(failure), now)]

    def _advance(self, active: ActiveRequest, event: StreamEvent, now: float) -> list[Effect]:
        stream = active.stream
        if stream.end:
            return []  # ended with another answer of its request
        before = stream.running
        effects: list[Effect] = [*stream.handle(event, now)]
        after = stream.running
        if after is before and after is not None:
            return effects  # nothing but tokens
        if after is not before:
            if after is not None:
                effects = [*self._session_for(after, now), *effects]
                self._sessions[runner_peer(after.runner)].requests[stream.request_id] = None
                self._arm_idle(self._sessions[runner_peer(after.runner)], now)
            if before is not None and (after is None or after.runner != before.runner):
                self._leave_session(before, stream.request_id, now)
        self._update_hold_deadline(active)
        if stream.end:
            effects += self._finish(active, now)
        return effects

    def _update_hold_deadline(self, active: ActiveRequest) -> None:
        deadline = active.stream.hold_deadline
        if deadline != active.hold_deadline:
            active.hold_deadline = deadline
            self._deadlines.set((_Timer.HOLD, active.stream.request_id), deadline)

    def _hold_failure(self, stream: RequestStream) -> Failure:
        seconds = f"{stream.hold_s:g} s"
        if self.scheduler_up:
            return Failure("no_runner_available", f"No runner took the request within {seconds}.", 1000)
        return Failure("no_scheduler", f"The scheduler could not be reached for {seconds}.", 1000)

    def _finish(self, active: ActiveRequest, now: float) -> list[Effect]:
        """The one end: keep and report the outcome. An answer that fails ends the request's other answers."""
        stream = active.stream
        request, end, request_id = stream.request, stream.end, stream.request_id
        assert end is not None
        del self.requests[request_id]
        del self._by_pool[active.pool][request_id]
        if not self._by_pool[active.pool]:
            del self._by_pool[active.pool]
        total_s = now - active.arrived
        ttft_s = None if stream.first_token_at is None else stream.first_token_at - active.arrived
        self._mean_s += MEAN_WEIGHT * (total_s - self._mean_s)
        outcome = _outcome_of(active, total_s, ttft_s)
        effects: list[Effect] = [Finish(request_id, end.reason, end.failure, outcome, ttft_s, total_s)]
        assert request_id not in self.outcomes, "a second outcome"
        report = OutcomeReport(
            request_id,
            outcome.pool,
            outcome.adapter,
            outcome.completion_tokens,
            outcome.censored,
            self._encode_outcome(outcome),
        )
        self.outcomes[request_id] = report
        effects.append(Send(SCHEDULER, report))
        if len(self.outcomes) > self.config.max_unacked:
            oldest = next(iter(self.outcomes))
            del self.outcomes[oldest]
            effects.append(OutcomeDropped(oldest))
        if end.failure:
            effects += self._abandon(request.request_id, now)
        if not any(answer in self.requests for answer in self._answers.get(request.request_id, ())):
            self._answers.pop(request.request_id, None)
        return effects

    # ---------------------------------------------------------------- the end of the process

    def _start_drain(self, now: float) -> list[Effect]:
        self.draining = True
        self._deadlines.set(_DRAIN, now + self.config.drain_s)
        waiting = [one for one in self._arrivals.values() if one.step in (_Step.ROUTES, _Step.TOKENIZER)]
        return [effect for one in waiting for effect in self._refuse(one, _STOPPING)]

    def _end_all(self, now: float) -> list[Effect]:
        """The drain's time is over: end what runs by name, then wait for the outcomes to be stored."""
        if self._acking:
            return [Drained()]
        self._acking = True
        self._deadlines.set(_DRAIN, now + ACK_S)
        return [effect for one in list(self.requests.values()) for effect in self._apply(one, Abort(_STOPPED), now)]

    def _drained(self, now: float) -> list[Effect]:
        if self._deadlines.get(_DRAIN) is None:
            return []  # Drained was returned already
        effects: list[Effect] = []
        if not self._acking and not self.in_flight:
            effects += self._end_all(now)
        if self._acking and not (self.outcomes and self.scheduler_up):
            self._deadlines.set(_DRAIN, None)
            effects.append(Drained())
        return effects

    # ---------------------------------------------------------------- invariants

    def check(self) -> None:
        """What must hold between two events. Raises AssertionError."""
        by_session: dict[Peer, set[str]] = {peer: set() for peer in self._sessions}
        by_pool: dict[str, set[str]] = {}
        for request_id, active in self.requests.items():
            stream = active.stream
            assert stream.request_id == request_id, "a request under another's id"
            assert stream.end is None, "an ended request is active"
            check_stream(stream)
            assert active.hold_deadline == stream.hold_deadline, "a held request with another deadline"
            assert active.hold_deadline == self._deadlines.get((_Timer.HOLD, request_id)), "a hold without a deadline"
            assert request_id in self._answers[stream.request.request_id], "an answer of no request"
            by_pool.setdefault(active.pool, set()).add(request_id)
            if stream.running:
                by_session[runner_peer(stream.running.runner)].add(request_id)
        assert by_session == {one.peer: set(one.requests) for one in self._sessions.values()}, "who runs where"
        assert by_pool == {pool: set(answers) for pool, answers in self._by_pool.items()}, "requests by pool"
        assert self.arriving == sum(one.n for one in self._arrivals.values()), "requests before their submission"
        assert not self.requests.keys() & self.outcomes.keys(), "an active request has an outcome"


def _no_tokenizer(pool: str, tokenizer: TokenizerChanged) -> Failure:
    problem = tokenizer.problem or "it is being loaded"
    return Failure("model_not_ready", f"The tokenizer of pool {pool} is not available: {problem}.", 1000)


def _submit_of(active: ActiveRequest, now: float) -> Submit:
    """The request as the scheduler needs it, new or submitted again: with its age, and where it runs."""
    stream, prediction = active.stream, active.prediction
    request, running = stream.request, stream.running
    return Submit(
        request_id=stream.request_id,
        pool=request.route.pool,
        namespace=request.namespace,
        model_name=request.route.model_name,
        adapter=request.route.adapter,
        prompt_tokens=len(request.prompt),
        max_tokens=request.max_tokens,
        emitted_tokens=len(stream.tokens),
        p50_tokens=prediction.p50_tokens,
        p90_tokens=prediction.p90_tokens,
        waited_s=now - active.arrived,
        epoch=running.epoch if running else Epoch(),
        runner=running.runner if running else None,
        migrations=stream.counted_migrations,
        reservation_tokens=running.reservation_tokens if running else 0,
        start_emitted_tokens=stream.start_tokens if running else 0,
        numerics_class=stream.numerics_class,
    )


def _outcome_of(active: ActiveRequest, total_s: float, ttft_s: float | None) -> Outcome:
    """The one terminal record of an answer.

    Censored: the real length is only known to be at least this one (cut by a limit, the client, or a failure). A stop
    string is the client's own end, so it is the real length.
    """
    stream, prediction = active.stream, active.prediction
    request, end = stream.request, stream.end
    assert end is not None
    total_ms = round(1000 * total_s)
    return Outcome(
        request_id=stream.request_id,
        pool=request.route.pool,
        namespace=request.namespace,
        model_name=request.route.model_name,
        adapter=request.route.adapter,
        prompt_tokens=len(request.prompt),
        completion_tokens=len(stream.tokens),
        finish=end.reason,
        finished_unix_ms=request.arrived_unix_ms + total_ms,
        error=end.failure.code if end.failure else "",
        censored=end.reason not in (FinishReason.EOS, FinishReason.STOP),
        predicted_p50_tokens=prediction.p50_tokens,
        predicted_p90_tokens=prediction.p90_tokens,
        model_version=prediction.model_version,
        ttft_ms=0 if ttft_s is None else round(1000 * ttft_s),
        total_ms=total_ms,
        migrations=stream.migrations,
        doublings=stream.doublings,
        choice=stream.index,
    )

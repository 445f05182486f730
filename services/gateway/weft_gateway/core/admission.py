"""Requests before their submission: counted, held for a bounded time for a missing part, refused beyond the bound."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from enum import Enum, auto

from weft.domain.machine import Send
from weft.domain.prediction import PredictItem
from weft.domain.request import Priority
from weft_gateway.core.config import Deadline, GatewayConfig, Timers
from weft_gateway.core.events import (
    PREDICTOR,
    Effect,
    Failure,
    PreparedRequest,
    Proceed,
    Refuse,
    RequestHeld,
    TokenizerChanged,
    TokenizerState,
)
from weft_gateway.core.routes import RouteIndex

# At most a quarter of all requests waits for a single tokenizer: a broken tokenizer leaves room for the rest.
TOKENIZER_SHARE = 4
MIN_WAIT_S, MAX_WAIT_S = 1.0, 60.0  # from a refusal until the request should come back
MEAN_WEIGHT = 0.05  # weight of the newest request in the mean duration
STOPPING = Failure("shutting_down", "This gateway is stopping.", 1000)


class Stage(Enum):
    """The next part needed by a request."""

    SHELL = auto()
    ROUTES = auto()
    TOKENIZER = auto()
    PREDICTION = auto()


LATE = 0.2  # share of the time for a prediction: the gateway missed a deadline noticed later than this


@dataclass(slots=True)
class Arrival:
    """A request before its submission. `n`: the number of its answers."""

    request_id: str
    arrived: float
    priority: Priority = Priority.INTERACTIVE
    n: int = 1
    stage: Stage = Stage.SHELL
    pool: str = ""
    digest: str = ""  # of the base model of its tokenizer
    request: PreparedRequest | None = None
    due: float = 0.0  # the end of the present wait
    postponed: bool = False


Answer = Proceed | Refuse | RequestHeld  # answers to a step; RequestHeld: an event that the shell feeds, to wait


class Admission:
    """The admission of requests. `active`: the submitted answers, which count, too.

    Interactive and batch answers are bounded separately, by the same number: neither takes places of the rest.
    """

    def __init__(self, config: GatewayConfig, routes: RouteIndex, timers: Timers, active: Sized) -> None:
        self._config, self._routes, self._timers, self._active = config, routes, timers, active
        self.draining = False
        self.arriving = 0  # answers
        self.batch = 0  # answers of batch priority, submitted answers included
        self.rejections = 0  # requests beyond the bound, since start
        self._arrivals: dict[str, Arrival] = {}
        self._tokenizers: dict[str, TokenizerChanged] = {}
        self._waiting: dict[str, dict[str, None]] = {}  # requests by the digest of the missing tokenizer
        self._mean_s = 1.0  # from an interactive request's arrival to its end, exponentially weighted
        self._next_place = 0.0  # time of the next free place not yet given to a refused request

    @property
    def in_flight(self) -> int:
        return len(self._active) + self.arriving

    def waiting_for_tokenizer(self, digest: str) -> int:
        return len(self._waiting.get(digest, ()))

    def refusal(self, now: float, priority: Priority = Priority.INTERACTIVE) -> Failure | None:
        """Return the reason to refuse a request of a priority now; None: it is taken. The caller counts already.

        At the bound a request leaves every mean duration / limit seconds (Little's law). Each refused request gets a
        separate time to come back, so that a burst does not come back at once.
        """
        if self.draining:
            return STOPPING
        limit = self._config.max_in_flight
        count = self.batch if priority is Priority.BATCH else self.in_flight - self.batch
        if count <= limit:
            return None
        self.rejections += 1
        self._next_place = min(now + MAX_WAIT_S, max(now, self._next_place) + self._mean_s / limit)
        wait_ms = round(1000 * max(MIN_WAIT_S, self._next_place - now))
        return Failure("rate_limit_exceeded", f"This gateway is at its limit of {limit} requests at once.", wait_ms)

    def not_ready_reason(self) -> str | None:
        """Return the reason to send requests to another gateway, if there is any; None: this gateway serves them.

        A single tokenizer is enough: requests for the rest are held, and a new pool must not take a serving gateway
        away.
        """
        if self.draining:
            return "draining"
        if not self._routes.is_known:
            return "no route table from the scheduler yet"
        digests = sorted({pool.base_digest for pool in self._routes.pools.values() if pool.base_digest})
        tokenizers = [self._tokenizer(digest) for digest in digests]
        loading = [tokenizer for tokenizer in tokenizers if tokenizer.state is TokenizerState.LOADING]
        if not loading or any(tokenizer.state is TokenizerState.READY for tokenizer in tokenizers):
            return None
        digest, problem = loading[0].digest, loading[0].problem
        return f"no tokenizer could be loaded: {problem}" if problem else f"loading the tokenizer of {digest}"

    # ---------------------------------------------------------------- steps

    def arrive(self, request_id: str, priority: Priority, now: float) -> Answer:
        """Count a request from now on. The shell asks for `refusal` once the request may proceed and its caller is
        known."""
        arrival = self._arrivals[request_id] = Arrival(request_id, now, priority)
        self._count(arrival, 1)
        return self._next_step(arrival, now)

    def resolve(self, request_id: str, pool: str, n: int, priority: Priority, now: float) -> Answer:
        """Count the `n` answers of a request to a model of the pool. The request needs the pool's tokenizer next."""
        arrival = self._arrivals[request_id]
        self._count(arrival, -arrival.n)
        arrival.n, arrival.priority = n, priority
        self._count(arrival, n)
        row = self._routes.pools.get(pool)
        arrival.pool, arrival.digest = pool, row.base_digest if row else ""
        return self._next_step(arrival, now)

    def hold(self, request_id: str, now: float) -> list[Effect]:
        """Let a request wait for a missing part, if it is still missing."""
        arrival = self._arrivals.get(request_id)
        if arrival is None:
            return []  # its client has gone away
        answer = self._next_step(arrival, now)
        if not isinstance(answer, RequestHeld):
            return [answer]
        if arrival.pool:
            self._waiting.setdefault(arrival.digest, {})[request_id] = None
        self._wait(arrival, Stage.TOKENIZER if arrival.pool else Stage.ROUTES, now + self._config.hold_s)
        return []

    def _next_step(self, arrival: Arrival, now: float) -> Answer:
        """Decide a request's next step. Its pool tells the step: it has a pool from `resolve` on."""
        if not arrival.pool and self._routes.is_known:
            return Proceed(arrival.request_id)
        if failure := self.refusal(now, arrival.priority):
            return self._refuse(arrival, failure)
        if arrival.pool:
            tokenizer = self._tokenizer(arrival.digest)
            if tokenizer.state is TokenizerState.READY:
                return Proceed(arrival.request_id)
            crowded = self.waiting_for_tokenizer(arrival.digest) * TOKENIZER_SHARE >= self._config.max_in_flight
            if tokenizer.state is not TokenizerState.LOADING or crowded:
                return self._refuse(arrival, _no_tokenizer(arrival.pool, tokenizer))
        return RequestHeld(arrival.request_id)

    def predict(self, requests: Sequence[PreparedRequest], now: float) -> list[Effect]:
        """Ask for a single prediction for all answers to a prompt, under the prompt's id. The answers count already."""
        arrived = self._arrivals[requests[0].request_id]
        assert arrived.n == sum(request.n for request in requests), "the answers differ from the counted answers"
        effects: list[Effect] = []
        for request in requests:
            arrival = replace(arrived, request_id=request.request_id, n=request.n, request=request)
            self._arrivals[request.request_id] = arrival
            self._wait(arrival, Stage.PREDICTION, now + self._config.predict_s)
            item = PredictItem(
                request_id=request.request_id,
                prompt_text=request.prompt_text,
                pool=request.route.pool,
                model_name=request.route.model_name,
                prompt_tokens=len(request.prompt),
                max_tokens=request.max_tokens,
                namespace=request.namespace,
                traceparent=request.traceparent,
            )
            effects.append(Send(PREDICTOR, item))
        return effects

    def take_predicted(self, request_id: str) -> Arrival | None:
        """Return a request waiting for its prediction. Its answers are `active` from now on."""
        arrival = self._arrivals.get(request_id)
        if arrival is None or arrival.stage is not Stage.PREDICTION:
            return None
        self.arriving -= arrival.n
        del self._arrivals[request_id]
        self._end_wait(arrival)
        return arrival

    def on_deadline(self, request_id: str, now: float) -> Arrival | Refuse | None:
        """End a wait. A request without its prediction goes on; a request without routes or tokenizer is refused.

        None: the request waits once more for its prediction. This process was late itself, and an answer may be here.
        Under a burst of arrivals the event loop is busy for longer than the time for a prediction.
        """
        arrival, predict_s = self._arrivals[request_id], self._config.predict_s
        if arrival.stage is Stage.PREDICTION:
            if arrival.postponed or now < arrival.due + LATE * predict_s:
                return self.take_predicted(request_id)
            arrival.postponed = True
            return self._wait(arrival, Stage.PREDICTION, now + predict_s)
        failure = Failure("no_scheduler", "The scheduler has not sent any route yet.", 1000)
        if arrival.stage is Stage.TOKENIZER:
            failure = _no_tokenizer(arrival.pool, self._tokenizer(arrival.digest))
        return self._refuse(arrival, failure)

    def drop(self, request_id: str) -> None:
        """Drop a request after its client has gone, or after the shell refused it."""
        if arrival := self._arrivals.get(request_id):
            self._leave(arrival)

    def finished(self, priority: Priority, total_s: float) -> None:
        """Count the end of an answer, `total_s` after its request's arrival."""
        if priority is Priority.BATCH:
            self.batch -= 1
        else:
            self._mean_s += MEAN_WEIGHT * (total_s - self._mean_s)

    def on_routes(self) -> list[Effect]:
        """Continue the requests that wait for a route table."""
        arrivals = [arrival for arrival in self._arrivals.values() if arrival.stage is Stage.ROUTES]
        return [self._proceed(arrival) for arrival in arrivals]

    def on_tokenizer(self, event: TokenizerChanged) -> list[Effect]:
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
                effects.append(self._proceed(arrival))
            else:
                effects.append(self._refuse(arrival, _no_tokenizer(arrival.pool, event)))
        return effects

    def drain(self) -> list[Effect]:
        """Take no more requests, and refuse the held requests."""
        self.draining = True
        arrivals = [entry for entry in self._arrivals.values() if entry.stage in (Stage.ROUTES, Stage.TOKENIZER)]
        return [self._refuse(arrival, STOPPING) for arrival in arrivals]

    def check(self, active_batch: int) -> None:
        """Check counts and waits. `active_batch`: submitted answers of batch priority. Raises AssertionError."""
        assert self.arriving == sum(entry.n for entry in self._arrivals.values()), "requests before their submission"
        arriving_batch = sum(entry.n for entry in self._arrivals.values() if entry.priority is Priority.BATCH)
        assert self.batch == active_batch + arriving_batch, "answers of batch priority"
        for arrival in self._arrivals.values():
            waits = arrival.stage is not Stage.SHELL
            assert waits == ((Deadline.ARRIVAL, arrival.request_id) in self._timers), "a wait has an end"
            waiting = arrival.request_id in self._waiting.get(arrival.digest, ())
            assert waiting == (arrival.stage is Stage.TOKENIZER), "requests by tokenizer"

    def _tokenizer(self, digest: str) -> TokenizerChanged:
        """Return a tokenizer's state. An unreported tokenizer is loading: the shell follows the routes."""
        unknown = TokenizerState.LOADING if digest else TokenizerState.REMOVED
        return self._tokenizers.get(digest) or TokenizerChanged(digest, unknown)

    def _wait(self, arrival: Arrival, stage: Stage, deadline: float) -> None:
        arrival.stage, arrival.due = stage, deadline
        self._timers.set((Deadline.ARRIVAL, arrival.request_id), deadline)

    def _proceed(self, arrival: Arrival) -> Proceed:
        self._end_wait(arrival)
        return Proceed(arrival.request_id)

    def _refuse(self, arrival: Arrival, failure: Failure) -> Refuse:
        self._leave(arrival)
        return Refuse(arrival.request_id, failure)

    def _leave(self, arrival: Arrival) -> None:
        self._end_wait(arrival)
        del self._arrivals[arrival.request_id]
        self._count(arrival, -arrival.n)

    def _count(self, arrival: Arrival, answers: int) -> None:
        self.arriving += answers
        if arrival.priority is Priority.BATCH:
            self.batch += answers

    def _end_wait(self, arrival: Arrival) -> None:
        self._timers.clear((Deadline.ARRIVAL, arrival.request_id))
        if arrival.stage is Stage.TOKENIZER:
            waiting = self._waiting[arrival.digest]
            del waiting[arrival.request_id]
            if not waiting:
                del self._waiting[arrival.digest]
        arrival.stage = Stage.SHELL


def _no_tokenizer(pool: str, tokenizer: TokenizerChanged) -> Failure:
    problem = tokenizer.problem or "it is being loaded"
    return Failure("model_not_ready", f"The tokenizer of pool {pool} is not available: {problem}.", 1000)

"""One answer of a request as a pure machine: `handle(event, now) -> [effects]`.

    held ──Assign──▶ running ──EOS, LENGTH, stop string──▶ done
      ▲                │
      └── Preempt, SessionLost, NoCapacity, Ended ──┘       (any state) ──ClientGone, Reject, hold time──▶ done

What always holds, whatever is lost, repeated or late (`check_stream`):
- a token is appended only for the present epoch and at position == len(tokens): never lost, never twice; so is its
  log probability, where the client asked for them;
- an epoch ends once: a second event that would end it is ignored, as is everything below the highest epoch seen;
- exactly one end, and nothing after it.

A migration is Stop here and Start there at once, with the tokens so far (Punica, section 5.3).
"""

from dataclasses import dataclass

from weft.domain.ids import NEVER, Epoch, RunnerId
from weft.domain.machine import Kind, Peer, Send
from weft.domain.request import (
    Assign,
    Cancel,
    Ended,
    EndReason,
    Failed,
    FailReason,
    FinishReason,
    NoCapacity,
    Preempt,
    Reject,
    RejectReason,
    SequenceTokens,
    Start,
    Started,
    Stop,
)
from weft_gateway.core.detokenise import Detokeniser
from weft_gateway.core.events import SCHEDULER, ClientGone, Emit, Failure, FirstToken, PreparedRequest, RequestAborted
from weft_gateway.core.logprobs import HeldLogprobs
from weft_gateway.core.stops import StopMatcher

UNCOUNTED = frozenset({FailReason.NO_CAPACITY, FailReason.PREEMPTED})  # the system's own doing
_ENDED = {
    EndReason.DRAINED: FailReason.DRAINED,
    EndReason.LOAD_FAILED: FailReason.LOAD_FAILED,
    EndReason.INTERNAL: FailReason.RUNNER_ERROR,
    EndReason.UNKNOWN_ADAPTER: FailReason.LOAD_FAILED,
}
_REJECTED = {
    RejectReason.QUEUE_FULL: ("queue_full", "The queue of this model's pool is full."),
    RejectReason.TOO_LARGE: ("too_large", "The request does not fit the largest runner of its pool."),
    RejectReason.UNKNOWN_POOL: ("model_not_found", "The model's pool does not exist any more."),
    RejectReason.TOO_MANY_MIGRATIONS: ("too_many_migrations", "The request was migrated too many times."),
    RejectReason.ADAPTER_FAILED: ("adapter_failed", "No runner could load the model's adapter."),
    RejectReason.SLO_UNATTAINABLE: (
        "slo_unattainable",
        "The model's pool is too busy to answer within its objective for the first token.",
    ),
    RejectReason.UNKNOWN_ADAPTER: ("model_not_found", "The model was deleted while the request waited."),
}


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The session to that incarnation broke, or the runner's lease ran out."""

    runner: RunnerId
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PoolAvailability:
    """Whether the scheduler is there and the request's pool has a ready runner."""

    available: bool


@dataclass(frozen=True, slots=True)
class HoldExpired:
    """The hold time may be over. `failure` names what was missing."""

    failure: Failure


StreamEvent = (
    SequenceTokens | Assign | Preempt | NoCapacity | Ended | Reject | SessionLost | PoolAvailability | HoldExpired
    | ClientGone | RequestAborted
)  # fmt: skip
StreamEffect = Send | Emit | FirstToken


@dataclass(frozen=True, slots=True)
class End:
    """How a stream ended. `failure` is set when the reason is FAILED."""

    reason: FinishReason
    failure: Failure | None = None


def runner_peer(runner: RunnerId) -> Peer:
    return Peer(Kind.RUNNER, f"{runner.uuid}/{runner.incarnation}")


class RequestStream:
    """One answer of a request that `arrived`, from its submission at `now` (seconds) to its one end.

    `hold_s` bounds the time with nowhere to go. A request that merely queues (new, preempted, or refused by NoCapacity)
    in a pool that is available has somewhere to go: its hold time stands still, for the queue's bound and the client's
    patience end such a wait. The hold time of a request that lost its runner otherwise (crash, drain, error) runs until
    the next assignment. It runs on over assignments that came to nothing and starts again once a runner has begun.
    """

    def __init__(
        self,
        request: PreparedRequest,
        index: int,
        *,
        hold_s: float,
        arrived: float,
        now: float,
        available: bool = False,
    ) -> None:
        self.arrived = arrived
        self.request, self.index, self.request_id = request, index, request.id_of(index)
        self.tokens: list[int] = []
        self.running: Assign | None = None  # the present ownership
        self.highest = NEVER
        self.assignments = 0
        self.counted_migrations = 0  # epochs that ended by anything but the system's own doing
        self.preemptions = 0  # epochs that the system ended, without those that the runner never began
        self.start_tokens = 0  # emitted when the present epoch began
        self.available = available  # a scheduler and a ready runner are there
        self.end: End | None = None
        self.first_token_at: float | None = None
        self._class_before = ""  # numerics class of the tokens of earlier epochs
        self._detokeniser, self._stops = Detokeniser(request.bytes_of), StopMatcher(request.stops)
        self._held_logprobs = HeldLogprobs(request.bytes_of) if request.sampling.top_logprobs is not None else None
        self._begun = False  # the present epoch has produced something
        self._doublings_before = self._doublings_now = 0
        self._queues = True  # without a runner by the system's own doing
        self.hold_s, self._held_before_s = hold_s, 0.0
        self._held_since: float | None = None  # None: the hold time stands still
        self._update_hold(now)

    @property
    def migrations(self) -> int:
        """Assignments beyond the first, for the outcome. A pool's bound on migrations is on the counted ones."""
        return max(0, self.assignments - 1)

    @property
    def numerics_class(self) -> str:
        """Of the runner that computed the latest tokens; "" before the first."""
        if self.running and len(self.tokens) > self.start_tokens:
            return self.running.numerics_class
        return self._class_before

    @property
    def doublings(self) -> int:
        """Reservation doublings over all epochs."""
        return self._doublings_before + self._doublings_now

    @property
    def hold_deadline(self) -> float | None:
        """When the hold time runs out; None while it stands still, and at the end."""
        return None if self._held_since is None else self._held_since + self.hold_s - self._held_before_s

    def handle(self, event: StreamEvent, now: float) -> list[StreamEffect]:
        """What this event changes. An event that counts no more changes nothing."""
        if self.end:
            return []
        effects: list[StreamEffect] = []
        match event:
            case SequenceTokens():
                running = self.running
                effects = self._step(event, now)
                if self.running is running:
                    return effects  # tokens alone move no hold time
            case Assign():
                effects = self._assign(event, now)
            case Preempt():
                effects = self._fail_epoch(event.epoch, FailReason.PREEMPTED, stop=True)
            case NoCapacity():
                effects = self._fail_epoch(event.epoch, FailReason.NO_CAPACITY, event.reason, event.free_pages)
            case Ended():
                effects = self._fail_epoch(event.epoch, _ENDED[event.reason], event.detail)
            case SessionLost(runner, detail):
                if self.running and self.running.runner == runner:
                    effects = self._fail_epoch(self.running.epoch, FailReason.SESSION_LOST, detail)
            case PoolAvailability(available):
                self.available = available
            case HoldExpired(failure):
                if (deadline := self.hold_deadline) is not None and now >= deadline:
                    effects = self._cancel(End(FinishReason.FAILED, failure))
            case Reject():
                code, text = _REJECTED[event.reason]
                failure = Failure(code, f"{text} {event.message}".strip(), event.retry_after_ms)
                effects = self._cancel(End(FinishReason.FAILED, failure), scheduler_knows=True)
            case ClientGone():
                effects = self._cancel(End(FinishReason.CANCELLED))
            case RequestAborted(_, failure):
                effects = self._cancel(End(FinishReason.FAILED, failure))
        self._update_hold(now)
        return effects

    # ---------------------------------------------------------------- ownership

    def _assign(self, assign: Assign, now: float) -> list[StreamEffect]:
        if assign.epoch <= self.highest:
            return []
        effects: list[StreamEffect] = []
        if self.running:
            effects.append(self._stop(self.running))
            self.counted_migrations += 1
        self._class_before = self.numerics_class
        self.running, self.highest, self._begun = assign, assign.epoch, False
        self.assignments, self.start_tokens = self.assignments + 1, len(self.tokens)
        self._close_doublings()
        request = self.request
        start = Start(
            request_id=self.request_id,
            epoch=assign.epoch,
            prompt=request.prompt,
            emitted=tuple(self.tokens),
            max_tokens=request.max_tokens,
            reservation_tokens=assign.reservation_tokens,
            adapter=request.route.adapter,
            rank=assign.rank,
            adapter_bytes=assign.adapter_bytes,
            sampling=request.sampling_of(self.index),
            cache_salt=request.namespace,
            client_request_id=request.client_request_id,
            waited_s=now - self.arrived,
            delay_s=assign.delay_s,
            by_page=assign.by_page,
            leaves=assign.leaves,
            stays=assign.stays,
        )
        return [*effects, Send(runner_peer(assign.runner), start)]

    def _fail_epoch(
        self, epoch: Epoch, reason: FailReason, detail: str = "", free_pages: int = 0, *, stop: bool = False
    ) -> list[StreamEffect]:
        """The present epoch is over: hold the stream until the next assignment. `stop`: the runner does not know."""
        if not self.running or epoch != self.running.epoch:
            return []
        stops: list[StreamEffect] = [self._stop(self.running)] if stop else []
        self._class_before = self.numerics_class
        self.running, self._queues = None, reason in UNCOUNTED
        self.counted_migrations += not self._queues
        produced = len(self.tokens) > self.start_tokens
        self.preemptions += reason is FailReason.PREEMPTED or (reason is FailReason.NO_CAPACITY and produced)
        failed = Failed(self.request_id, epoch, reason, len(self.tokens), free_pages, detail)
        return [*stops, Send(SCHEDULER, failed)]

    def _update_hold(self, now: float) -> None:
        """The hold time runs exactly while the request has nowhere to go."""
        stands = bool(self.running or self.end or (self._queues and self.available))
        if not stands and self._held_since is None:
            self._held_since = now
        elif stands and self._held_since is not None:
            self._held_before_s += now - self._held_since
            self._held_since = None

    def _cancel(self, end: End, *, scheduler_knows: bool = False) -> list[StreamEffect]:
        """The end from outside: stop the runner, cancel at the scheduler."""
        effects: list[StreamEffect] = [self._stop(self.running)] if self.running else []
        if not scheduler_knows:
            effects.append(Send(SCHEDULER, Cancel(self.request_id, len(self.tokens))))
        self._finish(end)
        return effects

    def _stop(self, running: Assign) -> Send:
        return Send(runner_peer(running.runner), Stop(self.request_id, running.epoch))

    # ---------------------------------------------------------------- tokens

    def _step(self, event: SequenceTokens, now: float) -> list[StreamEffect]:
        running, seen = self.running, len(self.tokens)
        if running is None or event.epoch != running.epoch or event.position < seen:
            return []
        if event.position > seen:
            detail = f"tokens {seen}..{event.position} never came"
            return self._fail_epoch(event.epoch, FailReason.RUNNER_ERROR, detail, stop=True)
        if self._held_logprobs and len(event.logprobs) != len(event.tokens):
            detail = f"{len(event.tokens)} tokens came with {len(event.logprobs)} usable log probabilities"
            return self._fail_epoch(event.epoch, FailReason.RUNNER_ERROR, detail, stop=True)
        self._doublings_now = event.doublings
        text = self._append(event)
        effects: list[StreamEffect] = []
        if not self._begun:
            self._begun, self._held_before_s = True, 0.0  # a stream that ran may be held for the full time again
            if self.first_token_at is None:
                self.first_token_at = now
            effects += [FirstToken(self.request_id), Send(SCHEDULER, Started(self.request_id, event.epoch))]
        reason = event.finish
        if self._stops.matched:
            reason = FinishReason.STOP
        elif reason is None and len(self.tokens) >= self.request.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            if event.finish is None:
                effects.append(self._stop(running))  # the runner does not know of the end
            if reason is not FinishReason.STOP:
                text += self._stops.push(self._detokeniser.flush()) + self._stops.flush()
        if self._held_logprobs is None:
            if text:
                effects.append(Emit(self.request_id, text))
        else:
            released = self._held_logprobs.release(len(text))
            if self._stops.matched:
                released += self._held_logprobs.cut()
            if text or released:
                effects.append(Emit(self.request_id, text, released))
        if reason is not None:
            self._finish(End(reason))
        return effects

    def _append(self, event: SequenceTokens) -> str:
        """Take tokens up to a stop string or max_tokens; the text that is certain."""
        text, tokens, stops, held = "", self.tokens, self._stops, self._held_logprobs
        for index, token in enumerate(event.tokens[: self.request.max_tokens - len(tokens)]):
            tokens.append(token)
            chars = self._detokeniser.push(token)
            if held is not None:
                held.push(token, event.logprobs[index], len(chars), self._detokeniser.begun)
            text += stops.push(chars)
            if stops.matched:
                break
        return text

    def _finish(self, end: End) -> None:
        self.running, self.end = None, end
        self._close_doublings()

    def _close_doublings(self) -> None:
        self._doublings_before += self._doublings_now
        self._doublings_now = 0


def check_stream(stream: RequestStream) -> None:
    """What must hold of a stream after every event. Raises AssertionError."""
    assert len(stream.tokens) <= stream.request.max_tokens, "more tokens than were asked for"
    assert stream.running is None or stream.running.epoch == stream.highest, "an old epoch runs"
    assert stream.running is None or stream.end is None, "an ended request runs"
    assert stream.assignments == 0 or stream.highest > NEVER, "assigned without an epoch"
    failed = stream.end is not None and stream.end.reason is FinishReason.FAILED
    assert failed == (stream.end is not None and stream.end.failure is not None), "a failure has a name"

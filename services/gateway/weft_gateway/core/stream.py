"""One request as a pure machine: `handle(event, now) -> [effects]`.

    held ──Assigned──▶ running ──EOS, LENGTH, stop string──▶ done
      ▲                   │
      └── preempt, runner lost, no room, ended ──┘           (any state) ──client gone, reject, hold──▶ done

What always holds, whatever is lost, repeated or late (`check_stream`):
- a token is appended only for the present epoch and at position == len(tokens): never lost, never twice; so is its
  log probability, where the client asked for them;
- a trigger ends an epoch once: a second one is ignored, as is everything below the highest epoch seen;
- exactly one Finish, and nothing after it.

A move is cancel here and start there at once, with the tokens so far (Punica, section 5.3).
"""

from collections.abc import Sequence

from weft.identities import NEVER
from weft_gateway.core.detokenise import BytesOf, Detokeniser
from weft_gateway.core.events import (
    Aborted,
    Assigned,
    Cancel,
    ClientGone,
    Effect,
    Emit,
    Epoch,
    EpochEnded,
    Event,
    Failed,
    FailedReason,
    Failure,
    Finish,
    FinishReason,
    HoldExpired,
    PoolAvailability,
    Preempted,
    Rejected,
    RunnerLost,
    Start,
    Started,
    StepTokens,
    Stop,
)
from weft_gateway.core.logprobs import HeldLogprobs
from weft_gateway.core.stops import StopMatcher

UNCOUNTED = frozenset({FailedReason.NO_ROOM, FailedReason.PREEMPTED})  # the system's own doing


class Stream:
    """One request from its submission at `now` (seconds) to its one Finish.

    `hold_s` bounds the time with nowhere to go. A request that merely queues (new, preempted, or told NoRoom) in a pool
    that is served has somewhere to go: its clock stands, for the queue's bound and the client's patience end such a
    wait. The clock of one that lost its runner otherwise (crash, drain, error) runs until it is assigned. It runs on
    over assignments that came to nothing and starts anew once a runner has admitted the request.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        bytes_of: BytesOf,
        stops: Sequence[str] = (),
        logprobs: bool = False,
        hold_s: float,
        now: float,
        served: bool = False,
    ) -> None:
        self.tokens: list[int] = []
        self.max_tokens = max_tokens
        self.running: Assigned | None = None  # the present ownership
        self.highest = NEVER
        self.assignments = 0
        self.counted_moves = 0  # epochs that ended by anything but the system's own doing
        self.start_tokens = 0  # emitted when the present epoch began
        self.served = served  # a scheduler and a ready runner are there
        self.finish: Finish | None = None
        self._class_before = ""  # numerics class of the tokens of earlier epochs
        self._detokeniser, self._stops = Detokeniser(bytes_of), StopMatcher(stops)
        self._held_logprobs = HeldLogprobs(bytes_of) if logprobs else None
        self._admitted = False  # the present epoch has produced something
        self._doublings_before = self._doublings_now = 0
        self._queues = True  # without a runner by the system's own doing
        self.hold_s, self._held_before_s = hold_s, 0.0
        self._held_since: float | None = None  # None: the clock stands
        self._wind(now)

    @property
    def moves(self) -> int:
        """Assignments beyond the first, for the outcome. `maxMoves` bounds `counted_moves`."""
        return max(0, self.assignments - 1)

    @property
    def numerics_class(self) -> str:
        """Of the runner that computed the latest tokens; none before the first."""
        if self.running and len(self.tokens) > self.start_tokens:
            return self.running.numerics_class
        return self._class_before

    @property
    def doublings(self) -> int:
        """Reservation doublings over all epochs."""
        return self._doublings_before + self._doublings_now

    @property
    def hold_deadline(self) -> float | None:
        """When the hold runs out; None while a runner has the request or its clock stands, and at the end."""
        return None if self._held_since is None else self._held_since + self.hold_s - self._held_before_s

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What this event changes. An event that counts no more changes nothing."""
        if self.finish:
            return []
        effects = self._dispatch(event, now)
        self._wind(now)
        return effects

    def _dispatch(self, event: Event, now: float) -> list[Effect]:
        match event:
            case StepTokens():
                return self._step(event)
            case Assigned():
                return self._assigned(event)
            case Preempted(epoch):
                return self._broken(epoch, FailedReason.PREEMPTED, stop=True)
            case RunnerLost(runner, detail):
                return self._lost(detail) if self.running and self.running.runner == runner else []
            case EpochEnded(epoch, reason, detail, free_pages):
                return self._broken(epoch, reason, detail=detail, free_pages=free_pages)
            case PoolAvailability(served):
                self.served = served
                return []
            case HoldExpired(failure):
                return self._expired(failure, now)
            case ClientGone():
                return self._end(Finish(FinishReason.CANCELLED))
            case Rejected(failure):
                return self._end(Finish(FinishReason.FAILED, failure), cancel=False)
            case Aborted(failure):
                return self._end(Finish(FinishReason.FAILED, failure))

    # ---------------------------------------------------------------- ownership

    def _assigned(self, event: Assigned) -> list[Effect]:
        if event.epoch <= self.highest:
            return []
        effects: list[Effect] = []
        if self.running:
            effects.append(Stop(self.running.epoch, self.running.runner))
            self.counted_moves += 1
        self._class_before = self.numerics_class
        self.running, self.highest, self._admitted = event, event.epoch, False
        self.assignments, self.start_tokens = self.assignments + 1, len(self.tokens)
        self._close_doublings()
        start = Start(event.epoch, event.runner, event.address, tuple(self.tokens), event.reservation_tokens)
        return [*effects, start]

    def _lost(self, detail: str) -> list[Effect]:
        assert self.running
        return self._broken(self.running.epoch, FailedReason.SESSION_LOST, detail=detail)

    def _broken(
        self,
        epoch: Epoch,
        reason: FailedReason,
        *,
        detail: str = "",
        free_pages: int = 0,
        stop: bool = False,
    ) -> list[Effect]:
        """The present epoch is over: hold the stream until the next assignment."""
        if not self.running or epoch != self.running.epoch:
            return []
        stops = [Stop(epoch, self.running.runner)] if stop else []
        self._class_before = self.numerics_class
        self.running, self._queues = None, reason in UNCOUNTED
        self.counted_moves += not self._queues
        return [*stops, Failed(epoch, reason, len(self.tokens), free_pages, detail)]

    def _wind(self, now: float) -> None:
        """The hold's clock runs exactly while the request has nowhere to go."""
        stands = bool(self.running or self.finish or (self._queues and self.served))
        if not stands and self._held_since is None:
            self._held_since = now
        elif stands and self._held_since is not None:
            self._held_before_s += now - self._held_since
            self._held_since = None

    def _expired(self, failure: Failure, now: float) -> list[Effect]:
        deadline = self.hold_deadline
        if deadline is None or now < deadline:
            return []
        return self._end(Finish(FinishReason.FAILED, failure))

    def _end(self, finish: Finish, *, cancel: bool = True) -> list[Effect]:
        """The end from outside: the runner is stopped, the scheduler told."""
        effects: list[Effect] = [Stop(self.running.epoch, self.running.runner)] if self.running else []
        if cancel:
            effects.append(Cancel())
        return [*effects, self._finish(finish)]

    # ---------------------------------------------------------------- tokens

    def _step(self, event: StepTokens) -> list[Effect]:
        if not self.running or event.epoch != self.running.epoch or event.position < len(self.tokens):
            return []
        if event.position > len(self.tokens):
            detail = f"tokens {len(self.tokens)}..{event.position} never came"
            return self._broken(event.epoch, FailedReason.RUNNER_ERROR, detail=detail, stop=True)
        if self._held_logprobs and len(event.logprobs) != len(event.tokens):
            detail = f"{len(event.tokens)} tokens came with {len(event.logprobs)} usable log probabilities"
            return self._broken(event.epoch, FailedReason.RUNNER_ERROR, detail=detail, stop=True)
        self._doublings_now = event.doublings
        text = self._append(event)
        effects = self._admit(event)
        if self._stops.matched:
            return [*effects, *self._last(text, FinishReason.STOP, stop=event.finish is None)]
        finish = FinishReason.LENGTH if len(self.tokens) >= self.max_tokens else None
        if event.finish or finish:
            return [*effects, *self._last(text, event.finish or FinishReason.LENGTH, stop=event.finish is None)]
        return [*effects, *self._emit(text)]

    def _append(self, event: StepTokens) -> str:
        """Take tokens up to a stop string or max_tokens; the text that is certain."""
        text = ""
        for index, token in enumerate(event.tokens[: self.max_tokens - len(self.tokens)]):
            self.tokens.append(token)
            chars = self._detokeniser.push(token)
            if self._held_logprobs:
                self._held_logprobs.push(token, event.logprobs[index], len(chars), self._detokeniser.begun)
            text += self._stops.push(chars)
            if self._stops.matched:
                break
        return text

    def _emit(self, text: str) -> list[Emit]:
        """This text, with the log probabilities that are due with it."""
        if self._held_logprobs is None:
            return [Emit(text)] if text else []
        told = self._held_logprobs.release(len(text))
        if self._stops.matched:
            told += self._held_logprobs.cut()
        return [Emit(text, told)] if text or told else []

    def _admit(self, event: StepTokens) -> list[Effect]:
        """The first sign of life of an epoch. A stream that ran may be held for the full time again."""
        if self._admitted:
            return []
        self._admitted, self._held_before_s = True, 0.0
        return [Started(event.epoch)]

    def _last(self, text: str, reason: FinishReason, *, stop: bool) -> list[Effect]:
        """The last text and the end. `stop`: the runner does not know yet."""
        assert self.running
        effects: list[Effect] = [Stop(self.running.epoch, self.running.runner)] if stop else []
        if reason is not FinishReason.STOP:
            text += self._stops.push(self._detokeniser.flush()) + self._stops.flush()
        return [*effects, *self._emit(text), self._finish(Finish(reason))]

    def _finish(self, finish: Finish) -> Finish:
        self.running, self.finish = None, finish
        self._close_doublings()
        return finish

    def _close_doublings(self) -> None:
        self._doublings_before += self._doublings_now
        self._doublings_now = 0


def check_stream(stream: Stream) -> None:
    """What must hold of a stream after every event. Raises AssertionError."""
    assert len(stream.tokens) <= stream.max_tokens, "more tokens than were asked for"
    assert stream.running is None or stream.running.epoch == stream.highest, "an old epoch runs"
    assert stream.running is None or stream.finish is None, "an ended request runs"
    assert stream.assignments == 0 or stream.highest > NEVER, "assigned without an epoch"
    failed = stream.finish is not None and stream.finish.reason is FinishReason.FAILED
    assert failed == (stream.finish is not None and stream.finish.failure is not None), "a failure has a name"

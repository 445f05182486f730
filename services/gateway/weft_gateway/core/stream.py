"""An answer of a request as a pure machine: `handle(event, now) -> [effects]`.

    held ──Assign──▶ running ──EOS, LENGTH, stop string or token──▶ done
      ▲                │
      └── Preempt, SessionLost, NoCapacity, Ended ──┘       (any state) ──ClientGone, Reject, hold time──▶ done

An epoch may have two runners. The first runner computes the prompt and the first token. It sends its KV to the second
runner for the following tokens (Splitwise, section 4.2). In a migration with KV, the runner of the previous epoch sends
it (Freeze there, Frozen, Start here). Both runners speak for the epoch until the second runner's first token; from then
on only the second runner does.

Invariants under lost, repeated and late messages (`RequestStream.check`):
- a token is appended only for the present epoch and at position == len(tokens): never lost, never twice; so is its
  log probability, if the client asked for them;
- an epoch ends once: a second end is ignored, and so is everything below the highest epoch seen;
- exactly one end, and nothing after it.

A migration without KV is Stop here and Start there at once, with the tokens so far (Punica, section 5.3).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from weft.domain.ids import NEVER, Epoch, RunnerId
from weft.domain.machine import Kind, Peer, Send
from weft.domain.prediction import Prediction
from weft.domain.request import (
    Assign,
    Cancel,
    DraftUse,
    Ended,
    EndReason,
    Failed,
    FailReason,
    FinishReason,
    Freeze,
    Frozen,
    KvTarget,
    NoCapacity,
    Outcome,
    PooledState,
    Preempt,
    Priority,
    PromptLogprobs,
    Reject,
    RejectReason,
    Sampling,
    SequenceTokens,
    Start,
    Started,
    Stop,
    Submit,
    TokenLogprob,
    TokenRunner,
)
from weft_gateway.core.answer_text import AnswerText
from weft_gateway.core.events import (
    SCHEDULER,
    ClientGone,
    Emit,
    End,
    Failure,
    FirstToken,
    PreparedRequest,
    RequestAborted,
)

UNCOUNTED = frozenset({FailReason.NO_CAPACITY, FailReason.PREEMPTED})  # decisions of the system
_ENDED = {
    EndReason.DRAINED: FailReason.DRAINED,
    EndReason.LOAD_FAILED: FailReason.LOAD_FAILED,
    EndReason.INTERNAL: FailReason.RUNNER_ERROR,
    EndReason.UNKNOWN_ADAPTER: FailReason.LOAD_FAILED,
    EndReason.RUNNER_FULL: FailReason.RUNNER_FULL,
    EndReason.KV_LOST: FailReason.KV_LOST,
    EndReason.GRAMMAR: FailReason.RUNNER_ERROR,  # of an ended epoch
}
_REJECTED = {
    RejectReason.QUEUE_FULL: ("queue_full", "The queue of this model's pool is full."),
    RejectReason.TOO_LARGE: ("too_large", "The request does not fit the largest runner of its pool."),
    RejectReason.UNKNOWN_POOL: ("model_not_found", "The model's pool does not exist any more."),
    RejectReason.TOO_MANY_MIGRATIONS: ("too_many_migrations", "The request was migrated too many times."),
    RejectReason.ADAPTER_FAILED: ("adapter_failed", "No runner could load the model's adapter."),
    RejectReason.RUNNER_FULL: ("runner_full", "Storage is full: no runner has room for the model's adapter."),
    RejectReason.SLO_UNATTAINABLE: (
        "slo_unattainable",
        "The model's pool is too busy to answer within its objective for the first token.",
    ),
    RejectReason.UNKNOWN_ADAPTER: ("model_not_found", "The model was deleted while the request waited."),
}


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The loss of a runner: the session to its incarnation broke, or its lease ran out."""

    runner: RunnerId
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PoolAvailability:
    """Whether the scheduler is connected and the request's pool has a ready runner."""

    available: bool


@dataclass(frozen=True, slots=True)
class HoldExpired:
    """A possible end of the hold time. `failure` names the missing part."""

    failure: Failure


StreamEvent = (
    SequenceTokens | Assign | Preempt | NoCapacity | Ended | Reject | SessionLost | PoolAvailability | HoldExpired
    | ClientGone | RequestAborted | Frozen | PromptLogprobs | PooledState
)  # fmt: skip
StreamEffect = Send | Emit | FirstToken


class Located(NamedTuple):
    """A runner, the address of its gRPC server, and its peer."""

    runner: RunnerId
    address: str
    peer: Peer


def runner_peer(runner: RunnerId) -> Peer:
    return Peer(Kind.RUNNER, f"{runner.uuid}/{runner.incarnation}")


def _located(place: Assign | TokenRunner) -> Located:
    return Located(place.runner, place.address, runner_peer(place.runner))


class RequestStream:
    """An answer of a request, from its submission at `now` to its end. The request arrived at `arrived` (seconds).

    `hold_s` bounds the time without a destination. A queued request (new, preempted, or refused by NoCapacity) in an
    available pool has a destination. Its hold time stands still, because the queue's bound and the client's patience
    end the wait. If a request lost its runner otherwise (crash, drain, error), its hold time runs until the next
    assignment. It continues after a failed assignment, and restarts once a runner has begun. A line of a batch has no
    hold time: its submitter ends it.
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
        priority: Priority = Priority.INTERACTIVE,
        prediction: Prediction | None = None,
    ) -> None:
        self.arrived, self.priority = arrived, priority
        self.request, self._index, self.request_id = request, index, request.answers[index]
        self._prediction = prediction or Prediction(request.request_id)
        self.tokens: list[int] = []
        self.draft_use = DraftUse()  # of all epochs
        self.running: Assign | None = None  # the present ownership
        self.runners: tuple[Located, ...] = ()  # runners of the request; a new tuple at each change
        self.migrations = 0  # assignments beyond the first, for the outcome
        self.counted_migrations = 0  # failed epochs, without epochs ended by the system or moved with their KV
        self.preemptions = 0  # epochs ended by the system after the runner had begun
        self.start_tokens = 0  # emitted when the present epoch began
        self.end: End | None = None
        self.first_token_at: float | None = None
        self._cached_tokens = 0  # tokens of the prompt reused by the first runner with a token
        self.hold_deadline: float | None = None  # when the hold time runs out; None while it stands still
        self._receiver: RunnerId | None = None  # the runner still waiting for the KV
        self._freezing: Assign | None = None  # the previous epoch, while its runner stops and sends its KV
        self._highest = NEVER
        self._available = available  # a scheduler and a ready runner are there
        self._class_before = ""  # numerics class of the tokens of earlier epochs
        # Log probabilities of the prompt so far, None for its first token. None: no more to report. They belong to the
        # first answer.
        has_logprobs = request.sampling.prompt_logprobs is not None and index == 0
        self._prompt_logprobs: list[TokenLogprob | None] | None = [None] if has_logprobs else None
        self._state = b""  # of a pooled request
        self._begun = False  # the present epoch has produced something
        self.doublings = self._doublings_now = 0  # of reservations: over all epochs, in the present epoch
        self._queues = True  # has no runner by the system's decision
        self._hold_s, self._held_before_s = hold_s, 0.0
        self._held_since: float | None = None  # None: the hold time stands still
        self._update_hold(now)

    @cached_property
    def _text(self) -> AnswerText:
        """Return the text of the answer. It is made with the first token, because many answers wait before theirs."""
        return AnswerText(self.request)

    @property
    def numerics_class(self) -> str:
        """Return the numerics class of the runner of the latest tokens; "" before the first token."""
        running = self.running
        if running is None or self._freezing is not None or len(self.tokens) == self.start_tokens:
            return self._class_before
        second = running.token_runner
        return running.numerics_class if second is None or self._receiver is not None else second.numerics_class

    @property
    def _placement(self) -> tuple[RunnerId | None, RunnerId | None]:
        """Return the runner of the epoch, or the runner that took over; and the runner still to take over."""
        running = self.running
        if running is None or (second := running.token_runner) is None:
            return running.runner if running else None, None
        return (second.runner, None) if self._receiver is None else (running.runner, second.runner)

    def speaks(self, runner: RunnerId) -> bool:
        """Whether the runner may speak for the present epoch, or could when it sent its message."""
        assert self.running is not None
        return runner == self.running.runner or any(located.runner == runner for located in self.runners)

    def _has_left(self, epoch: Epoch, runner: RunnerId | None) -> bool:
        """Whether the runner has handed over the present epoch: its end at the runner then changes nothing."""
        present = self.running is not None and epoch == self.running.epoch
        return present and runner is not None and all(located.runner != runner for located in self.runners)

    @property
    def pool(self) -> str:
        return self.request.route.pool

    def submit(self, now: float) -> Submit:
        """Return the request for the scheduler, new or again: with its age and its runners."""
        request, running, prediction = self.request, self.running, self._prediction
        runner, token_runner = self._placement
        return Submit(
            request_id=self.request_id,
            pool=request.route.pool,
            namespace=request.namespace,
            model_name=request.route.model_name,
            adapter=request.route.digest,
            prompt_tokens=len(request.prompt),
            max_tokens=request.max_tokens,
            open_ended=request.open_ended,
            emitted_tokens=len(self.tokens),
            p10_tokens=prediction.p10_tokens,
            p50_tokens=prediction.p50_tokens,
            p90_tokens=prediction.p90_tokens,
            p99_tokens=prediction.p99_tokens,
            bucket_tokens=prediction.bucket_tokens,
            waited_s=now - self.arrived,
            epoch=running.epoch if running else Epoch(),
            runner=runner,
            migrations=self.counted_migrations,
            preemptions=self.preemptions,
            reservation_tokens=running.reservation_tokens if running else 0,
            start_emitted_tokens=self.start_tokens if running else 0,
            numerics_class=self.numerics_class,
            token_runner=token_runner,
            priority=self.priority,
            traceparent=request.traceparent,
        )

    def outcome(self, total_s: float, ttft_s: float | None) -> Outcome:
        """Return the final record of the answer.

        Censored: the real length is at least the present length (cut by a limit, the client, or a failure). A stop
        string is the client's end, so it gives the real length.
        """
        request, end, prediction = self.request, self.end, self._prediction
        assert end is not None
        total_ms = round(1000 * total_s)
        return Outcome(
            request_id=self.request_id,
            pool=request.route.pool,
            namespace=request.namespace,
            model_name=request.route.model_name,
            adapter=request.route.digest,
            prompt_tokens=len(request.prompt),
            completion_tokens=len(self.tokens),
            finish=end.reason,
            finished_unix_ms=request.arrived_unix_ms + total_ms,
            error=end.failure.code if end.failure else "",
            censored=end.reason not in (FinishReason.EOS, FinishReason.STOP),
            predicted_p50_tokens=prediction.p50_tokens,
            predicted_p90_tokens=prediction.p90_tokens,
            model_version=prediction.model_version,
            ttft_ms=0 if ttft_s is None else round(1000 * ttft_s),
            total_ms=total_ms,
            migrations=self.migrations,
            doublings=self.doublings,
            choice=self._index,
            key_id=request.key_id,
        )

    def handle(self, event: StreamEvent, now: float, runner: RunnerId | None = None) -> list[StreamEffect]:
        """Return the effects of an event; `runner`: its sender. An outdated event changes nothing."""
        if self.end:
            return []
        effects: list[StreamEffect] = []
        match event:
            case SequenceTokens():
                running = self.running
                effects = self._step(event, now)
                if self._receiver is not None and self._receiver == runner and event.epoch == self._highest:
                    effects += self._hand_over()
                if self.running is running:
                    return effects  # tokens do not change the hold time
            case PromptLogprobs():
                effects = self._take_prompt_logprobs(event, now)
            case PooledState():
                effects = self._take_state(event, now)
            case Frozen():
                effects = self._frozen(event, now)
            case Assign():
                effects = self._assign(event, now)
            case Preempt():
                effects = self._fail_epoch(event.epoch, FailReason.PREEMPTED, stop=True)
            case NoCapacity() | Ended() if self._freezing and event.epoch == self._freezing.epoch:
                effects = self._recompute(now)
            case NoCapacity() | Ended() if self._has_left(event.epoch, runner):
                pass
            case NoCapacity():
                reason, pages = FailReason.NO_CAPACITY, event.free_pages
                effects = self._fail_epoch(event.epoch, reason, event.reason, pages, runner=runner)
            case Ended() if event.reason is EndReason.GRAMMAR and self.running and event.epoch == self.running.epoch:
                effects = self._cancel(End(FinishReason.FAILED, Failure("grammar_failed", event.detail)))
            case Ended():
                effects = self._fail_epoch(event.epoch, _ENDED[event.reason], event.detail, runner=runner)
            case SessionLost(lost, detail):
                if self.running and any(located.runner == lost for located in self.runners):
                    if self._freezing:
                        effects = self._recompute(now)
                    else:
                        reason = FailReason.SESSION_LOST
                        effects = self._fail_epoch(self.running.epoch, reason, detail, runner=lost)
            case PoolAvailability(available):
                self._available = available
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
        if assign.epoch <= self._highest:
            return []
        self.migrations += self._highest > NEVER
        previous, self._highest = self.running, assign.epoch
        self._class_before = self.numerics_class
        self.counted_migrations += previous is not None and not assign.kv_address
        if previous and assign.kv_address and not self._freezing and self._receiver is None:
            self.running, self._freezing = assign, previous
            target = KvTarget(assign.runner, assign.kv_address)
            (source,) = self.runners
            return [Send(source.peer, Freeze(self.request_id, previous.epoch, assign.epoch, target))]
        stops = self._stop_all()
        self.running = assign
        return [*stops, *self._recompute(now)]

    def _frozen(self, frozen: Frozen, now: float) -> list[StreamEffect]:
        """Take over from the previous epoch. All its tokens are here, and its KV is on the way to the new runner."""
        freezing, running = self._freezing, self.running
        if freezing is None or running is None or frozen.epoch != freezing.epoch:
            return []
        if frozen.emitted_tokens != len(self.tokens):
            return [*self._stop_all(), *self._recompute(now)]
        (source,), self._freezing = self.runners, None
        self.runners, self._receiver = (source, _located(running)), running.runner
        return [self._start(running, now, kv_from=source.runner)]

    def _recompute(self, now: float) -> list[StreamEffect]:
        """Start the present epoch with the tokens so far, on its single runner or on both."""
        running, self._freezing = self.running, None
        assert running is not None
        self.runners, self._receiver = (_located(running),), None
        if (second := running.token_runner) is None:
            return [self._start(running, now)]
        self.runners, self._receiver = (*self.runners, _located(second)), second.runner
        return [self._start(running, now, kv_from=running.runner), self._start(running, now, kv_to=second)]

    def _hand_over(self) -> list[StreamEffect]:
        """Hand the epoch to the runner with the received KV, at its first tokens."""
        assert self.running is not None
        self.runners = tuple([located for located in self.runners if located.runner == self._receiver])
        self._receiver = None
        return [Send(SCHEDULER, Started(self.request_id, self.running.epoch, handed_off=True))]

    def _start(
        self, assign: Assign, now: float, *, kv_from: RunnerId | None = None, kv_to: TokenRunner | None = None
    ) -> Send:
        """Return the Start for a runner: the receiver of KV, its sender, or the only runner."""
        self._begun, self.start_tokens, self._doublings_now = False, len(self.tokens), 0
        request, prompt_only = self.request, kv_to is not None
        start = Start(
            request_id=self.request_id,
            epoch=assign.epoch,
            prompt=request.prompt,
            emitted=tuple(self.tokens),
            max_tokens=request.max_tokens,
            reservation_tokens=1 if prompt_only else assign.reservation_tokens,
            adapter=request.route.digest,
            sampling=self._sampling(),
            cache_salt=_salt(request.namespace, request.cache_salt),
            client_request_id=request.client_request_id,
            waited_s=now - self.arrived,
            allotment=assign.allotment._replace(by_page=False, leaves=False) if prompt_only else assign.allotment,
            kv_to=None if kv_to is None else KvTarget(kv_to.runner, kv_to.kv_address),
            kv_from=kv_from,
            priority=self.priority,
            model_name=request.route.model_name,
            traceparent=request.traceparent,
            draft=() if prompt_only else request.draft,
        )
        runner = assign.runner if prompt_only or self._receiver is None else self._receiver
        return Send(runner_peer(runner), start)

    def _sampling(self) -> Sampling:
        """Return the sampling of a Start: each answer is sampled from (seed, index).

        The prompt's log probabilities are requested only for the first answer, and only if some are missing.
        """
        sampling, prompt_logprobs = self.request.sampling, self._prompt_logprobs
        misses = prompt_logprobs is not None and len(prompt_logprobs) < len(self.request.prompt)
        if self._index == 0 and (misses or sampling.prompt_logprobs is None):
            return sampling
        return replace(sampling, choice=self._index, prompt_logprobs=sampling.prompt_logprobs if misses else None)

    def _fail_epoch(
        self, epoch: Epoch, reason: FailReason, detail: str = "", free_pages: int = 0, *, stop: bool = False,
        runner: RunnerId | None = None,
    ) -> list[StreamEffect]:  # fmt: skip
        """End the present epoch: hold the stream until the next assignment.

        `stop`: the runner does not know of the end. `runner`: the failed runner of the two.
        """
        blamed = runner if len(self.runners) > 1 else None
        if not self.running or epoch != self.running.epoch:
            return []
        preempted = reason is FailReason.PREEMPTED
        stops = self._stop_all(preempted=preempted) if stop or len(self.runners) > 1 or self._freezing else []
        self._class_before = self.numerics_class
        self._leave_runners()
        self._queues = reason in UNCOUNTED
        self.counted_migrations += not self._queues
        produced = len(self.tokens) > self.start_tokens
        self.preemptions += reason is FailReason.PREEMPTED or (reason is FailReason.NO_CAPACITY and produced)
        failed = Failed(self.request_id, epoch, reason, len(self.tokens), free_pages, detail, blamed)
        return [*stops, Send(SCHEDULER, failed)]

    def _update_hold(self, now: float) -> None:
        """Start or stop the hold time: it runs exactly while the request has no destination."""
        waits = self.priority is Priority.BATCH or (self._queues and self._available)
        stands = bool(self.running or self.end or waits)
        if not stands and self._held_since is None:
            self._held_since = now
        elif stands and self._held_since is not None:
            self._held_before_s += now - self._held_since
            self._held_since = None
        held_since = self._held_since
        self.hold_deadline = None if held_since is None else held_since + self._hold_s - self._held_before_s

    def _cancel(self, end: End, *, scheduler_knows: bool = False) -> list[StreamEffect]:
        """End the answer from outside: stop the runner, cancel at the scheduler."""
        effects = self._stop_all(end.reason)
        if not scheduler_knows:
            effects.append(Send(SCHEDULER, Cancel(self.request_id, len(self.tokens))))
        self._finish(end)
        return effects

    def _stop_all(self, finish: FinishReason | None = None, *, preempted: bool = False) -> list[StreamEffect]:
        """Return a Stop for every runner of the request. Of two runners the first counts the finish."""
        if self.running is None:
            return []
        epoch, finishes = self.running.epoch, (finish, None)
        return [
            Send(located.peer, Stop(self.request_id, epoch, of_one, preempted))
            for located, of_one in zip(self.runners, finishes, strict=False)
        ]

    def _leave_runners(self) -> None:
        self.running = self._freezing = self._receiver = None
        self.runners = ()

    # ---------------------------------------------------------------- tokens

    def _step(self, event: SequenceTokens, now: float) -> list[StreamEffect]:
        running, seen = self._freezing or self.running, len(self.tokens)
        if running is None or event.epoch != running.epoch or event.position < seen:
            return []
        if event.position > seen:
            return self._broken(f"tokens {seen}..{event.position} never came", now)
        if (of_prompt := self._prompt_logprobs) is not None and len(of_prompt) < len(self.request.prompt):
            return self._broken(f"log probabilities of the prompt never came from {len(of_prompt)} on", now)
        if self.request.sampling.pooling and not self._state:
            return self._broken("the hidden state of the prompt never came", now)
        if self.request.sampling.top_logprobs is not None and len(event.logprobs) != len(event.tokens):
            return self._broken(
                f"{len(event.tokens)} tokens came with {len(event.logprobs)} usable log probabilities", now
            )
        self.doublings += event.doublings - self._doublings_now
        self._doublings_now = event.doublings
        text = self._text.append(event, self.tokens)
        if event.draft_use is not None:  # tokens cut by a stop string do not belong to the answer
            accepted, rejected = event.draft_use
            n_tokens = min(accepted, len(self.tokens) - seen)
            self.draft_use = DraftUse(
                self.draft_use.accepted + n_tokens, self.draft_use.rejected + accepted - n_tokens + rejected
            )
        effects: list[StreamEffect] = []
        if not self._begun:
            self._begun, self._held_before_s = True, 0.0  # a stream that ran has the full hold time again
            if self.first_token_at is None:
                self.first_token_at = now
                self._cached_tokens = min(event.cached_tokens, len(self.request.prompt))
            began = FirstToken(self.request_id, self._cached_tokens)
            effects += [began, Send(SCHEDULER, Started(self.request_id, event.epoch))]
        if of_prompt is not None:
            effects.append(Emit(self.request_id, "", prompt_logprobs=of_prompt))
            self._prompt_logprobs = None
        if self._state:
            effects.append(Emit(self.request_id, "", state=self._state))
        reason = event.finish
        if self._text.stop:
            reason = FinishReason.STOP
        elif reason is None and len(self.tokens) >= self.request.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            if event.finish is None or len(self.runners) > 1:
                effects += self._stop_all(reason if event.finish is None else None)  # a runner does not know of the end
            text += self._text.flush()
        released = self._text.release(len(text))
        new = tuple(self.tokens[seen:]) if self.request.returns_tokens else ()
        starts = self._text.take_starts() if self.request.may_reason else ()
        if text or released or new or starts:
            emit = Emit(self.request_id, text, released, len(self.tokens), new, token_starts=starts)
            effects.append(emit)
        if reason is not None:
            self._finish(End(reason, stop=self._stopped_by(reason)))
        return effects

    def _stopped_by(self, reason: FinishReason) -> str | int | None:
        """Return the final stop string, else the final stop token; None: the answer ended otherwise."""
        if reason is not FinishReason.STOP or self._text.stop:
            return self._text.stop
        return self.tokens[-1] if self.tokens[-1] in self.request.sampling.stop_token_ids else None

    def _take_prompt_logprobs(self, event: PromptLogprobs, now: float) -> list[StreamEffect]:
        """Take the new log probabilities. After a recomputation of a prompt a runner sends all of them again."""
        running, prompt_logprobs = self._freezing or self.running, self._prompt_logprobs
        if prompt_logprobs is None or running is None or event.epoch != running.epoch:
            return []
        if event.first > len(prompt_logprobs):
            return self._broken(
                f"log probabilities of the prompt {len(prompt_logprobs)}..{event.first} never came", now
            )
        new = event.logprobs[len(prompt_logprobs) - event.first :]
        prompt_logprobs.extend(new[: len(self.request.prompt) - len(prompt_logprobs)])
        return []

    def _take_state(self, event: PooledState, now: float) -> list[StreamEffect]:
        running = self._freezing or self.running
        if running is None or event.epoch != running.epoch:
            return []
        if len(event.vector) % 4:
            return self._broken(f"a hidden state of {len(event.vector)} bytes is not a list of 4-byte numbers", now)
        self._state = event.vector
        return []

    def _broken(self, detail: str, now: float) -> list[StreamEffect]:
        """End the epoch after a faulty message of its runner."""
        assert self.running is not None
        if self._freezing:
            return [*self._stop_all(), *self._recompute(now)]
        return self._fail_epoch(self.running.epoch, FailReason.RUNNER_ERROR, detail, stop=True)

    def _finish(self, end: End) -> None:
        self._leave_runners()
        self.end = end

    def check(self) -> None:
        """Check the invariants after every event. Raises AssertionError."""
        assert len(self.tokens) <= self.request.max_tokens, "more tokens than max_tokens"
        assert self.running is None or self.running.epoch == self._highest, "an old epoch runs"
        assert (self.running is None) == (not self.runners), "an epoch without a runner"
        assert self._receiver is None or len(self.runners) == 2, "KV is received without a second runner"
        assert self._freezing is None or len(self.runners) == 1, "several runners while a runner freezes"
        assert self.running is None or self.end is None, "an ended request runs"
        assert self.migrations == 0 or self._highest > NEVER, "migrated without an epoch"
        failed = self.end is not None and self.end.reason is FinishReason.FAILED
        assert failed == (self.end is not None and self.end.failure is not None), "a failure has a name"


def _salt(namespace: str, client_salt: str | None) -> str:
    """Return the salt of a request's prefix pages: a client's salt divides the pages of its namespace.

    All callers without a key share the namespace "". None: no page is shared.
    """
    if client_salt is None:
        return ""
    return namespace if namespace and not client_salt else f"{namespace}\n{client_salt}"

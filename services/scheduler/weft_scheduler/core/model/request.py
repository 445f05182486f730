"""A request on its way: where it is, which epoch owns it, what it has reserved, what has happened to it.

A request is in exactly one place: in no place (its gateway still submits it again, or it was released this moment), in
its pool's queue, or on the runners of its placement. Each part of it writes its own fields.
"""

from enum import Enum
from typing import NamedTuple

from weft.domain.ids import Epoch, RunnerId
from weft.domain.request import FailReason, Priority, Submit
from weft_scheduler.core.model.gateway import Avoidance
from weft_scheduler.core.policy.length_distribution import LengthDistribution
from weft_scheduler.core.policy.queue.waiting_queue import QueueEntry
from weft_scheduler.core.policy.reservation.pooled import UseForecast

LEVELS = (0.1, 0.5, 0.9, 0.99)  # levels of the predicted quantiles
PROMPT_TOKENS = 8  # prompt tokens that cost as much as one of the answer (A100, 7B: 0.1 ms; 0.4 to 1 ms at batch 32)


class Placement(NamedTuple):
    """The runners of one epoch. `token`: the runner of all tokens after the first, if it differs."""

    prompt: RunnerId
    token: RunnerId | None = None

    @property
    def runners(self) -> tuple[RunnerId, ...]:
        """All runners with pages of the request."""
        return (self.prompt,) if self.token is None else (self.prompt, self.token)

    @property
    def last(self) -> RunnerId:
        """The runner of the request's end, with its reservation."""
        return self.token or self.prompt


class Phase(Enum):
    """The places of a request on its way."""

    UNPLACED = "unplaced"  # in no place: its gateway is re-submitting, or it was released this moment
    WAITING = "waiting"  # in its pool's queue
    ASSIGNED = "assigned"  # an Assign is out, not acknowledged
    RUNNING = "running"  # started, or in its runner's report
    STOPPING = "stopping"  # it has to leave, or its runner is gone: the gateway's Failed is awaited


# The phases that may follow; a request that ends is forgotten in any of them.
NEXT_PHASES: dict[Phase, frozenset[Phase]] = {
    # adopted requests have a runner at once
    Phase.UNPLACED: frozenset({Phase.WAITING, Phase.ASSIGNED, Phase.RUNNING, Phase.STOPPING}),
    Phase.WAITING: frozenset({Phase.ASSIGNED}),
    Phase.ASSIGNED: frozenset({Phase.RUNNING, Phase.STOPPING, Phase.UNPLACED}),
    Phase.RUNNING: frozenset({Phase.STOPPING, Phase.UNPLACED}),
    # stopping again: the runner of a victim is lost; running: the lost runner had handed the request over
    Phase.STOPPING: frozenset({Phase.STOPPING, Phase.RUNNING, Phase.UNPLACED}),
}
PLACED = frozenset({Phase.ASSIGNED, Phase.RUNNING, Phase.STOPPING})


class RequestTokens:
    """Counts, in tokens. `quantiles`: of the whole answer, as (level, tokens); empty: nothing is predicted."""

    __slots__ = (
        "_generates", "_median", "_open_ended", "emitted", "max_output", "prompt", "quantiles", "start_emitted",
    )  # fmt: skip

    def __init__(self, submit: Submit) -> None:
        self.prompt, self.emitted = submit.prompt_tokens, submit.emitted_tokens
        self.max_output = max(1, submit.max_tokens)  # a request that generates nothing ends in one forward, too
        self._generates = submit.max_tokens > 0
        self.start_emitted = submit.start_emitted_tokens  # when the present epoch was assigned
        predicted = (submit.p10_tokens, submit.p50_tokens, submit.p90_tokens, submit.p99_tokens)
        quantiles = tuple([(level, tokens) for level, tokens in zip(LEVELS, predicted, strict=True) if tokens])
        self.quantiles: tuple[tuple[float, int], ...] = quantiles if submit.p90_tokens and len(quantiles) > 1 else ()
        self._open_ended = submit.open_ended  # nobody asked for `max_output`: no runner is too small for the answer
        self._median = 0

    # ------------------------------------------------------------ questions

    @property
    def prefill(self) -> int:
        """Tokens to compute before the next token, without any KV of the request."""
        return self.prompt + self.emitted

    @property
    def context(self) -> int:
        """The maximum number of tokens that the request can hold."""
        return self.prompt + self.max_output if self._generates else self.prompt

    @property
    def median_output(self) -> int:
        """Tokens of the whole answer: the p50, or half of the first reservation."""
        return min(self._median, self.max_output)

    @property
    def expected_work(self) -> float:
        """Expected remaining cost, in output tokens."""
        return self.expected_remaining(self.emitted) + self.prefill / PROMPT_TOKENS

    @property
    def predicted_cost(self) -> float:
        """Expected cost of the whole request, in output tokens."""
        return self.cost_of(max(self.emitted, self.median_output))

    def cost_of(self, output: int) -> float:
        """Return the cost of the request with an answer of `output` tokens, in output tokens."""
        return self.prompt / PROMPT_TOKENS + output

    def emitted_with(self, in_kv: int) -> int:
        """Return the tokens that are emitted for sure, if the runner has reported `in_kv` tokens in KV."""
        return max(self.emitted, in_kv - self.prompt)

    def expected_remaining(self, emitted: int) -> float:
        """Return the tokens of the answer still to come after `emitted`."""
        return LengthDistribution(self.quantiles).expected_remaining(emitted, self.max_output)

    # ------------------------------------------------------------ what is learned

    def predict(self, reserved_until: int) -> None:
        """Expect what is reserved, if nothing was predicted: half of it as the median, all of it as the p90."""
        half = reserved_until // 2
        self.quantiles = self.quantiles or ((0.5, half), (0.9, reserved_until))
        self._median = next((tokens for level, tokens in self.quantiles if level == 0.5), half)

    def fit(self, context: int) -> None:
        """Shorten an answer without a requested length to the context. It then ends at the runner."""
        if self._open_ended and context > self.prefill:
            self.max_output = min(self.max_output, context - self.prompt)

    def emit(self, tokens: int) -> None:
        """Record `tokens` streamed tokens of the answer."""
        self.emitted = max(self.emitted, tokens)

    def begin_epoch(self) -> None:
        """Record that an epoch continues from the tokens so far."""
        self.start_emitted = self.emitted


class Reservation:
    """The reservation of one request. `reserved_until`: the last reserved output position."""

    __slots__ = ("_tokens", "by_page", "forecast", "leaves", "overran", "preemptions", "reserved_until", "stays")

    def __init__(self, submit: Submit, tokens: RequestTokens) -> None:
        self._tokens, reserved = tokens, submit.reservation_tokens
        self.reserved_until = submit.start_emitted_tokens + reserved if reserved else 0
        self.by_page = False  # it reserves nothing ahead
        self.leaves = False  # it is the victim of its own overrun
        self.forecast: UseForecast | None = None  # forecast of its memory, where admission is pooled
        self.overran = False  # it was preempted for want of memory
        self.preemptions = submit.preemptions  # on all runners
        self.stays = False  # its preemptions are as many as they may be

    # ------------------------------------------------------------ questions

    @property
    def output_tokens(self) -> int:
        """Output tokens to reserve in addition to emitted tokens."""
        return self._tokens_after(self._tokens.emitted)

    @property
    def held_tokens(self) -> int:
        """Tokens that the request's pages have to hold on a runner: prompt, emitted, reservation."""
        return min(self._tokens.prefill + self._tokens_after(self._tokens.emitted), self._tokens.context)

    @property
    def footprint_tokens(self) -> int:
        """Free tokens that a runner needs for the request: its reservation, or the maximum of its expected use."""
        return self.footprint_after(self._tokens.emitted)

    def footprint_after(self, emitted: int) -> int:
        """Return the footprint once `emitted` tokens are emitted."""
        reserved = self._tokens.prompt + emitted + self._tokens_after(emitted)
        peak = 0 if self.forecast is None else self.forecast.use(emitted).peak_tokens(0.0)
        return min(max(reserved, peak), self._tokens.context)

    def _tokens_after(self, emitted: int) -> int:
        return 1 if self.by_page else remaining_tokens(self.reserved_until, emitted, self._tokens.max_output)

    # ------------------------------------------------------------ what is learned

    def begin(self, tokens: int, *, by_page: bool, leaves: bool, pooled: bool) -> None:
        """Reserve output tokens for the first time; a reservation from before stays."""
        self.reserved_until, self.by_page, self.leaves = self.reserved_until or tokens, by_page, leaves
        of = self._tokens
        of.predict(self.reserved_until)
        self.forecast = UseForecast(of.prompt, of.max_output, of.quantiles) if pooled else None

    def reserve_again(self, tokens: int) -> None:
        """Set the reservation of the next epoch by the supervisor's decision, counted from the start of this epoch."""
        self.reserved_until = max(1, self._tokens.start_emitted + tokens)

    def grow(self, tokens: int) -> None:
        """Record the reservation reported by the runner, counted from the epoch's start. The runner may have doubled it
        in place.
        """
        self.reserved_until = max(self.reserved_until, self._tokens.start_emitted + tokens)

    def lose_memory(self) -> bool:
        """Record that the memory of the request is lost. Return True for the first time."""
        first, self.overran = not self.overran, True
        return first

    def preempt(self, max_preemptions: int) -> None:
        """Count a preemption, up to the bound."""
        self.preemptions += 1
        self.limit_preemptions(max_preemptions)

    def limit_preemptions(self, max_preemptions: int) -> None:
        """Reserve the whole answer after `max_preemptions`, and let the request be no victim from its next epoch on.

        Either alone bounds nothing: a victim is the latest arrival, whether it has overrun or not, and one that is
        spared but grows could wait for pages for ever. With both it runs to its end wherever it is placed, and it can
        be placed: no request is accepted that no runner could hold to its limit. A rejection would waste all that was
        computed for it.
        """
        if self.preemptions >= max_preemptions:
            self.stays, self.reserved_until = True, self._tokens.max_output
            self.by_page, self.leaves, self.forecast = False, False, None


class RequestHistory:
    """Moves and failures of one request. `admitted`: it was accepted once, and is never answered QUEUE_FULL."""

    __slots__ = (
        "admitted", "avoidance", "capacity_refusals", "consolidations", "kv_migrations", "load_failures", "migrations",
        "one_runner",
    )  # fmt: skip

    def __init__(self, migrations: int, *, admitted: bool) -> None:
        self.admitted, self.migrations = admitted, migrations
        self.consolidations = 0  # migrations that consolidation ordered: they count for no failure
        self.kv_migrations = 0  # migrations that took the KV along: they count for none either
        self.capacity_refusals = 0  # NoCapacity answers in a row
        self.load_failures: dict[RunnerId, str] = {}
        self.one_runner = False  # its KV was lost on its way between two: both of its phases run on one from now on
        self.avoidance: Avoidance | None = None  # avoided runners; None: it never had to avoid any

    def migrate(self) -> None:
        """Count a migration, up to the bound."""
        self.migrations += 1

    def migrate_with_kv(self) -> None:
        """Count a migration with KV, up to the bound."""
        self.kv_migrations += 1

    def consolidate(self) -> None:
        """Count a migration by consolidation, up to the bound."""
        self.consolidations += 1

    def avoid(self, runner_id: RunnerId, deadline: float) -> None:
        """Place nothing on a runner until `deadline`, in seconds."""
        self.avoidance = self.avoidance or Avoidance()
        self.avoidance.add(runner_id, deadline)

    def run(self) -> None:
        """Record the arrival at a runner: a row of refusals ends."""
        self.capacity_refusals = 0

    def fail_on(self, runners: tuple[RunnerId, ...], reason: FailReason, detail: str) -> None:
        """Record the failure of an epoch on `runners`."""
        self.capacity_refusals = self.capacity_refusals + 1 if reason is FailReason.NO_CAPACITY else 0
        self.one_runner |= reason is FailReason.KV_LOST
        if reason in (FailReason.LOAD_FAILED, FailReason.RUNNER_FULL):
            self.load_failures |= dict.fromkeys(runners, detail)


class NumericsClass:
    """The numerics class of a request's tokens, and the time to wait for this class."""

    __slots__ = ("assigned", "awaited_until", "latest")

    def __init__(self, latest: str = "") -> None:
        self.latest = latest  # class of the runner that computed its latest tokens; none before the first
        self.assigned = ""  # class of the runner of its present epoch
        self.awaited_until = 0.0  # from then on any class will do; 0: it has not waited since it ran

    def await_until(self, now: float, same_class_s: float) -> str:
        """Let a request with tokens wait `same_class_s` for its class, once. Returns the class that it waits for."""
        if self.latest and not self.awaited_until:
            self.awaited_until = now + same_class_s
        return self.latest if now < self.awaited_until else ""

    def assign(self, numerics_class: str) -> None:
        """Note the class of the runner of the present epoch."""
        self.assigned = numerics_class

    def run(self) -> None:
        """Record the arrival at a runner: the request may wait again."""
        self.awaited_until = 0.0

    def keep(self) -> None:
        """Record that the latest tokens are of the class of the old runner."""
        self.latest = self.assigned or self.latest


class Request:
    """One request, as a gateway has submitted it. `newcomer`: it was never accepted before."""

    __slots__ = (
        "_phase", "adapter", "batch", "charged", "classes", "epoch", "gateway", "history", "id", "order", "placement",
        "pool", "reservation", "tenant", "tokens", "waiting",
    )  # fmt: skip

    def __init__(self, submit: Submit, gateway: str, now: float, ticket: int, *, newcomer: bool) -> None:
        self.id, self.gateway = submit.request_id, gateway
        self.pool, self.adapter = submit.pool, submit.adapter
        self.tenant = submit.namespace  # namespace of its caller
        self.batch = submit.priority is Priority.BATCH  # a line of a batch
        self.order = now - submit.waited_s, ticket  # its age: arrival on this process's clock; the smaller waits longer
        self.tokens = RequestTokens(submit)
        self.reservation = Reservation(submit, self.tokens)
        self.history = RequestHistory(submit.migrations, admitted=not newcomer)
        self.classes = NumericsClass(submit.numerics_class)
        self.epoch = submit.epoch  # the highest that it was assigned under
        self.placement: Placement | None = None
        self.waiting = QueueEntry()  # as it waits, or waited last
        self.charged = 0.0  # cost charged to its tenant, in output tokens; 0: it was on no runner
        self._phase = Phase.UNPLACED

    @property
    def phase(self) -> Phase:
        """The place of the request."""
        return self._phase

    @property
    def placed(self) -> bool:
        """Return whether the request is on a runner, as far as is known here."""
        return self._phase in PLACED

    @property
    def runner(self) -> RunnerId | None:
        """The runner that has the request to its end, and most of its tokens come from."""
        return self.placement.last if self.placement is not None else None

    # ------------------------------------------------------------ transitions

    def enqueue(self, now: float, same_class_s: float) -> None:
        """Let the request wait; with tokens `same_class_s` long, once, for a runner of the class that computed them."""
        self._enter(Phase.WAITING)
        tokens = self.tokens
        work = tokens.prompt + max(tokens.emitted + 1, tokens.median_output)
        lane = self.classes.await_until(now, same_class_s)
        self.waiting = QueueEntry(lane, self.reservation.footprint_tokens, work)

    def expect_work(self) -> None:
        """Estimate the remaining cost of the request, before it waits in an order by cost."""
        self.waiting = self.waiting._replace(expected_work=self.tokens.expected_work)

    def stop_awaiting_class(self) -> None:
        """Let any class do; only while the request is out of the queue's order."""
        assert self._phase is Phase.WAITING, self
        self.waiting = self.waiting._replace(lane="")

    def assign(self, epoch: Epoch, placement: Placement) -> None:
        """Move the request out of the queue, onto runners."""
        assert epoch > self.epoch, (self.id, self.epoch, epoch)
        self._enter(Phase.ASSIGNED)
        self.epoch, self.placement = epoch, placement
        self.tokens.begin_epoch()

    def adopt(self, placement: Placement, phase: Phase) -> None:
        """Leave the request on its runner, as submitted by its gateway."""
        self._enter(phase)
        self.placement = placement

    def hand_off(self) -> RunnerId | None:
        """Leave the request to the token runner. Returns the prompt runner, which has nothing of it any more."""
        placement = self.placement
        if placement is None or placement.token is None:
            return None
        self.placement = Placement(placement.token)
        return placement.prompt

    def acknowledge(self) -> bool:
        """Record that the request has started or is in a report. Return False if it is recorded already."""
        if self._phase is not Phase.ASSIGNED:
            return False
        self._enter(Phase.RUNNING)
        self.classes.run()
        self.history.run()
        return True

    def stop(self) -> None:
        """End the epoch: the gateway's Failed is awaited."""
        self._enter(Phase.STOPPING)

    def keep(self) -> None:
        """Let the epoch last after all."""
        assert self._phase is Phase.STOPPING, self
        self._enter(Phase.RUNNING)

    def release(self) -> Placement:
        """Take the request off its runners, to no place."""
        placement = self.placement
        assert placement is not None, self
        self._enter(Phase.UNPLACED)
        self.placement = None
        return placement

    def charge(self, cost: float) -> float:
        """Charge the tenant `cost` in all. Returns by how much that is more than before."""
        extra_cost, self.charged = cost - self.charged, cost
        return extra_cost

    def __repr__(self) -> str:
        return f"Request({self.id!r}, {self._phase.value}, {self.epoch}, {self.placement})"

    def _enter(self, phase: Phase) -> None:
        assert phase in NEXT_PHASES[self._phase], (self.id, self._phase, phase)
        self._phase = phase


def remaining_tokens(reserved_until: int, emitted: int, max_output: int) -> int:
    """Return the output tokens to reserve beyond what was emitted: at least 1, never beyond `max_output`.

    A reservation that the answer has outrun doubles until it is past it (S3, section 3.4).
    """
    reserved_until = max(1, reserved_until)
    while reserved_until <= emitted:
        reserved_until *= 2
    return max(1, min(reserved_until, max_output) - emitted)

"""A request on its way: where it is, which epoch owns it, what it has reserved, what it avoids.

Only the methods here write the fields. A request is in exactly one place: in no place (its gateway still submits it
again, or it was released this moment), in its pool's queue, or on the runners of its placement.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from weft.domain.ids import NEVER, Epoch, RunnerId
from weft.domain.request import FailReason, Priority, Submit
from weft_scheduler.core.model.gateway import Avoidance
from weft_scheduler.core.policy.length_distribution import LengthDistribution
from weft_scheduler.core.policy.reservation.policies import remaining_tokens
from weft_scheduler.core.policy.reservation.pooled import UseForecast

LEVELS = (0.1, 0.5, 0.9, 0.99)  # of the predicted quantiles
PROMPT_TOKENS = 8  # of a prompt cost as much as one of the answer (A100, 7B: 0.1 ms beside 0.4 to 1 ms at batch 32)


class Placement(NamedTuple):
    """The runners of one epoch. `token`: the runner of the tokens after the first one, where that is another."""

    prompt: RunnerId
    token: RunnerId | None = None

    @property
    def runners(self) -> tuple[RunnerId, ...]:
        """Every runner that holds pages for the request."""
        return (self.prompt,) if self.token is None else (self.prompt, self.token)

    @property
    def last(self) -> RunnerId:
        """The runner that has it to its end: its reservation is there."""
        return self.token or self.prompt


class Phase(Enum):
    """Where a request is."""

    UNPLACED = "unplaced"  # in no place: its gateway is re-submitting, or it was released this moment
    WAITING = "waiting"  # in its pool's queue
    ASSIGNED = "assigned"  # an Assign is out, not acknowledged
    RUNNING = "running"  # started, or in its runner's report
    STOPPING = "stopping"  # it has to leave, or its runner is gone: the gateway's Failed is awaited


# Which phase may follow; a request that ends is forgotten in any of them.
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


@dataclass(slots=True, eq=False)
class Request:
    """One request. `reserved_until`: the output position that its reservation reaches to."""

    id: str
    gateway: str
    pool: str
    tenant: str  # the namespace of its caller
    adapter: str
    prompt_tokens: int
    max_tokens: int
    emitted_tokens: int
    arrived_s: float  # on this process's clock: now - waited
    ticket: int  # breaks ties of `arrived_s`
    priority: Priority = Priority.INTERACTIVE
    open_ended: bool = False  # nobody asked for `max_tokens`: no runner is too small for its answer
    quantiles: tuple[tuple[float, int], ...] = ()  # of its answer: (level, tokens)
    migrations: int = 0
    consolidations: int = 0  # migrations that consolidation ordered: they count for no failure
    kv_migrations: int = 0  # those that took the KV along: neither do they
    reserved_until: int = 0
    by_page: bool = False  # it reserves nothing ahead
    forecast: UseForecast | None = None  # of its memory, where admission is pooled
    overran: bool = False  # it was preempted for want of memory
    leaves: bool = False  # it is the victim of its own overrun
    preemptions: int = 0  # on all runners
    stays: bool = False  # they are as many as they may be
    start_emitted_tokens: int = 0  # emitted when the present epoch was assigned
    epoch: Epoch = NEVER  # the highest it was assigned under
    placement: Placement | None = None
    numerics_class: str = ""  # of the runner that computed its latest tokens; none before the first
    assigned_class: str = ""  # of the runner of its present epoch
    same_class_until: float = 0.0  # from then on any class will do; 0: it has not waited since it ran
    capacity_refusals: int = 0  # NoCapacity answers in a row
    queued_tokens: int = 0  # as its pool counts it, while it waits
    queued_work: int = 0  # tokens that it has to compute, too
    expected_work: float = 0.0  # what it is expected to cost yet, in output tokens, where its queue's order asks
    avoidance: Avoidance = field(default_factory=Avoidance)
    load_failures: dict[RunnerId, str] = field(default_factory=dict[RunnerId, str])
    one_runner: bool = False  # its KV was lost on its way between two: both of its phases run on one from now on
    admitted_before: bool = False  # was accepted once: never answered QUEUE_FULL
    awaited_class: str = ""  # while it waits: the class that it may have to wait for
    charged: float = 0.0  # to its tenant, in output tokens; 0: it was on no runner
    batch: bool = field(init=False)  # a line of a batch
    order: tuple[float, int] = field(init=False)  # its age: the smaller waits longer
    _phase: Phase = field(default=Phase.UNPLACED, init=False)

    def __post_init__(self) -> None:
        self.batch = self.priority is Priority.BATCH
        self.order = self.arrived_s, self.ticket

    @classmethod
    def submitted(cls, submit: Submit, gateway: str, now: float, ticket: int, *, newcomer: bool) -> "Request":
        """As a gateway describes it. `newcomer`: it was never accepted before."""
        reserved = submit.reservation_tokens
        predicted = (submit.p10_tokens, submit.p50_tokens, submit.p90_tokens, submit.p99_tokens)
        quantiles = tuple((level, tokens) for level, tokens in zip(LEVELS, predicted, strict=True) if tokens)
        return cls(
            id=submit.request_id,
            gateway=gateway,
            pool=submit.pool,
            tenant=submit.namespace,
            adapter=submit.adapter,
            prompt_tokens=submit.prompt_tokens,
            max_tokens=max(1, submit.max_tokens),  # 0: log probabilities of the prompt alone, which end in one forward
            emitted_tokens=submit.emitted_tokens,
            quantiles=quantiles if submit.p90_tokens and len(quantiles) > 1 else (),
            arrived_s=now - submit.waited_s,
            ticket=ticket,
            priority=submit.priority,
            open_ended=submit.open_ended,
            migrations=submit.migrations,
            preemptions=submit.preemptions,
            reserved_until=submit.start_emitted_tokens + reserved if reserved else 0,
            start_emitted_tokens=submit.start_emitted_tokens,
            epoch=submit.epoch,
            numerics_class=submit.numerics_class,
            admitted_before=not newcomer,
        )

    # ------------------------------------------------------------ questions

    @property
    def phase(self) -> Phase:
        """Where it is."""
        return self._phase

    @property
    def placed(self) -> bool:
        """Whether it is on a runner, as far as is known here."""
        return self._phase in PLACED

    @property
    def runner(self) -> RunnerId | None:
        """The runner that has it to its end, and most of its tokens come from."""
        return self.placement.last if self.placement is not None else None

    @property
    def prefill_tokens(self) -> int:
        """Tokens that are computed before its next one, where nothing of it is in KV."""
        return self.prompt_tokens + self.emitted_tokens

    @property
    def context_tokens(self) -> int:
        """The most it can ever hold."""
        return self.prompt_tokens + self.max_tokens

    @property
    def reservation_tokens(self) -> int:
        """Output tokens to reserve beyond those emitted."""
        return self._reservation_after(self.emitted_tokens)

    @property
    def reserved_tokens(self) -> int:
        """Tokens that its pages have to hold on a runner: prompt, emitted, reservation."""
        return self.prompt_tokens + self.emitted_tokens + self.reservation_tokens

    @property
    def footprint_tokens(self) -> int:
        """Tokens that a runner needs free for it: what is reserved, or the most that it is expected to use."""
        return self.footprint_after(self.emitted_tokens)

    def footprint_after(self, emitted: int) -> int:
        """The same once so many tokens are emitted."""
        reserved = self.prompt_tokens + emitted + self._reservation_after(emitted)
        if self.forecast is None:
            return reserved
        return max(reserved, self.forecast.use(emitted).peak_tokens(0.0))

    def emitted_with(self, in_kv: int) -> int:
        """Tokens of the answer that are emitted for sure, where its runner has reported so many tokens in KV."""
        return max(self.emitted_tokens, in_kv - self.prompt_tokens)

    def expected_remaining(self, emitted: int) -> float:
        """Tokens of the answer still to come after so many."""
        return LengthDistribution(self.quantiles).expected_remaining(emitted, self.max_tokens)

    def _reservation_after(self, emitted: int) -> int:
        return 1 if self.by_page else remaining_tokens(self.reserved_until, emitted, self.max_tokens)

    @property
    def predicted_cost(self) -> float:
        """What the whole request is expected to cost, in output tokens: the p50, or half of its reservation."""
        return self.cost_of(max(self.emitted_tokens, self.median_tokens))

    @property
    def median_tokens(self) -> int:
        """Of its whole answer: the p50, or half of its reservation."""
        p50 = next((tokens for level, tokens in self.quantiles if level == 0.5), self.reserved_until // 2)
        return min(p50, self.max_tokens)

    def cost_of(self, output_tokens: int) -> float:
        """What it costs with an answer of so many tokens, in output tokens."""
        return self.prompt_tokens / PROMPT_TOKENS + output_tokens

    # ------------------------------------------------------------ transitions

    def enqueue(self, now: float, same_class_s: float) -> None:
        """Into the queue. One with tokens may wait so long, once, for a runner of the class that computed them."""
        self._enter(Phase.WAITING)
        if self.numerics_class and not self.same_class_until:
            self.same_class_until = now + same_class_s
        self.awaited_class = self.numerics_class if now < self.same_class_until else ""
        self.queued_tokens = self.footprint_tokens
        self.queued_work = self.prompt_tokens + max(self.emitted_tokens + 1, self.median_tokens)

    def stop_awaiting_class(self) -> None:
        """Any class will do; only while it is out of the queue's order."""
        assert self._phase is Phase.WAITING, self
        self.awaited_class = ""

    def expect_work(self) -> None:
        """Estimate what it is expected to cost yet, before it waits in an order that asks for it."""
        context = self.prompt_tokens + self.emitted_tokens
        self.expected_work = self.expected_remaining(self.emitted_tokens) + context / PROMPT_TOKENS

    def assign(self, epoch: Epoch, placement: Placement) -> None:
        """Out of the queue, onto runners."""
        assert epoch > self.epoch, (self.id, self.epoch, epoch)
        self._enter(Phase.ASSIGNED)
        self.epoch, self.placement = epoch, placement
        self.start_emitted_tokens = self.emitted_tokens

    def adopt(self, placement: Placement, phase: Phase) -> None:
        """It runs there already, as its gateway submitted it."""
        self._enter(phase)
        self.placement = placement

    def hand_off(self) -> RunnerId | None:
        """The token runner has taken over. Returns the prompt runner, which has nothing of it any more."""
        placement = self.placement
        if placement is None or placement.token is None:
            return None
        self.placement = Placement(placement.token)
        return placement.prompt

    def acknowledge(self) -> bool:
        """Started, or in a report. False where that is known."""
        if self._phase is not Phase.ASSIGNED:
            return False
        self._enter(Phase.RUNNING)
        self.same_class_until, self.capacity_refusals = 0.0, 0
        return True

    def stop(self) -> None:
        """Its epoch is ending: the gateway's Failed is awaited."""
        self._enter(Phase.STOPPING)

    def keep(self) -> None:
        """Its epoch lasts after all."""
        assert self._phase is Phase.STOPPING, self
        self._enter(Phase.RUNNING)

    def release(self) -> Placement:
        """Off its runners, in no place."""
        placement = self.placement
        assert placement is not None, self
        self._enter(Phase.UNPLACED)
        self.placement = None
        return placement

    def fit(self, context_tokens: int) -> None:
        """Shorten an answer whose length nobody asked for to what such a context holds, which ends it at the runner."""
        if self.open_ended and context_tokens > self.prefill_tokens:
            self.max_tokens = min(self.max_tokens, context_tokens - self.prompt_tokens)

    # ------------------------------------------------------------ what is learned of it

    def reserve(self, tokens: int, *, by_page: bool, leaves: bool, pooled: bool) -> None:
        """The first reservation, in output tokens; one that it has from before stays. Without a prediction: the p90."""
        self.reserved_until, self.by_page, self.leaves = self.reserved_until or tokens, by_page, leaves
        self.quantiles = self.quantiles or ((0.5, self.reserved_until // 2), (0.9, self.reserved_until))
        self.forecast = UseForecast(self.prompt_tokens, self.max_tokens, self.quantiles) if pooled else None

    def reserve_again(self, tokens: int) -> None:
        """The supervisor's reservation for its next epoch, counted from the start of this one."""
        self.reserved_until = max(1, self.start_emitted_tokens + tokens)

    def lost_memory(self) -> bool:
        """Its memory is another's. True where that is the first time."""
        first, self.overran = not self.overran, True
        return first

    def preempted(self, most: int) -> None:
        """One more of its bounded preemptions."""
        self.preemptions += 1
        self.limit_preemptions(most)

    def limit_preemptions(self, most: int) -> None:
        """Preempted so often, it reserves its whole answer from its next epoch on, and is no victim there.

        Either alone bounds nothing: a victim is the latest arrival, whether it has overrun or not, and one that is
        spared but grows could wait for pages for ever. With both it runs to its end wherever it is placed, and it can
        be placed: none is accepted that no runner could hold to its limit. A rejection would waste what was computed
        for it so often.
        """
        if self.preemptions >= most:
            self.stays, self.reserved_until = True, self.max_tokens
            self.by_page, self.leaves, self.forecast = False, False, None

    def grown(self, tokens: int) -> None:
        """Its runner reports that reservation, from the start of this epoch on: it may have doubled it in place."""
        if self._phase is not Phase.STOPPING:
            self.reserved_until = max(self.reserved_until, self.start_emitted_tokens + tokens)

    def emitted(self, tokens: int) -> None:
        """So many tokens of the answer were streamed."""
        self.emitted_tokens = max(self.emitted_tokens, tokens)

    def charge(self, cost: float) -> float:
        """Its tenant is charged so much in all. Returns by how much that is more than before."""
        more, self.charged = cost - self.charged, cost
        return more

    def computed_by(self, numerics_class: str) -> None:
        """The class of the runner of its present epoch."""
        self.assigned_class = numerics_class

    def keep_class(self) -> None:
        """Its latest tokens are of the class of the runner that it leaves."""
        self.numerics_class = self.assigned_class or self.numerics_class

    def migrated(self) -> None:
        """One more of its bounded migrations."""
        self.migrations += 1

    def migrated_with_kv(self) -> None:
        """One more of its bounded migrations with its KV."""
        self.kv_migrations += 1

    def consolidated(self) -> None:
        """One more of its bounded migrations by consolidation."""
        self.consolidations += 1

    def failed_on(self, runners: tuple[RunnerId, ...], reason: FailReason, detail: str) -> None:
        """Its epoch failed there: what counts refusals in a row, and knows why its adapter could not be loaded."""
        self.capacity_refusals = self.capacity_refusals + 1 if reason is FailReason.NO_CAPACITY else 0
        self.one_runner |= reason is FailReason.KV_LOST
        if reason is FailReason.LOAD_FAILED:
            self.load_failures |= dict.fromkeys(runners, detail)

    def _enter(self, phase: Phase) -> None:
        assert phase in NEXT_PHASES[self._phase], (self.id, self._phase, phase)
        self._phase = phase

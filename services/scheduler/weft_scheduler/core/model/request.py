"""A request on its way: where it is, which epoch owns it, what it has reserved, what it avoids.

Only the methods here write the fields. A request is in exactly one place: in no place (its gateway still submits it
again, or it was released this moment), in its pool's queue, or on the runners of its placement.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from weft.domain.ids import NEVER, Epoch, RunnerId
from weft.domain.request import FailReason, Submit
from weft_scheduler.core.model.gateway import Avoidance
from weft_scheduler.core.policy.length_distribution import LengthDistribution
from weft_scheduler.core.policy.reservation.policies import remaining_tokens

LEVELS = (0.1, 0.5, 0.9, 0.99)  # of the predicted quantiles
PROMPT_TOKENS = 8  # of a prompt cost as much as one of the answer (A100, 7B: 0.1 ms beside 0.4 to 1 ms at batch 32)


class Placement(NamedTuple):
    """The runners of one epoch. `decode`: the runner of the tokens after the first one, where that is another."""

    prefill: RunnerId
    decode: RunnerId | None = None

    @property
    def runners(self) -> tuple[RunnerId, ...]:
        """Every runner that holds pages for the request."""
        return (self.prefill,) if self.decode is None else (self.prefill, self.decode)


class Phase(Enum):
    """Where a request is."""

    UNPLACED = "unplaced"  # in no place: its gateway is re-submitting, or it was released this moment
    WAITING = "waiting"  # in its pool's queue
    ASSIGNED = "assigned"  # an Assign is out, not acknowledged
    RUNNING = "running"  # started, or in its runner's report
    STOPPING = "stopping"  # it has to leave, or its runner is gone: the gateway's Failed is awaited


# Which phase may follow; a request that ends is forgotten in any of them.
NEXT_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.UNPLACED: frozenset(
        {Phase.WAITING, Phase.ASSIGNED, Phase.RUNNING, Phase.STOPPING}
    ),  # the last three: adopted
    Phase.WAITING: frozenset({Phase.ASSIGNED}),
    Phase.ASSIGNED: frozenset({Phase.RUNNING, Phase.STOPPING, Phase.UNPLACED}),
    Phase.RUNNING: frozenset({Phase.STOPPING, Phase.UNPLACED}),
    Phase.STOPPING: frozenset({Phase.STOPPING, Phase.UNPLACED}),  # again: the runner of a victim is lost
}
PLACED = frozenset({Phase.ASSIGNED, Phase.RUNNING, Phase.STOPPING})


@dataclass(slots=True, eq=False)
class Request:
    """One request. `reserved_until`: the output position that its reservation reaches to."""

    id: str
    gateway: str
    pool: str
    adapter: str
    prompt_tokens: int
    max_tokens: int
    emitted_tokens: int
    arrived_s: float  # on this process's clock: now - waited
    ticket: int  # breaks ties of `arrived_s`
    quantiles: tuple[tuple[float, int], ...] = ()  # predicted: (level, tokens)
    migrations: int = 0
    reserved_until: int = 0
    by_page: bool = False  # it reserves nothing ahead
    start_emitted_tokens: int = 0  # emitted when the present epoch was assigned
    epoch: Epoch = NEVER  # the highest it was assigned under
    placement: Placement | None = None
    numerics_class: str = ""  # of the runner that computed its latest tokens; none before the first
    assigned_class: str = ""  # of the runner of its present epoch
    same_class_until: float = 0.0  # from then on any class will do; 0: it has not waited since it ran
    capacity_refusals: int = 0  # NoCapacity answers in a row
    queued_tokens: int = 0  # as its pool counts it, while it waits
    avoidance: Avoidance = field(default_factory=Avoidance)
    load_failures: dict[RunnerId, str] = field(default_factory=dict[RunnerId, str])
    admitted_before: bool = False  # was accepted once: never answered QUEUE_FULL
    awaited_class: str = ""  # while it waits: the class that it may have to wait for
    _phase: Phase = field(default=Phase.UNPLACED, init=False)

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
            adapter=submit.adapter,
            prompt_tokens=submit.prompt_tokens,
            max_tokens=submit.max_tokens,
            emitted_tokens=submit.emitted_tokens,
            quantiles=quantiles if submit.p90_tokens and len(quantiles) > 1 else (),
            arrived_s=now - submit.waited_s,
            ticket=ticket,
            migrations=submit.migrations,
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
        """The runner that its tokens come from."""
        return (self.placement.decode or self.placement.prefill) if self.placement is not None else None

    @property
    def order(self) -> tuple[float, int]:
        """Its age: the smaller waits longer."""
        return self.arrived_s, self.ticket

    @property
    def context_tokens(self) -> int:
        """The most it can ever hold."""
        return self.prompt_tokens + self.max_tokens

    @property
    def reservation_tokens(self) -> int:
        """Output tokens to reserve beyond those emitted."""
        if self.by_page:
            return 1
        return remaining_tokens(self.reserved_until, self.emitted_tokens, self.max_tokens)

    @property
    def footprint_tokens(self) -> int:
        """Tokens that its pages have to hold: prompt, emitted, reservation."""
        return self.prompt_tokens + self.emitted_tokens + self.reservation_tokens

    @property
    def expected_work(self) -> float:
        """What it is expected to cost yet, in output tokens; without a prediction its reservation is the p90."""
        reserved = self.reserved_until
        lengths = LengthDistribution(self.quantiles or ((0.5, reserved // 2), (0.9, reserved)))
        context = self.prompt_tokens + self.emitted_tokens
        return lengths.expected_remaining(self.emitted_tokens, self.max_tokens) + context / PROMPT_TOKENS

    # ------------------------------------------------------------ transitions

    def enqueue(self, now: float, same_class_s: float) -> None:
        """Into the queue. One with tokens may wait so long, once, for a runner of the class that computed them."""
        self._enter(Phase.WAITING)
        if self.numerics_class and not self.same_class_until:
            self.same_class_until = now + same_class_s
        self.awaited_class = self.numerics_class if now < self.same_class_until else ""
        self.queued_tokens = self.footprint_tokens

    def stop_awaiting_class(self) -> None:
        """Any class will do; only while it is out of the queue's order."""
        assert self._phase is Phase.WAITING, self
        self.awaited_class = ""

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

    def release(self) -> Placement:
        """Off its runners, in no place."""
        placement = self.placement
        assert placement is not None, self
        self._enter(Phase.UNPLACED)
        self.placement = None
        return placement

    # ------------------------------------------------------------ what is learned of it

    def reserve(self, tokens: int, *, by_page: bool) -> None:
        """The first reservation, in output tokens; one that it has from before stays."""
        self.reserved_until, self.by_page = self.reserved_until or tokens, by_page

    def reserve_again(self, tokens: int) -> None:
        """The supervisor's reservation for its next epoch, counted from the start of this one."""
        self.reserved_until = max(1, self.start_emitted_tokens + tokens)

    def grown(self, tokens: int) -> None:
        """Its runner reports that reservation, from the start of this epoch on: it may have doubled it in place."""
        if self._phase is not Phase.STOPPING:
            self.reserved_until = max(self.reserved_until, self.start_emitted_tokens + tokens)

    def emitted(self, tokens: int) -> None:
        """So many tokens of the answer were streamed."""
        self.emitted_tokens = max(self.emitted_tokens, tokens)

    def computed_by(self, numerics_class: str) -> None:
        """The class of the runner of its present epoch."""
        self.assigned_class = numerics_class

    def keep_class(self) -> None:
        """Its latest tokens are of the class of the runner that it leaves."""
        self.numerics_class = self.assigned_class or self.numerics_class

    def migrated(self) -> None:
        """One more of its bounded migrations."""
        self.migrations += 1

    def failed_on(self, runner_id: RunnerId, reason: FailReason, detail: str) -> None:
        """Its epoch failed there: what counts refusals in a row, and knows why its adapter could not be loaded."""
        self.capacity_refusals = self.capacity_refusals + 1 if reason is FailReason.NO_CAPACITY else 0
        if reason is FailReason.LOAD_FAILED:
            self.load_failures[runner_id] = detail

    def _enter(self, phase: Phase) -> None:
        assert phase in NEXT_PHASES[self._phase], (self.id, self._phase, phase)
        self._phase = phase

"""A request on its way: where it is, and which epoch owns it.

A request is in exactly one place: in no place (its gateway still submits it again, or it was released this moment), in
its pool's queue, or on the runners of its placement.
"""

from enum import Enum
from typing import NamedTuple

from weft.domain.ids import NEVER, Epoch, RunnerId
from weft.domain.request import Priority, Submit
from weft_scheduler.core.model.request_history import NumericsClass, RequestHistory
from weft_scheduler.core.model.request_tokens import RequestTokens
from weft_scheduler.core.model.reservation import Reservation
from weft_scheduler.core.policy.queue.waiting_queue import Waiting

LEVELS = (0.1, 0.5, 0.9, 0.99)  # of the predicted quantiles


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


class Request:
    """One request. Each of its parts (tokens, reservation, history, classes) writes its own fields."""

    __slots__ = (
        "_phase", "adapter", "batch", "charged", "classes", "epoch", "gateway", "history", "id", "order", "placement",
        "pool", "reservation", "tenant", "tokens", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        *,
        gateway: str,
        pool: str,
        tenant: str,
        adapter: str,
        tokens: RequestTokens,
        order: tuple[float, int],
        batch: bool = False,
    ) -> None:
        self.id = request_id
        self.gateway, self.pool, self.adapter = gateway, pool, adapter
        self.tenant = tenant  # the namespace of its caller
        self.batch = batch  # a line of a batch
        self.order = order  # its age: arrival on this process's clock, ticket; the smaller waits longer
        self.tokens = tokens
        self.reservation = Reservation(tokens)
        self.history = RequestHistory()
        self.classes = NumericsClass()
        self.epoch = NEVER  # the highest it was assigned under
        self.placement: Placement | None = None
        self.waiting = Waiting()  # as it waits, or waited last
        self.charged = 0.0  # to its tenant, in output tokens; 0: it was on no runner
        self._phase = Phase.UNPLACED

    @classmethod
    def submitted(cls, submit: Submit, gateway: str, now: float, ticket: int, *, newcomer: bool) -> "Request":
        """Take a request as a gateway describes it. `newcomer`: it was never accepted before."""
        start, reserved = submit.start_emitted_tokens, submit.reservation_tokens
        predicted = (submit.p10_tokens, submit.p50_tokens, submit.p90_tokens, submit.p99_tokens)
        quantiles = tuple([(level, tokens) for level, tokens in zip(LEVELS, predicted, strict=True) if tokens])
        tokens = RequestTokens(
            submit.prompt_tokens,
            max(1, submit.max_tokens),  # 0: log probabilities of the prompt alone, which end in one forward
            submit.emitted_tokens,
            start,
            quantiles=quantiles if submit.p90_tokens and len(quantiles) > 1 else (),
            open_ended=submit.open_ended,
        )
        request = cls(
            submit.request_id,
            gateway=gateway,
            pool=submit.pool,
            tenant=submit.namespace,
            adapter=submit.adapter,
            tokens=tokens,
            order=(now - submit.waited_s, ticket),
            batch=submit.priority is Priority.BATCH,
        )
        request.reservation = Reservation(tokens, start + reserved if reserved else 0, submit.preemptions)
        request.history = RequestHistory(submit.migrations, admitted=not newcomer)
        request.classes = NumericsClass(submit.numerics_class)
        request.epoch = submit.epoch
        return request

    @property
    def phase(self) -> Phase:
        """Where it is."""
        return self._phase

    @property
    def placed(self) -> bool:
        """True where it is on a runner, as far as is known here."""
        return self._phase in PLACED

    @property
    def runner(self) -> RunnerId | None:
        """The runner that has it to its end, and most of its tokens come from."""
        return self.placement.last if self.placement is not None else None

    # ------------------------------------------------------------ transitions

    def enqueue(self, now: float, same_class_s: float) -> None:
        """Let it wait. One with tokens may wait so long, once, for a runner of the class that computed them."""
        self._enter(Phase.WAITING)
        tokens = self.tokens
        work = tokens.prompt + max(tokens.emitted + 1, tokens.median_output)
        lane = self.classes.await_until(now, same_class_s)
        self.waiting = Waiting(lane, self.reservation.footprint_tokens, work)

    def expect_work(self) -> None:
        """Estimate what it is expected to cost yet, before it waits in an order that asks for it."""
        self.waiting = self.waiting._replace(expected_work=self.tokens.expected_work)

    def stop_awaiting_class(self) -> None:
        """Let any class do; only while it is out of the queue's order."""
        assert self._phase is Phase.WAITING, self
        self.waiting = self.waiting._replace(lane="")

    def assign(self, epoch: Epoch, placement: Placement) -> None:
        """Move it out of the queue, onto runners."""
        assert epoch > self.epoch, (self.id, self.epoch, epoch)
        self._enter(Phase.ASSIGNED)
        self.epoch, self.placement = epoch, placement
        self.tokens.begin_epoch()

    def adopt(self, placement: Placement, phase: Phase) -> None:
        """Leave it where it runs already, as its gateway submitted it."""
        self._enter(phase)
        self.placement = placement

    def hand_off(self) -> RunnerId | None:
        """Leave it to the token runner. Returns the prompt runner, which has nothing of it any more."""
        placement = self.placement
        if placement is None or placement.token is None:
            return None
        self.placement = Placement(placement.token)
        return placement.prompt

    def acknowledge(self) -> bool:
        """Note that it has started, or is in a report. False where that is known."""
        if self._phase is not Phase.ASSIGNED:
            return False
        self._enter(Phase.RUNNING)
        self.classes.run()
        self.history.run()
        return True

    def stop(self) -> None:
        """End its epoch: the gateway's Failed is awaited."""
        self._enter(Phase.STOPPING)

    def keep(self) -> None:
        """Let its epoch last after all."""
        assert self._phase is Phase.STOPPING, self
        self._enter(Phase.RUNNING)

    def release(self) -> Placement:
        """Take it off its runners, to no place."""
        placement = self.placement
        assert placement is not None, self
        self._enter(Phase.UNPLACED)
        self.placement = None
        return placement

    def charge(self, cost: float) -> float:
        """Charge its tenant so much in all. Returns by how much that is more than before."""
        more, self.charged = cost - self.charged, cost
        return more

    def __repr__(self) -> str:
        return f"Request({self.id!r}, {self._phase.value}, {self.epoch}, {self.placement})"

    def _enter(self, phase: Phase) -> None:
        assert phase in NEXT_PHASES[self._phase], (self.id, self._phase, phase)
        self._phase = phase

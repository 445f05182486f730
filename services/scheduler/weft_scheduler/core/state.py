"""What the handlers of one machine share: everything it knows by name, its clock, its deadlines, its effects."""

from collections.abc import Iterable

from weft.domain.ids import Epoch, RunnerId
from weft.domain.lru import LruDict
from weft.domain.machine import Kind, Peer, PersistTerm, Send
from weft.domain.routes import CanaryCounts
from weft.domain.runner import SchedulerHello
from weft.domain.timers import TimerQueue
from weft_scheduler.core.config import SchedulerConfig
from weft_scheduler.core.effects import Effect
from weft_scheduler.core.model.gateway import GatewayStream
from weft_scheduler.core.model.request import Request
from weft_scheduler.core.model.runner import RunnerAccount
from weft_scheduler.core.outcome_buffer import OutcomeBuffer
from weft_scheduler.core.policy import reservation
from weft_scheduler.core.policy.reservation.output_lengths import OutputLengthStats
from weft_scheduler.core.policy.reservation.policies import ReservationPolicy
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.published_state import PublishedState
from weft_scheduler.core.routes import RouteTable
from weft_scheduler.core.timers import Timer, TimerKind

MAX_REPLACED = 20_000  # replaced incarnations remembered, twice the fleet that this is made for


class State:
    """One for each machine. `now` is the time of the event at hand."""

    def __init__(self, config: SchedulerConfig, term: int) -> None:
        self.config, self.now, self.term = config, 0.0, term
        self.counter = 0  # of epochs under this term
        self.tickets = 0
        self.gateways: dict[str, GatewayStream] = {}
        self.requests: dict[str, Request] = {}
        self.runners: dict[str, RunnerAccount] = {}
        self.pools: dict[str, Pool] = {}
        self.adapter_pool: dict[str, str] = {}  # adapter uid -> pool
        self.canaries: dict[str, tuple[str, CanaryCounts]] = {}  # adapter uid -> the digest beside its canary, counts
        self.supervisors: dict[str, Peer] = {}  # in order of arrival
        self.registry_known = False
        self.settled = False  # the cluster has had the time to report itself
        self.timers = TimerQueue[Timer]()
        self.outcomes = OutcomeBuffer(config.max_outcomes)
        self.routes = RouteTable()
        self.published = PublishedState()
        self.lengths = OutputLengthStats(config.quantile, config.default_output_tokens, config.length_adapters)
        self.reservation: dict[str, ReservationPolicy] = {
            name: policy(self.lengths) for name, policy in reservation.POLICIES.items()
        }
        # pools to schedule, in order, and the runners that have changed there; None: anything may have
        self.schedulable: dict[str, set[str] | None] = {}
        self.desired_changed: dict[str, None] = {}  # pools whose runners may have to hold something else
        self._changed_pools: dict[str, None] = {}  # that the controllers have not looked at
        self._arrivals = 0
        self._versions = 0
        self._replaced = LruDict[str, str](MAX_REPLACED)  # uuid -> the incarnation that a newer one has replaced
        self._effects: list[Effect] = []

    def advance_to(self, now: float) -> None:
        """Take the time of an event; it never goes back."""
        self.now = max(now, self.now)

    # ------------------------------------------------------------ effects

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def send(self, peer: Peer, message: object) -> None:
        self._effects.append(Send(peer, message))

    def send_to_gateway(self, gateway: str, message: object) -> None:
        self._effects.append(Send(Peer(Kind.GATEWAY, gateway), message))

    def take_effects(self) -> list[Effect]:
        """Those since the last call."""
        effects, self._effects = self._effects, []
        return effects

    # ------------------------------------------------------------ by name

    def pool(self, name: str) -> Pool:
        """The pool of that name, new if need be."""
        if name not in self.pools:
            self.pools[name] = Pool(name)
        return self.pools[name]

    def pool_of(self, runner: RunnerAccount) -> Pool:
        assert runner.spec is not None
        return self.pool(runner.spec.pool)

    def runner(self, runner_id: RunnerId | None) -> RunnerAccount | None:
        """That incarnation, if it is the present one."""
        runner = self.runners.get(runner_id.uuid) if runner_id else None
        return runner if runner is not None and runner.id == runner_id else None

    def new_runner(self, runner_id: RunnerId) -> RunnerAccount:
        """The record of an incarnation that was not known."""
        self._arrivals += 1
        runner = self.runners[runner_id.uuid] = RunnerAccount(runner_id, self._arrivals)
        return runner

    def replace(self, runner_id: RunnerId) -> None:
        """Remember an incarnation that a newer one has replaced: reports of it are stale."""
        self._replaced[runner_id.uuid] = runner_id.incarnation

    def was_replaced(self, runner_id: RunnerId) -> bool:
        return self._replaced.get(runner_id.uuid) == runner_id.incarnation

    def know_registry(self) -> bool:
        """Remember that a registry's snapshot is known. True where it is the first one."""
        first, self.registry_known = not self.registry_known, True
        return first

    def settle(self) -> None:
        """Remember that the cluster has had the time to report itself."""
        self.settled = True

    # ------------------------------------------------------------ what has to follow

    def mark_schedulable(self, pool: str, changed: Iterable[str] | None = None) -> None:
        """It is scheduled, and its status may differ: by a change of these runners only, or (None) of anything."""
        known = self.schedulable.setdefault(pool, set())
        if changed is None or known is None:
            self.schedulable[pool] = None
        else:
            known.update(changed)
        self.mark_dirty(pool)

    def mark_dirty(self, pool: str) -> None:
        """Let a pool that has changed be scaled, and then its status be published."""
        if pool not in self._changed_pools:
            self._changed_pools[pool] = self.published.dirty_pools[pool] = None
            self.schedule_publish()
            self.timers.set(Timer(TimerKind.SCALE), self.timers.get(Timer(TimerKind.STATUS)) or self.now)

    def take_changed_pools(self) -> list[str]:
        """Names of the pools that have changed since the last call, sorted."""
        changed, self._changed_pools = sorted(self._changed_pools), {}
        return changed

    def schedule_publish(self) -> None:
        """Let the gathering of statuses end at some time."""
        timer = Timer(TimerKind.STATUS)
        if timer not in self.timers:
            self.timers.set(timer, self.now + self.config.status_s)

    def update_runner(self, runner: RunnerAccount, *, schedule: bool = True) -> None:
        """After a change of a runner's accounts. `schedule`: a queued request may fit now."""
        if runner.spec is not None:
            pool = self.pool_of(runner)
            shapes = len(pool.fleet.accepting)
            changed = pool.fleet.update(runner)
            if schedule and changed:  # where a shape comes or goes, others may not have to wait for it any longer
                self.mark_schedulable(pool.name, (runner.id.uuid,) if shapes == len(pool.fleet.accepting) else None)
            else:
                self.mark_dirty(pool.name)

    # ------------------------------------------------------------ epochs, versions

    def ticket(self) -> int:
        """The next in order of arrival."""
        self.tickets += 1
        return self.tickets

    def version(self) -> int:
        """Grows with each call, and across restarts: the term is its upper half."""
        self._versions += 1
        return (self.term << 32) | self._versions

    def next_epoch(self) -> Epoch:
        """Above every epoch that this machine has given or received."""
        self.counter += 1
        return Epoch(self.term, self.counter)

    # The file, the terms that supervisors have stored, and gateways' epochs raise the term. What runners report never
    # does: the owner of a pool decides what runs in its runners, and could use the terms up.

    def advance_term(self, term: int) -> None:
        """Stay above a term that a supervisor has stored; above our own, too, while no epoch was given under it."""
        if term > self.term or (term == self.term and not self.counter):
            self._raise_term(term + 1)

    def advance_epoch(self, epoch: Epoch) -> None:
        """Stay above an epoch that a gateway has."""
        if epoch > (self.term, self.counter):
            self._raise_term(epoch.term + 1)

    def _raise_term(self, term: int) -> None:
        self.term, self.counter = term, 0
        self.emit(PersistTerm(term))
        for pool in self.pools.values():
            pool.adapters.renumber(self.version())
        for supervisor in self.supervisors.values():
            self.send(supervisor, SchedulerHello(term))

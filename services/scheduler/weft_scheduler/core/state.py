"""The state that one machine's handlers share: everything it knows by name, its clock, its deadlines, its effects."""

from collections.abc import Iterable

from weft.domain.ids import Epoch, RunnerId
from weft.domain.lru import LruDict
from weft.domain.machine import Peer, Send
from weft.domain.routes import CanaryCounts
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


class Numbers:
    """Counters of one scheduler. `counter`: number of epochs under the term."""

    def __init__(self, term: int) -> None:
        self.term, self.counter = term, 0
        self._tickets = self._versions = 0

    def begin(self, term: int) -> None:
        """Give epochs under another term."""
        self.term, self.counter = term, 0

    def next_epoch(self) -> Epoch:
        """Return an epoch above all epochs given or received by this machine."""
        self.counter += 1
        return Epoch(self.term, self.counter)

    def version(self) -> int:
        """Return a number that grows with each call, and across restarts: the term is its upper half."""
        self._versions += 1
        return (self.term << 32) | self._versions

    def ticket(self) -> int:
        """Return the next number in order of arrival."""
        self._tickets += 1
        return self._tickets


class Runners(dict[str, RunnerAccount]):
    """Present incarnations, and the uuids of replaced incarnations."""

    def __init__(self) -> None:
        super().__init__()
        self._arrivals = 0
        self._replaced = LruDict[str, str](MAX_REPLACED)  # uuid -> the incarnation that a newer one has replaced

    def present(self, runner_id: RunnerId | None) -> RunnerAccount | None:
        """Return the account of this incarnation, if it is present."""
        runner = self.get(runner_id.uuid) if runner_id else None
        return runner if runner is not None and runner.id == runner_id else None

    def begin(self, runner_id: RunnerId) -> RunnerAccount:
        """Return a new record of an unknown incarnation."""
        self._arrivals += 1
        runner = self[runner_id.uuid] = RunnerAccount(runner_id, self._arrivals)
        return runner

    def replace(self, runner_id: RunnerId) -> None:
        """Remember an incarnation replaced by a newer one: its reports are stale."""
        self._replaced[runner_id.uuid] = runner_id.incarnation

    def was_replaced(self, runner_id: RunnerId) -> bool:
        """Return whether reports of this incarnation are stale."""
        return self._replaced.get(runner_id.uuid) == runner_id.incarnation


class RegistryState:
    """The adapters and canaries that a registry has sent. `known`: a whole snapshot has come."""

    def __init__(self) -> None:
        self.is_known = False
        self.adapter_pool: dict[str, str] = {}  # adapter uid -> pool
        self.canaries: dict[str, tuple[str, CanaryCounts]] = {}  # adapter uid -> the digest beside its canary, counts
        self.desired_changed: dict[str, None] = {}  # pools whose runners may have to hold something else

    def know(self) -> bool:
        """Record that a snapshot is known. Return True for the first snapshot."""
        first, self.is_known = not self.is_known, True
        return first


class ReservationPolicies:
    """The reservation policies, by name, and their observed lengths."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.lengths = OutputLengthStats(config.quantile, config.default_output_tokens, config.length_adapters)
        self._policies: dict[str, ReservationPolicy] = {
            name: policy(self.lengths) for name, policy in reservation.RESERVATION_POLICIES.items()
        }

    def policy(self, name: str) -> ReservationPolicy:
        """Return the policy with this name."""
        return self._policies[name]


class State:
    """All state of one machine. `now` is the time of the present event. One file adds and removes the objects of a
    table.
    """

    def __init__(self, config: SchedulerConfig, term: int) -> None:
        self.config, self.now = config, 0.0
        self.numbers = Numbers(term)
        self.gateways: dict[str, GatewayStream] = {}
        self.requests: dict[str, Request] = {}
        self.runners = Runners()
        self.pools: dict[str, Pool] = {}
        self.supervisors: dict[str, Peer] = {}  # in order of arrival
        self.registry = RegistryState()
        self.settled = False  # the cluster has had the time to report itself
        self.timers = TimerQueue[Timer]()
        self.outcomes = OutcomeBuffer(config.max_outcomes)
        self.routes = RouteTable()
        self.published = PublishedState()
        self.reservations = ReservationPolicies(config)
        # pools to schedule, in order, and the runners that have changed there; None: anything may have
        self._schedulable: dict[str, set[str] | None] = {}
        self._changed_pools: dict[str, None] = {}  # pools that the controllers have not looked at
        self._effects: list[Effect] = []

    def advance_to(self, now: float) -> None:
        """Take the time of an event; it never goes back."""
        self.now = max(now, self.now)

    def settle(self) -> None:
        """Remember that the cluster has had time to report itself."""
        self.settled = True

    # ------------------------------------------------------------ effects

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def send(self, peer: Peer, message: object) -> None:
        self._effects.append(Send(peer, message))

    def take_effects(self) -> list[Effect]:
        """Return the effects since the last call, and forget them."""
        effects, self._effects = self._effects, []
        return effects

    # ------------------------------------------------------------ by name

    def pool(self, name: str) -> Pool:
        """Return the pool of this name, new if necessary."""
        if name not in self.pools:
            self.pools[name] = Pool(name)
        return self.pools[name]

    def pool_of(self, runner: RunnerAccount) -> Pool:
        assert runner.spec is not None
        return self.pool(runner.spec.pool)

    def forget_pool(self, name: str) -> None:
        """Forget a pool without runners and requests."""
        del self.pools[name]

    # ------------------------------------------------------------ what has to follow

    def mark_schedulable(self, pool: str, changed: Iterable[str] | None = None) -> None:
        """Let a pool be scheduled, and its status differ: by a change of these runners only, or (None) of anything."""
        schedulable = self._schedulable.setdefault(pool, set())
        if changed is None or schedulable is None:
            self._schedulable[pool] = None
        else:
            schedulable.update(changed)
        self.mark_dirty(pool)

    def next_schedulable(self) -> str | None:
        """Return a pool where an event may let something run; None: there is none."""
        return next(iter(self._schedulable), None)

    def take_changed(self, pool: str) -> set[str] | None:
        """Return the runners of a pool that have changed since the last cycle, and forget them; None: anything may."""
        return self._schedulable.pop(pool, None)

    def mark_dirty(self, pool: str) -> None:
        """Let a pool that has changed be scaled, and then its status be published."""
        if pool not in self._changed_pools:
            self._changed_pools[pool] = None
            self.published.mark_pool(pool)
            self.schedule_publish()
            self.timers.set(Timer(TimerKind.SCALE), self.timers.get(Timer(TimerKind.STATUS)) or self.now)

    def take_changed_pools(self) -> list[str]:
        """Return the names of the pools that have changed since the last call, sorted."""
        changed, self._changed_pools = sorted(self._changed_pools), {}
        return changed

    def schedule_publish(self) -> None:
        """Let the gathering of statuses end at some time."""
        timer = Timer(TimerKind.STATUS)
        if timer not in self.timers:
            self.timers.set(timer, self.now + self.config.status_s)

    def update_runner(self, runner: RunnerAccount) -> None:
        """Count a runner with changed accounts: a queued request may fit now."""
        if runner.spec is not None:
            pool = self.pool_of(runner)
            shapes = len(pool.fleet.accepting)
            if pool.fleet.update(runner):  # where a shape comes or goes, others may not have to wait for it any longer
                self.mark_schedulable(pool.name, (runner.id.uuid,) if shapes == len(pool.fleet.accepting) else None)
            else:
                self.mark_dirty(pool.name)

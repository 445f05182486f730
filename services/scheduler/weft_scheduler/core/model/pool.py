"""A pool: what the registry declares, its requests, its runners, and the policies that it is served by.

Only the methods here write the fields; each policy owns its own index.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from weft.domain.ids import BASE
from weft.domain.routes import PoolRoute, PoolSpec, Route
from weft_scheduler.core.config import SchedulerConfig
from weft_scheduler.core.model.adapters import PoolAdapters
from weft_scheduler.core.model.request import Request
from weft_scheduler.core.model.runner import RunnerAccount
from weft_scheduler.core.policy import placement, queue, reservation
from weft_scheduler.core.policy.autoscaling.autoscaler import Autoscaler, Contribution
from weft_scheduler.core.policy.autoscaling.demand import PoolLoad
from weft_scheduler.core.policy.autoscaling.throughput import DepartureRate
from weft_scheduler.core.policy.placement.punica import PlacementPolicy
from weft_scheduler.core.policy.placement.runner_index import RunnerShape
from weft_scheduler.core.policy.queue.overtaking import Overtaking
from weft_scheduler.core.policy.queue.waiting_queue import WaitingQueue

DEFAULTS = PoolSpec("")
POLICIES = {
    "placement": placement.POLICIES,
    "queue": queue.POLICIES,
    "reservation": reservation.POLICIES,
}


class Pool:
    """One pool, known by name: from the registry, from a runner or from a request."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec: PoolSpec | None = None
        self.adapters = PoolAdapters()
        # requests
        self.requests: dict[str, dict[str, None]] = {}  # adapter -> ids of its requests
        self.queue: WaitingQueue[Request] = queue.POLICIES[DEFAULTS.queue](DEFAULTS.aging_s)
        self.overtaking = Overtaking()
        self.queued_by_adapter: Counter[str] = Counter()
        self.queued_tokens = 0
        self.running = 0  # requests on runners
        self.departures = DepartureRate()
        self.recheck_feasible = False  # a queued request may have become infeasible
        # runners
        self.runners: dict[str, RunnerAccount] = {}  # those that have been confirmed, by uuid
        self.confirmed_shapes: Counter[RunnerShape] = Counter()
        self.accepting_shapes: Counter[RunnerShape] = Counter()  # of runners that take something new now or soon
        self.ready_shapes: Counter[RunnerShape] = Counter()
        self.ready_versions: Counter[int] = Counter()  # desired version -> Ready runners
        self.ready_runners = 0
        self.max_context_tokens = 0  # of the Ready runners; the last known while there are none
        self.load_failures: dict[str, dict[str, str]] = {}  # adapter -> uuid -> why its load failed there
        self.placement: PlacementPolicy = placement.POLICIES[DEFAULTS.placement]()
        self.autoscaler = Autoscaler()

    # ------------------------------------------------------------ questions

    @property
    def declared(self) -> PoolSpec:
        """The registry's spec, or the defaults of one that it has not declared."""
        return self.spec or DEFAULTS

    @property
    def in_use(self) -> bool:
        """Whether there is a reason to remember it."""
        return self.spec is not None or bool(self.requests or self.runners or self.adapters.by_uid)

    def drain_s(self, config: SchedulerConfig) -> float:
        """How long streams of a replaced or deleted digest may run on."""
        return self.declared.drain_s or config.drain_s

    def starvation_bound(self, config: SchedulerConfig) -> int:
        """How often a waiting request may be overtaken."""
        declared = self.declared.starvation_bound
        return config.starvation_bound if declared is None else declared

    def request_ids(self) -> list[str]:
        """Every request, in a fixed order."""
        return sorted(request_id for ids in self.requests.values() for request_id in ids)

    def fitting_shapes(self, rank: int, context_tokens: int) -> list[RunnerShape]:
        """The shapes of confirmed runners that could ever take such a request."""
        return [shape for shape in self.confirmed_shapes if shape.fits(rank, context_tokens)]

    def accepts(self, rank: int, context_tokens: int, numerics_class: str) -> bool:
        """Whether a runner of that class takes such a request now or soon."""
        return any(shape.fits(rank, context_tokens, numerics_class) for shape in self.accepting_shapes)

    def load(self) -> PoolLoad:
        """The pool as the autoscaler sees it."""
        waiting = self.queued_by_adapter
        return PoolLoad(
            running=self.running,
            queued=len(self.queue),
            reserved_tokens=self.autoscaler.capacity.sum.reserved_tokens,
            queued_tokens=self.queued_tokens,
            busy_slots=self.autoscaler.capacity.sum.busy_slots,
            queued_adapters=len(waiting) - sum(a in waiting for a in (BASE, *self.adapters.pinned)) if waiting else 0,
        )

    def route(self) -> PoolRoute | None:
        """What gateways know of it; None: it is not served."""
        spec = self.spec
        if spec is None or not spec.base_digest:
            return None
        return PoolRoute(
            pool=spec.name,
            base_digest=spec.base_digest,
            base_model_name=spec.base_model_name,
            max_context_tokens=self.max_context_tokens or spec.max_context_tokens,
            ready_runners=self.ready_runners,
            shared_all=spec.shared_all,
            shared_namespaces=spec.shared_namespaces,
            hold_s=spec.hold_s,
        )

    def base_route(self) -> Route | None:
        """The name of its base model."""
        spec = self.spec
        if spec is None or not (spec.base_digest and spec.base_model_name):
            return None
        namespace = spec.name.partition("/")[0]
        return Route(spec.base_model_name, namespace, spec.name, BASE, 0, f"pool:{spec.name}", spec.created_unix_s)

    # ------------------------------------------------------------ registry

    def declare(self, spec: PoolSpec | None) -> None:
        """The registry's spec; None: the registry removes the pool. A new policy gets the pool's state."""
        before, self.spec = self.declared, spec
        if (self.declared.queue, self.declared.aging_s) != (before.queue, before.aging_s):
            waiting, self.queue = list(self.queue), queue.POLICIES[self.declared.queue](self.declared.aging_s)
            for request in waiting:
                self.queue.push(request)
        if self.declared.placement != before.placement:
            self.placement = placement.POLICIES[self.declared.placement]()
            for runner in self.runners.values():
                self._index(runner)

    # ------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        self.requests.setdefault(request.adapter, {})[request.id] = None

    def remove(self, request: Request) -> bool:
        """Forget a request. True where it was the last one of its adapter."""
        ids = self.requests[request.adapter]
        del ids[request.id]
        if not ids:
            del self.requests[request.adapter]
        return not ids

    def enqueue(self, request: Request) -> None:
        self.queue.push(request)
        self.queued_by_adapter[request.adapter] += 1
        self.queued_tokens += request.queued_tokens

    def dequeue(self, request: Request) -> None:
        """Raises KeyError where it does not wait."""
        self.queue.remove(request)
        self.overtaking.forget(request.id)
        self.queued_tokens -= request.queued_tokens
        self.queued_by_adapter[request.adapter] -= 1
        if not self.queued_by_adapter[request.adapter]:
            del self.queued_by_adapter[request.adapter]

    def stop_awaiting_class(self, request: Request) -> None:
        """A queued request has waited long enough for its numerics class; it keeps its place by age."""
        self.queue.remove(request)
        request.stop_awaiting_class()
        self.queue.push(request)

    def count_running(self, by: int) -> None:
        """So many more requests are on runners."""
        self.running += by

    def recheck(self) -> None:
        """Queued requests may have become infeasible."""
        self.recheck_feasible = True

    def rechecked(self) -> bool:
        """Whether they may have, since the last call."""
        recheck, self.recheck_feasible = self.recheck_feasible, False
        return recheck

    # ------------------------------------------------------------ runners

    def confirm(self, runner: RunnerAccount) -> None:
        """A runner has been confirmed: its shape exists."""
        if not self.confirmed_shapes:
            self.recheck()
        self.runners[runner.id.uuid] = runner
        self.confirmed_shapes[runner.shape] += 1

    def unconfirm(self, runner: RunnerAccount) -> None:
        """A runner is not confirmed any more; its accounts stay."""
        _decrement(self.confirmed_shapes, runner.shape)
        if runner.shape not in self.confirmed_shapes:
            self.recheck()

    def forget_runner(self, runner: RunnerAccount) -> None:
        """It is gone: what it contributed too."""
        self.runners.pop(runner.id.uuid, None)
        self.placement.remove(runner.id.uuid)
        self._count(runner, None, ())
        self.set_errors(runner, [*runner.errors], gone=True)
        self.autoscaler.forget(runner.id.uuid)

    def update_runner(self, runner: RunnerAccount) -> bool:
        """Its accounts may have changed: index it again, and count what it contributes. True where they have."""
        standing = runner.standing(self.adapters.pinned)
        if standing == runner.counted:
            return False
        self._count(runner, runner.contributes(self.adapters.pinned), standing)
        self._index(runner)
        return True

    def _index(self, runner: RunnerAccount) -> None:
        load = runner.load(self.adapters.pinned)
        if load is not None:
            self.placement.update(load)
        else:
            self.placement.remove(runner.id.uuid)

    def _count(self, runner: RunnerAccount, after: Contribution | None, standing: tuple[object, ...]) -> None:
        before, accepted = runner.contribution, runner.accepting
        runner.count(standing, after)
        if after != before:
            self.autoscaler.capacity.replace(before, after)
        if runner.accepting and not accepted:
            self.accepting_shapes[runner.shape] += 1
        elif accepted and not runner.accepting:
            _decrement(self.accepting_shapes, runner.shape)

    def set_ready(self, runner: RunnerAccount, version: int | None) -> bool:
        """Count it among the Ready runners with that desired version, or not. True where that has changed."""
        before = runner.ready(version)
        if before == version:
            return False
        if before is not None:
            _decrement(self.ready_versions, before)
            _decrement(self.ready_shapes, runner.shape)
        if version is not None:
            self.ready_versions[version] += 1
            self.ready_shapes[runner.shape] += 1
        self.ready_runners += (version is not None) - (before is not None)
        contexts = (shape.max_context_tokens for shape in self.ready_shapes)
        self.max_context_tokens = min(contexts, default=self.max_context_tokens)
        return True

    def set_errors(self, runner: RunnerAccount, digests: Iterable[str], *, gone: bool = False) -> None:
        """The load errors of those digests on that runner have changed."""
        for digest in digests:
            error = "" if gone else runner.errors.get(digest, "")
            if error:
                self.load_failures.setdefault(digest, {})[runner.id.uuid] = error
            elif (failures := self.load_failures.get(digest)) is not None:
                failures.pop(runner.id.uuid, None)
                if not failures:
                    del self.load_failures[digest]

    def unavailable_runners(self, digest: str) -> int:
        """Ready runners that do not serve a digest: they failed to load it, or have to hold it and do not yet."""
        since = self.adapters.held_since.get(digest, 0)
        count = sum(runners for version, runners in self.ready_versions.items() if version < since)
        for uuid in self.load_failures.get(digest, ()):
            version = self.runners[uuid].ready_version if uuid in self.runners else None
            count += version is not None and version >= since
        return count


K = TypeVar("K")


def _decrement(counter: Counter[K], key: K) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]

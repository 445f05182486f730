"""A pool: what the registry declares, its requests, its runners, and the policies that it is served by.

Only the methods here write the fields; each policy owns its own index.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from weft.domain.ids import BASE
from weft.domain.routes import PhaseCounts, PoolRoute, PoolSpec, RoleCounts, Route
from weft.domain.runner import RunnerRole
from weft_scheduler.core.config import SchedulerConfig
from weft_scheduler.core.model.adapters import PoolAdapters
from weft_scheduler.core.model.batch_requests import BatchRequests
from weft_scheduler.core.model.request import Request
from weft_scheduler.core.model.runner import PROMPT_QUEUE_S, RunnerAccount
from weft_scheduler.core.policy import queue, reservation
from weft_scheduler.core.policy.autoscaling.autoscaler import Autoscaler, Contribution, PhaseBounds
from weft_scheduler.core.policy.autoscaling.demand import PoolLoad
from weft_scheduler.core.policy.autoscaling.throughput import DecayedRate, ReusedShare, bounded_retry_ms, retry_after_ms
from weft_scheduler.core.policy.consolidation.consolidation import MODES
from weft_scheduler.core.policy.phases.roles import RolePlan
from weft_scheduler.core.policy.placement.policy import PlacementPolicy, RunnerLoad
from weft_scheduler.core.policy.placement.punica import Punica
from weft_scheduler.core.policy.placement.runner_index import RunnerShape
from weft_scheduler.core.policy.placement.splitwise import Splitwise, can_split
from weft_scheduler.core.policy.priority.headroom import InteractiveArrivals
from weft_scheduler.core.policy.queue.overtaking import Overtaking
from weft_scheduler.core.policy.queue.tenant_shares import TenantShares
from weft_scheduler.core.policy.queue.token_counters import TokenCounters
from weft_scheduler.core.policy.queue.waiting_queue import WaitingQueue
from weft_scheduler.core.policy.reservation.pooled import Margin
from weft_scheduler.core.policy.slo.attainment import ServiceLevel

LOAD_BYTES_PER_S = 1 << 30  # of a cold adapter, as its tenant is charged: a disk or a network of 10 Gbit/s
BEYOND_SHARE_S = 10.0  # prompts of tenants within their share that arrive so much later are computed before
DEFAULTS = PoolSpec("")
POLICIES = {
    "queue": queue.POLICIES,
    "reservation": reservation.POLICIES,
    "consolidation": MODES,
    "phases": ("unified", "split"),
}


class Pool:
    """One pool, known by name: from the registry, from a runner or from a request."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec: PoolSpec | None = None
        self.adapters = PoolAdapters()
        # requests
        self.requests: dict[str, dict[str, None]] = {}  # adapter -> ids of its requests
        self.queue = _queue(DEFAULTS)  # of interactive requests, as all that does not say otherwise
        self.overtaking = Overtaking[Request]()
        self.batch = BatchRequests(_queue(DEFAULTS))
        self.arrivals = InteractiveArrivals()
        self.queued_by_adapter: Counter[str] = Counter()
        self.queued_tokens = self.queued_work = self.queued_prompt_tokens = 0
        self.running = 0  # on runners, batch requests too
        self.departures = DecayedRate()  # of requests
        self.reuse = ReusedShare()
        self.service_level = _service_level(DEFAULTS)
        self.margin = Margin()  # of pooled admission
        self.recheck_feasible = False  # a queued request may have become infeasible
        # runners
        self.runners: dict[str, RunnerAccount] = {}  # those that have been confirmed, by uuid
        self.confirmed_shapes: Counter[RunnerShape] = Counter()
        self.accepting: Counter[tuple[RunnerRole, RunnerShape]] = Counter()  # runners that take more now or soon
        self.ready_shapes: Counter[RunnerShape] = Counter()
        self.ready_pages: Counter[int] = Counter()  # KV pages in all -> Ready runners
        self.ready_versions: Counter[int] = Counter()  # desired version -> Ready runners
        self.ready_runners = 0
        self.max_context_tokens = 0  # of the Ready runners; the last known while there are none
        self.kv_pages = 0  # the same of the least pages in all
        self.ending: dict[str, None] = {}  # an ordered set of runners that drain
        self.load_failures: dict[str, dict[str, str]] = {}  # adapter -> uuid -> why its load failed there
        self.packs = False  # full batches are preferred to idle runners
        self.placement = new_placement(DEFAULTS)
        self.autoscaler = Autoscaler()
        self.shares = TenantShares(self.queue.counters, self.autoscaler.capacity)  # of interactive requests
        self.roles = RolePlan()
        self.roles_stale = False  # runners that take something new have come or gone
        self._published_roles: tuple[RoleCounts, float] | None = None  # and when

    # ------------------------------------------------------------ questions

    @property
    def work_per_s(self) -> float:
        """Tokens that its runners compute in a second, of prompts and answers; 0.0: nothing was measured yet."""
        return self.autoscaler.throughput.per_s() * sum(self.accepting.values())

    @property
    def prompt_tokens_per_s(self) -> float:
        """Tokens of prompts that the runners that compute prompts now compute in a second, as measured at start."""
        return self.autoscaler.capacity.sum.prefill_tokens_per_s

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

    def request_ids(self) -> list[str]:
        """Every request, in a fixed order."""
        return sorted(request_id for ids in self.requests.values() for request_id in ids)

    def fitting_shapes(self, rank: int, context_tokens: int) -> list[RunnerShape]:
        """The shapes of confirmed runners that could ever take such a request."""
        return [shape for shape in self.confirmed_shapes if shape.fits(rank, context_tokens)]

    def accepts(self, rank: int, context_tokens: int, numerics_class: str) -> bool:
        """Whether a runner of that class takes such a request now or soon."""
        return any(shape.fits(rank, context_tokens, numerics_class) for _, shape in self.accepting)

    def runners_of_roles(self) -> Counter[RunnerRole]:
        """How many of those that accept are wanted in each role."""
        counts = Counter[RunnerRole]()
        for (role, _), runners in self.accepting.items():
            counts[role] += runners
        return counts

    def published_roles(self, now: float, least_s: float) -> tuple[RoleCounts | None, float]:
        """The counts to publish, and when others may be: where as many runners change roles, `least_s` later."""
        if not self.declared.split:
            return None, now
        of_role = self.runners_of_roles()
        counts = RoleCounts(of_role[RunnerRole.PROMPT], of_role[RunnerRole.TOKEN], of_role[RunnerRole.MIXED])
        if self._published_roles is not None:
            last, published_s = self._published_roles
            if last[:3] == counts[:3]:
                return last, now
            if sum(last[:3]) == sum(counts[:3]) and now < published_s + least_s:
                return last, published_s + least_s
        counts = counts._replace(why=self.roles.why)
        self._published_roles = counts, now
        return counts, now

    def splits(self, request: Request) -> bool:
        """Whether its two phases may run on two runners."""
        spec = self.declared
        if not spec.split or request.one_runner:
            return False
        rank = self.adapters.rank(request.adapter)
        return can_split(self.accepting, rank, request.context_tokens, spec.kv_across_classes)

    def phase_bounds(self) -> PhaseBounds:
        """What bounds its runners of each phase; nothing where phases are not split."""
        spec = self.declared
        if not spec.split:
            return PhaseBounds()
        least = PhaseCounts(prompt=1, token=1)
        return PhaseBounds(spec.groups, least, self.roles.prompt_share)

    def load(self, now: float) -> PoolLoad:
        """The pool as the autoscaler sees it."""
        waiting = self.queued_by_adapter
        return PoolLoad(
            running=self.running - self.batch.running,
            queued=len(self.queue),
            reserved_tokens=self.autoscaler.capacity.interactive_tokens,
            queued_tokens=self.queued_tokens,
            busy_slots=self.autoscaler.capacity.sum.busy_slots,
            queued_prompt_tokens=self.queued_prompt_tokens,
            ttft_s=self.declared.slo_ttft_s,
            split=self.declared.split,
            prompt_tokens_per_s=self.arrivals.prompt_tokens_per_s(now),
            reused_share=self.reuse.share(now),
            batch=self.batch.total > 0,
            queued_adapters=len(waiting) - sum(a in waiting for a in (BASE, *self.adapters.pinned)) if waiting else 0,
        )

    def load_of(self, runner: RunnerAccount) -> RunnerLoad | None:
        """What placement indexes of a runner; None where nothing fits."""
        return runner.load(self.adapters.pinned, packs=self.packs)

    @property
    def is_served(self) -> bool:
        """Whether gateways know of it."""
        return bool(self.declared.base_digest)

    def route(self) -> PoolRoute | None:
        """What gateways know of it; None: it is not served."""
        return self.declared.route(self.ready_runners, self.max_context_tokens) if self.is_served else None

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
        if self.declared.slo_token_time_s != before.slo_token_time_s:
            for runner in self.runners.values():
                runner.limit(self.declared.slo_token_time_s)
                self.update_runner(runner)
        if (self.declared.slo_ttft_s, self.declared.slo_token_time_s) != (before.slo_ttft_s, before.slo_token_time_s):
            self.service_level = _service_level(self.declared)
        if _order(self.declared) != _order(before):
            waiting = sorted((*self.queue, *self.batch.queue), key=lambda request: request.order)
            self.queue, self.batch.queue = _queue(self.declared), _queue(self.declared)
            self.shares.follow(self.queue.counters)
            for request in waiting:
                self._push(request)
        if _phases(self.declared) != _phases(before):
            self.placement, self.roles_stale = new_placement(self.declared), True
            for runner in self.runners.values():
                self.update_runner(runner)
            self._index_all()

    # ------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        if request.batch:
            self.batch.count(1, 0)
        else:
            self.shares.add(request.tenant)
        self.requests.setdefault(request.adapter, {})[request.id] = None

    def remove(self, request: Request) -> bool:
        """Forget a request. True where it was the last one of its adapter."""
        if request.batch:
            self.batch.count(-1, 0)
        else:
            self.shares.remove(request.tenant)
        ids = self.requests[request.adapter]
        del ids[request.id]
        if not ids:
            del self.requests[request.adapter]
        return not ids

    def queue_of(self, request: Request) -> WaitingQueue[Request]:
        """The one of its priority."""
        return self.batch.queue if request.batch else self.queue

    def overtaking_of(self, request: Request) -> Overtaking[Request]:
        return self.batch.overtaking if request.batch else self.overtaking

    def arrived(self, request: Request, now: float) -> None:
        """A newcomer: what is expected of the next ones follows interactive ones alone."""
        if request.batch:
            return
        self.roles.work.observe(request.prompt_tokens, request.median_tokens)
        self.arrivals.count(now, request.prompt_tokens, request.footprint_tokens)

    def batch_is_due(self, now: float) -> bool:
        """`BatchRequests.is_due`, with the room for the arrivals so far."""
        before = self.batch.headroom.sequences
        due = self.batch.is_due(self.arrivals.headroom(now, sum(self.accepting.values())))
        if self.batch.headroom.sequences != before:
            for runner in self.runners.values():
                self._crowd(runner)
        return due

    def batch_footprint(self, request: Request) -> int:
        total = self.autoscaler.capacity.sum
        return self.batch.footprint(request, total.kv_tokens // max(1, total.for_tokens))

    def enqueue(self, request: Request) -> None:
        self._push(request)
        if request.batch:
            return
        self.queued_by_adapter[request.adapter] += 1
        self.queued_tokens += request.queued_tokens
        self.queued_work += request.queued_work
        self.queued_prompt_tokens += request.prompt_tokens

    def _push(self, request: Request) -> None:
        waiting = self.queue_of(request)
        waiting.push(request, self.work_per_s if waiting.policy.ages else 0.0)

    def dequeue(self, request: Request) -> None:
        """Raises KeyError where it does not wait."""
        self.queue_of(request).remove(request)
        self.overtaking_of(request).forget(request.id)
        if request.batch:
            return
        self.queued_tokens -= request.queued_tokens
        self.queued_work -= request.queued_work
        self.queued_prompt_tokens -= request.prompt_tokens
        self.queued_by_adapter[request.adapter] -= 1
        if not self.queued_by_adapter[request.adapter]:
            del self.queued_by_adapter[request.adapter]

    def charge(self, request: Request, runner: RunnerAccount) -> None:
        """Its tenant is charged for what a request that comes to a runner is expected to cost, and for a cold load."""
        more = max(0.0, request.predicted_cost - request.charged)
        request.charge(request.charged + more)
        if not runner.has_adapter(request.adapter):
            load_s = self.adapters.size(request.adapter)[1] / LOAD_BYTES_PER_S
            more += load_s * self.autoscaler.throughput.per_s()
        self._charge(request, more)

    def settle(self, request: Request, output_tokens: int) -> None:
        """A request that was on a runner is over: its tenant is charged for what was computed, and no prediction."""
        if request.charged:
            self._charge(request, request.charge(request.cost_of(output_tokens)))

    def _charge(self, request: Request, tokens: float) -> None:
        waiting = self.queue_of(request)
        waiting.counters.charge(request.tenant, tokens)

    def delay_s(self, request: Request, now: float) -> float:
        """What the arrival of a request that leaves the queue is delayed by, in the order of prompts.

        The prompts of a tenant that runs more than its share come after those that others bring within a while: else
        each of those waited for the prompts that a flood has on the runner already.
        """
        if request.batch:
            return self.batch.queue.delay_s(request, now, alone=True)  # its prompt comes after interactive ones anyway
        alone = self.shares.is_alone()
        beyond = not alone and self.shares.is_beyond(request.tenant)
        return self.queue.delay_s(request, now, alone=alone) + beyond * BEYOND_SHARE_S

    def full_for(self, tenant: str) -> bool:
        """Whether more wait than may, and more of this tenant than its share of the bound by weight."""
        limit, counters = self.declared.max_queue if self.spec is not None else 0, self.queue.counters
        if not 0 < limit < len(self.queue):
            return False
        share = limit * counters.weight(tenant) / counters.waiting_weight
        return len(self.queue.of_tenant(tenant)) > share

    def first_token_s(self, request: Request, limit_s: float) -> float:
        """In how many seconds a waiting request gets its first token, by estimate; 0: nothing was measured yet.

        Ahead of it is what its tenant has before it, at the tenant's share of what runners compute; never more than
        all that waits. Counting ends beyond `limit_s`. Where it waits for a prompt runner alone that is prompts, and
        what such a runner has before any of them.
        """
        prompts = self._waits_for_prompts(request)
        per_s = self.prompt_tokens_per_s if prompts else self.work_per_s
        if not per_s:
            return 0.0
        tenant, counters = request.tenant, self.queue.counters
        share = counters.weight(tenant) / counters.waiting_weight
        ahead = request.prompt_tokens if prompts else request.queued_work
        for other in self.queue.of_tenant(tenant):
            if other is request or ahead > limit_s * per_s * share:
                break
            ahead += other.prompt_tokens if prompts else other.queued_work
        waiting = self.queued_prompt_tokens if prompts else self.queued_work
        return min(ahead / share, waiting) / per_s + PROMPT_QUEUE_S * prompts

    def retry_after_ms(self, request: Request, now: float) -> int:
        """When a rejected client should come again: half of what waits will have left the queue."""
        if self._waits_for_prompts(request) and self.prompt_tokens_per_s:
            return bounded_retry_ms(self.queued_prompt_tokens / 2 / self.prompt_tokens_per_s)
        return retry_after_ms(len(self.queue), self.departures.per_s(now))

    def _waits_for_prompts(self, request: Request) -> bool:
        """Whether a token runner has room for a request that waits, so that its first token waits for prompts alone."""
        return self.splits(request) and self.placement.free_tokens() >= request.footprint_tokens

    def stop_awaiting_class(self, request: Request) -> None:
        """A queued request has waited long enough for its numerics class; it keeps its place by age."""
        self.queue_of(request).remove(request)
        request.stop_awaiting_class()
        self._push(request)

    def count_running(self, request: Request, by: int) -> None:
        """It is on a runner (1), or was (-1)."""
        self.running += by
        if request.batch:
            self.batch.count(0, by)
        else:
            self.shares.count_running(request.tenant, by)

    def overran(self, request: Request) -> None:
        """A request has lost its memory to others; only its first time counts."""
        if request.lost_memory() and request.forecast is not None:
            self.margin.overran()

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
        runner.limit(self.declared.slo_token_time_s)
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
        self.ending.pop(runner.id.uuid, None)
        self.placement.remove(runner.id.uuid)
        self.batch.crowded.discard(runner.id.uuid)
        self._count(runner, None, ())
        self.set_errors(runner, [*runner.errors], gone=True)
        self.autoscaler.forget(runner.id.uuid)

    def drains(self, runner: RunnerAccount) -> None:
        """It ends, or serves again after all."""
        if runner.figures.draining:
            self.ending[runner.id.uuid] = None
        else:
            self.ending.pop(runner.id.uuid, None)

    def update_runner(self, runner: RunnerAccount) -> bool:
        """Its accounts may have changed: index it again, and count what it contributes. True where they have."""
        runner.settle(self.margin.deviations)
        standing = runner.standing(self.adapters.pinned, split=self.declared.split)
        if standing == runner.counted:
            return False
        self._count(runner, runner.contributes(self.adapters.pinned), standing)
        self._index(runner)
        self._crowd(runner)
        return True

    def _crowd(self, runner: RunnerAccount) -> None:
        if runner.spec is not None:
            self.batch.crowd(runner.id.uuid, runner.working_set, runner.spec.max_sequences)

    def planned(self) -> None:
        """The roles are those of the runners that there are."""
        self.roles_stale = False

    def pack(self, packs: bool) -> None:
        """Whether full batches are preferred to idle runners from now on."""
        if packs != self.packs:
            self.packs = packs
            self._index_all()

    def _index_all(self) -> None:
        for runner in self.runners.values():
            self._index(runner)

    def _index(self, runner: RunnerAccount) -> None:
        load = self.load_of(runner)
        if load is not None:
            self.placement.update(load)
        else:
            self.placement.remove(runner.id.uuid)

    def _count(self, runner: RunnerAccount, after: Contribution | None, standing: tuple[object, ...]) -> None:
        before, accepted = runner.contribution, runner.accepting
        runner.count(standing, after)
        if after != before:
            self.autoscaler.capacity.replace(before, after)
        if (runner.accepting is None) != (accepted is None) and self.declared.split:
            self.roles_stale = True
        if runner.accepting is not accepted:
            if accepted is not None:
                _decrement(self.accepting, (accepted, runner.shape))
            if runner.accepting is not None:
                self.accepting[runner.accepting, runner.shape] += 1

    def set_ready(self, runner: RunnerAccount, version: int | None) -> None:
        """Count it among the Ready runners with that desired version, or not."""
        before = runner.ready(version)
        if before is not None:
            _decrement(self.ready_versions, before)
            _decrement(self.ready_shapes, runner.shape)
            _decrement(self.ready_pages, runner.total_pages)
        if version is not None:
            self.ready_versions[version] += 1
            self.ready_shapes[runner.shape] += 1
            self.ready_pages[runner.total_pages] += 1
        self.ready_runners += (version is not None) - (before is not None)
        contexts = (shape.max_context_tokens for shape in self.ready_shapes)
        self.max_context_tokens = min(contexts, default=self.max_context_tokens)
        self.kv_pages = min(self.ready_pages, default=self.kv_pages)

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


def _phases(spec: PoolSpec) -> tuple[object, ...]:
    """What placement and roles are made of."""
    return spec.split, spec.kv_across_classes


def new_placement(spec: PoolSpec) -> PlacementPolicy:
    return Splitwise(spec.kv_across_classes) if spec.split else Punica()


def _order(spec: PoolSpec) -> tuple[object, ...]:
    """What a queue is made of."""
    return spec.queue, spec.tenant_weights


def _queue(spec: PoolSpec) -> WaitingQueue[Request]:
    return WaitingQueue(queue.POLICIES[spec.queue](), TokenCounters(dict(spec.tenant_weights)))


def _service_level(spec: PoolSpec) -> ServiceLevel:
    return ServiceLevel(spec.slo_ttft_s, spec.slo_token_time_s)


K = TypeVar("K")


def _decrement(counter: Counter[K], key: K) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]

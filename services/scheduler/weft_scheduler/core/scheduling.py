"""One scheduling pass over a pool's queue: which requests are placed now, and which can never be."""

from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import islice

from weft.domain.ids import BASE
from weft.domain.request import RejectReason
from weft.domain.runner import RunnerRole
from weft_scheduler.core import phases
from weft_scheduler.core.batch_preemption import preempt_batch
from weft_scheduler.core.model.pool import Pool
from weft_scheduler.core.model.request import Request
from weft_scheduler.core.model.runner import RunnerAccount
from weft_scheduler.core.policy.placement.policy import Choice, PlacementRequest, RunnerLoad
from weft_scheduler.core.policy.placement.runner_index import RunnerShape
from weft_scheduler.core.policy.priority.headroom import HEADROOM_S
from weft_scheduler.core.policy.queue.overtaking import Admitted
from weft_scheduler.core.request_lifecycle import assign, reject
from weft_scheduler.core.scaling import scale
from weft_scheduler.core.state import State
from weft_scheduler.core.timers import Timer, TimerKind


def schedule_pools(state: State) -> None:
    """Place what may be placed by what an event has changed, and forget pools that are not in use."""
    while state.schedulable:
        name = next(iter(state.schedulable))
        changed = state.schedulable.pop(name)
        pool = state.pools.get(name)
        if pool is not None:
            if pool.roles_stale:
                phases.plan(state, pool)
            reject_infeasible(state, pool)
            schedule_pool(state, pool, changed)
            if pool.autoscaler.victims and len(pool.queue):
                scale(state, pool, at_once=True)  # a victim may be needed again
            if not pool.in_use:
                del state.pools[name]


def on_batch_headroom(state: State, timer: Timer) -> None:
    """Offer batch requests again: interactive arrivals may need less of the room that these leave."""
    if timer.name in state.pools:
        state.mark_schedulable(timer.name, ())


def on_startup_grace(state: State, _: Timer) -> None:
    """Reject from now on what no runner can take: the cluster has had the time to report itself."""
    state.settle()
    for pool in state.pools.values():
        pool.recheck()
        state.mark_schedulable(pool.name)


def schedule_pool(state: State, pool: Pool, changed: Collection[str] | None) -> None:
    """Place what the pool's policies place now. `changed`: runners that have changed since the last pass; None: all."""
    bound, window = state.config.starvation_bound, state.config.window
    if len(pool.queue):
        pool.overtaking.schedule(pool.queue, PoolContext(state, pool, changed), bound, window)
    if len(pool.queue):
        if pool.batch.total:
            pool.batch.pass_over()
            preempt_batch(state, pool, islice(pool.queue, window), PoolContext(state, pool, ()).could_run)
    elif len(pool.batch.queue):
        context = BatchContext(state, pool, None if pool.batch_is_due(state.now) else changed)
        pool.batch.overtaking.schedule(pool.batch.queue, context, bound, window)
        if len(pool.batch.queue) and pool.batch.headroom.sequences:
            state.timers.set_earlier(Timer(TimerKind.BATCH_HEADROOM, pool.name), state.now + HEADROOM_S)


def reject_infeasible(state: State, pool: Pool) -> None:
    """Reject what no runner can take any more, where that may have changed."""
    if pool.rechecked():
        for request in (*pool.queue, *pool.batch.queue):
            reason = infeasible_reason(state, pool, request)
            if reason is not None:
                reject(state, request, *reason)


def infeasible_reason(state: State, pool: Pool, request: Request) -> tuple[RejectReason, str] | None:
    """Why no runner of the pool could ever take it; None before the cluster had the time to report itself."""
    shapes, rank = pool.confirmed_shapes, pool.adapters.rank(request.adapter)
    if not state.settled or not shapes:
        return None
    largest = max(shape.max_context_tokens for shape in shapes)
    request.fit(largest)
    if pool.fitting_shapes(rank, request.context_tokens):
        return None
    if request.context_tokens > largest:
        return RejectReason.TOO_LARGE, f"{request.context_tokens} tokens; the largest runner holds {largest}"
    return RejectReason.ADAPTER_FAILED, f"rank {rank}; no runner with that context takes it"


class PoolContext:
    """A pool's runners, as its queue policy sees them."""

    def __init__(self, state: State, pool: Pool, changed: Collection[str] | None) -> None:
        self._state, self._pool, self._all = state, pool, changed is None
        runners = [pool.runners[uuid] for uuid in changed or () if uuid in pool.runners]
        loads = [load for runner in runners if (load := pool.load_of(runner)) is not None]
        self._loads = loads

    def changed_for(self, request: Request) -> bool:
        return self._all or any(self._may_fit(load, request) for load in self._loads)

    def _may_fit(self, load: RunnerLoad, request: Request) -> bool:
        """Whether a changed runner could be what it waits for: of a prompt runner the queue may be open again."""
        if self._pool.declared.split and load.queue_open and load.role is not RunnerRole.TOKEN:
            return True
        tokens, adapter = request.queued_tokens, request.adapter
        if tokens > load.free_tokens:
            return False
        if adapter == BASE or adapter in load.busy_adapters:
            return True
        size = self._pool.adapters.size(adapter)[1]
        return not load.full and load.shape.tokens_with_adapter(tokens, size) <= load.free_tokens

    def holds_back(self, tenant: str) -> bool:
        return self._pool.holds_back(tenant)

    def could_run(self, request: Request, runner: RunnerAccount) -> bool:
        """Whether that runner is one for it, whatever else runs there."""
        rank, uuid = self._pool.adapters.rank(request.adapter), runner.id.uuid
        fits = runner.shape.fits(rank, request.context_tokens, self._required_class(request))
        return fits and uuid not in self._avoided(request)

    def admit(self, request: Request, closed: AbstractSet[RunnerShape]) -> Admitted | None:
        choice = self.place(request, closed)
        if choice is None:
            return None
        runners = [self._state.runners[uuid] for uuid in choice if uuid is not None]
        assign(self._state, self._pool, request, *runners)
        return Admitted(tuple([(runner.shape, runner.id.uuid) for runner in runners]))

    def place(self, request: Request, closed: AbstractSet[RunnerShape]) -> Choice | None:
        """Where it runs, of its own numerics class first; None where no shape that is not closed can take it."""
        place = self._pool.placement.place
        choice = place(self._ask(request, request.numerics_class), closed)
        if choice is None and request.numerics_class and not self._required_class(request):
            choice = place(self._ask(request, ""), closed)
        return choice

    def waits_for(self, request: Request, admitted: Admitted) -> bool:
        rank = self._pool.adapters.rank(request.adapter)
        required, avoided = self._required_class(request), self._avoided(request)
        return any(
            shape.fits(rank, request.context_tokens, required) and uuid not in avoided
            for shape, uuid in admitted.runners
        )

    def placeable_shapes(self, request: Request) -> AbstractSet[RunnerShape]:
        return self._pool.placement.placeable_shapes(self._ask(request, self._required_class(request)))

    def has_capacity(self, closed: AbstractSet[RunnerShape]) -> bool:
        return self._pool.placement.has_capacity(closed)

    def free_tokens(self) -> int:
        return self._pool.placement.free_tokens()

    def _required_class(self, request: Request) -> str:
        """The numerics class that a request has to wait for; "": any will do, its own first.

        One with tokens waits for the class that computed them, for at most `same_class_s` after it ran, while a runner
        of that class can take it now or soon: it is full, its supervisor is reconnecting, or none was reported yet.
        """
        state, pool, computed_by = self._state, self._pool, request.awaited_class
        if not computed_by or state.now >= request.same_class_until:
            return ""
        rank = pool.adapters.rank(request.adapter)
        waits = not state.settled or pool.accepts(rank, request.context_tokens, computed_by)
        return computed_by if waits else ""

    def _ask(self, request: Request, numerics_class: str) -> PlacementRequest:
        rank, n_bytes = self._pool.adapters.size(request.adapter)
        return PlacementRequest(
            adapter=request.adapter,
            rank=rank,
            adapter_bytes=n_bytes,
            footprint_tokens=request.queued_tokens,
            context_tokens=request.context_tokens,
            numerics_class=numerics_class,
            avoid=self._avoided(request),
            skip_limit=self._state.config.skip_limit,
            prefill_tokens=request.prefill_tokens,
            one_runner=not self._pool.splits(request),
        )

    def _avoided(self, request: Request) -> AbstractSet[str]:
        """UUIDs of the present incarnations that it avoids."""
        of_gateway, now = self._state.gateways[request.gateway].avoidance, self._state.now
        if not of_gateway and not request.avoidance:
            return frozenset()
        both = (*of_gateway.current(now), *request.avoidance.current(now))
        return {runner_id.uuid for runner_id in both if self._state.runner(runner_id)}


class BatchContext(PoolContext):
    """The same for batch requests, which leave room on every runner (`policy/priority`)."""

    def __init__(self, state: State, pool: Pool, changed: Collection[str] | None) -> None:
        super().__init__(state, pool, changed)
        self._crowded = {uuid for uuid, runner in pool.runners.items() if self._is_crowded(runner)}

    def holds_back(self, tenant: str) -> bool:
        del tenant
        return False

    def admit(self, request: Request, closed: AbstractSet[RunnerShape]) -> Admitted | None:
        admitted = super().admit(request, closed)
        for _, uuid in admitted.runners if admitted is not None else ():
            if self._is_crowded(self._pool.runners[uuid]):
                self._crowded.add(uuid)
        return admitted

    def _is_crowded(self, runner: RunnerAccount) -> bool:
        """Whether its places are taken, or left to interactive requests: at most half of them."""
        assert runner.spec is not None, runner.id
        most = runner.spec.max_sequences
        return runner.working_set + min(self._pool.batch.headroom.sequences, most // 2) >= most

    def _ask(self, request: Request, numerics_class: str) -> PlacementRequest:
        footprint, avoid = self._pool.batch_footprint(request), self._crowded | self._avoided(request)
        return replace(super()._ask(request, numerics_class), footprint_tokens=footprint, avoid=avoid)

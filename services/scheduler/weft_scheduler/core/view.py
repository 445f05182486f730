"""A pool as a scheduling cycle reads it: the live state, of which nothing is copied and nothing is changed here."""

from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import replace

from weft.domain.ids import BASE
from weft.domain.request import RejectReason
from weft.domain.runner import RunnerRole
from weft_scheduler.core.model.request import Request
from weft_scheduler.core.model.runner import RunnerAccount
from weft_scheduler.core.policy.placement.policy import Choice, PlacementRequest, RunnerLoad
from weft_scheduler.core.policy.placement.runner_index import RunnerShape
from weft_scheduler.core.policy.queue.overtaking import Overtaking, QueuePass
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.state import State


class PoolView:
    """Interactive requests of a pool, and its runners. `changed`: those changed since the last cycle; None: all."""

    def __init__(self, state: State, pool: Pool, changed: Collection[str] | None) -> None:
        self._state, self._pool, self._all = state, pool, changed is None
        runners = (pool.fleet.runners[uuid] for uuid in changed or () if uuid in pool.fleet.runners)
        self._loads = [load for runner in runners if (load := pool.fleet.load_of(runner)) is not None]

    def begin_pass(self, overtaking: Overtaking[Request] | None = None) -> QueuePass[Request]:
        """Begin a pass over the waiting requests. `overtaking`: counts in place of the pool's counts."""
        waiting, placement, config = self._pool.waiting, self._pool.fleet.placement, self._state.config
        bounds = config.starvation_bound, config.window
        return QueuePass(overtaking or waiting.overtaking, waiting.queue, placement, *bounds, waiting.shares)

    def changed_for(self, request: Request) -> bool:
        """Return whether a request that was blocked in the last pass may fit now."""
        return self._all or any(self._may_fit(load, request) for load in self._loads)

    def _may_fit(self, load: RunnerLoad, request: Request) -> bool:
        """True for a changed runner that a request could wait for: a prompt runner's queue may be open again."""
        if self._pool.fleet.is_split and load.queue_open and load.role is not RunnerRole.TOKEN:
            return True
        tokens, adapter = request.waiting.tokens, request.adapter
        if tokens > load.free_tokens:
            return False
        if adapter == BASE or adapter in load.busy_adapters:
            return True
        size = self._pool.adapters.size(adapter)[1]
        return not load.full and load.shape.tokens_with_adapter(tokens, size) <= load.free_tokens

    def place(self, request: Request, closed: AbstractSet[RunnerShape]) -> Choice | None:
        """Return the runner for a request, first in its own numerics class. None: no open shape has room."""
        place, reserved = self._pool.fleet.placement.place, self._pool.kept_from(request, request.waiting.tokens)
        choice = place(self._ask(request, request.classes.latest, reserved), closed)
        if choice is None and request.classes.latest and not self._required_class(request):
            choice = place(self._ask(request, "", reserved), closed)
        return choice

    def waits_for(self, request: Request, choice: Choice) -> bool:
        """Return whether a request could run on a chosen runner that it does not avoid."""
        rank, runners = self._pool.adapters.rank(request.adapter), self._pool.fleet.runners
        required, avoided = self._required_class(request), self._avoided(request)
        shapes = [(runners[uuid].shape, uuid) for uuid in choice if uuid is not None]
        return any(shape.fits(rank, request.tokens.context, required) and uuid not in avoided for shape, uuid in shapes)

    def placeable_shapes(self, request: Request) -> AbstractSet[RunnerShape]:
        """Return the shapes with enough capacity for a request and a placeable runner that it does not avoid."""
        return self._pool.fleet.placement.placeable_shapes(self._ask(request, self._required_class(request)))

    def could_run(self, request: Request, runner: RunnerAccount) -> bool:
        """Return whether the runner suits a request, without regard to its present load."""
        rank, uuid = self._pool.adapters.rank(request.adapter), runner.id.uuid
        fits = runner.shape.fits(rank, request.tokens.context, self._required_class(request))
        return fits and uuid not in self._avoided(request)

    def _required_class(self, request: Request) -> str:
        """Return the numerics class that a request must wait for; "" for any class, its present class first.

        A request with tokens waits for the class that computed them, for at most `same_class_s` after it ran, while a
        runner of that class can take it now or soon: the runner is full, its supervisor is reconnecting, or none was
        reported yet.
        """
        state, pool, computed_by = self._state, self._pool, request.waiting.lane
        if not computed_by or state.now >= request.classes.awaited_until:
            return ""
        rank = pool.adapters.rank(request.adapter)
        waits = not state.settled or pool.fleet.accepts(rank, request.tokens.context, computed_by)
        return computed_by if waits else ""

    def _ask(self, request: Request, numerics_class: str, reserved: AbstractSet[str] = frozenset()) -> PlacementRequest:
        rank, n_bytes = self._pool.adapters.size(request.adapter)
        return PlacementRequest(
            adapter=request.adapter,
            rank=rank,
            adapter_bytes=n_bytes,
            footprint_tokens=request.waiting.tokens,
            context_tokens=request.tokens.context,
            numerics_class=numerics_class,
            avoid=self._avoided(request) | reserved,
            skip_limit=self._state.config.skip_limit,
            prefill_tokens=request.tokens.prefill,
            one_runner=not self._pool.splits(request),
        )

    def _avoided(self, request: Request) -> AbstractSet[str]:
        """Return the uuids of avoided present incarnations."""
        state, avoidance = self._state, request.history.avoidance
        of_gateway = state.gateways[request.gateway].avoidance
        if avoidance is None and not of_gateway:
            return frozenset()
        avoided = (*of_gateway.current(state.now), *(avoidance.current(state.now) if avoidance is not None else ()))
        return {runner_id.uuid for runner_id in avoided if self._state.runners.present(runner_id)}


class BatchView(PoolView):
    """Batch requests of a pool, which leave headroom on every runner (`policy/priority`)."""

    def begin_pass(self, overtaking: Overtaking[Request] | None = None) -> QueuePass[Request]:
        batch, config = self._pool.waiting.batch, self._state.config
        bounds = config.starvation_bound, config.window
        return QueuePass(overtaking or batch.overtaking, batch.queue, self._pool.fleet.placement, *bounds)

    def _ask(self, request: Request, numerics_class: str, reserved: AbstractSet[str] = frozenset()) -> PlacementRequest:
        total, fleet = self._pool.fleet.capacity.sum, self._pool.fleet
        footprint = self._pool.waiting.batch.footprint(request, total.kv_tokens // max(1, total.for_tokens))
        avoid = fleet.crowded | self._avoided(request)
        return replace(super()._ask(request, numerics_class, reserved), footprint_tokens=footprint, avoid=avoid)


def infeasible_reason(state: State, pool: Pool, request: Request) -> tuple[RejectReason, str] | None:
    """Return why no runner of a pool could ever take a request; None before the cluster had time to report itself."""
    shapes, rank = pool.fleet.confirmed_shapes, pool.adapters.rank(request.adapter)
    if not state.settled or not shapes:
        return None
    largest = max(shape.max_context_tokens for shape in shapes)
    request.tokens.fit(largest)
    if pool.fleet.fitting_shapes(rank, request.tokens.context):
        return None
    if request.tokens.context > largest:
        return RejectReason.TOO_LARGE, f"{request.tokens.context} tokens; the largest runner holds {largest}"
    return RejectReason.ADAPTER_FAILED, f"rank {rank}; no runner with that context takes it"

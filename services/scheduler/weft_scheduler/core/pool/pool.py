"""A pool, known by name: from the registry, from a runner or from a request."""

from weft.domain.ids import BASE
from weft.domain.routes import PoolRoute, PoolSpec, Route
from weft_scheduler.core.config import SchedulerConfig
from weft_scheduler.core.model.adapters import PoolAdapters
from weft_scheduler.core.model.request import Request
from weft_scheduler.core.policy import reservation
from weft_scheduler.core.policy.consolidation.consolidation import MODES
from weft_scheduler.core.policy.placement.splitwise import can_split
from weft_scheduler.core.policy.queue import orders
from weft_scheduler.core.pool.fleet import PoolFleet
from weft_scheduler.core.pool.queue import PoolQueue
from weft_scheduler.core.pool.scaling import PoolScaling

DEFAULTS = PoolSpec("")
POLICIES = {
    "queue": orders.QUEUE_POLICIES,
    "reservation": reservation.RESERVATION_POLICIES,
    "consolidation": MODES,
    "phases": ("unified", "split"),
}


class Pool:
    """One pool: its spec and its parts. Each part writes only its own fields."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec: PoolSpec | None = None
        self.adapters = PoolAdapters()
        self.fleet = PoolFleet(DEFAULTS, self.adapters)
        self.waiting = PoolQueue(DEFAULTS, self.fleet.capacity)
        self.scaling = PoolScaling(DEFAULTS, self.fleet.capacity)

    # ------------------------------------------------------------ the registry's view

    @property
    def declared(self) -> PoolSpec:
        """The registry's spec, or the defaults of a pool that it has not declared."""
        return self.spec or DEFAULTS

    @property
    def in_use(self) -> bool:
        """True while there is a reason to remember the pool."""
        return self.spec is not None or bool(self.waiting.requests or self.fleet.runners or self.adapters.by_uid)

    @property
    def is_served(self) -> bool:
        """Return whether gateways know of the pool."""
        return bool(self.declared.base_digest)

    def declare(self, spec: PoolSpec | None) -> None:
        """Serve by the registry's spec; None: it has removed the pool. A new policy gets the pool's state."""
        old_runners, self.spec = self.declared, spec
        runners = self.declared
        self.fleet.follow(runners)
        if (runners.slo_ttft_s, runners.slo_token_time_s) != (old_runners.slo_ttft_s, old_runners.slo_token_time_s):
            self.scaling.follow(runners)
        if (runners.queue, runners.tenant_weights) != (old_runners.queue, old_runners.tenant_weights):
            self.waiting.follow(runners, self.work_per_s)

    def drain_s(self, config: SchedulerConfig) -> float:
        """Return how long streams of a replaced or deleted digest may run on, in seconds."""
        return self.declared.drain_s or config.drain_s

    def route(self) -> PoolRoute | None:
        """Return the gateways' view of the pool; None if it is not served."""
        ready = self.fleet.ready
        if not self.is_served:
            return None
        return self.declared.route(ready.count, ready.min_context_tokens, checks_drafts=ready.check_drafts)

    def base_route(self) -> Route | None:
        """Return the name of the pool's base model; None: it serves none."""
        spec = self.spec
        if spec is None or not (spec.base_digest and spec.base_model_name):
            return None
        namespace = spec.name.partition("/")[0]
        return Route(spec.base_model_name, namespace, spec.name, BASE, 0, f"pool:{spec.name}", spec.created_unix_s)

    # ------------------------------------------------------------ what concerns several parts

    @property
    def work_per_s(self) -> float:
        """Tokens that the pool's runners compute in a second, of prompts and answers; 0.0: nothing was measured yet."""
        return self.scaling.autoscaler.throughput.per_s() * sum(self.fleet.accepting.values())

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens per second of the runners that compute prompts now, as measured at start."""
        return self.fleet.capacity.sum.prefill_tokens_per_s

    def splits(self, request: Request) -> bool:
        """Return whether a request's two phases may run on two runners."""
        if not self.fleet.is_split or request.history.one_runner:
            return False
        rank = self.adapters.rank(request.adapter)
        return can_split(self.fleet.accepting, rank, request.tokens.context, self.declared.kv_across_classes)

    def kept_from(self, request: Request, tokens: int) -> set[str]:
        """Return the uuids of runners where a request of `tokens` would take room claimed by waiting requests."""
        claims, adapters = self.waiting.claims, self.adapters
        if not claims.by_request:
            return set()
        claim, n_bytes = claims.by_request.get(request.id), adapters.size(request.adapter)[1]
        return {
            uuid
            for uuid, of_others in claims.by_runner().items()
            if (claim is None or claim.uuid != uuid)
            and (runner := self.fleet.runners.get(uuid)) is not None
            and not runner.fits_beside(of_others, request.adapter, tokens, n_bytes, adapters.pinned)
        }

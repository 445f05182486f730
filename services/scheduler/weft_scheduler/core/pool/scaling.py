"""The measures that a pool's size and roles follow: rates, expected work, and the objectives that it keeps."""

from weft.domain.routes import PhaseCounts, PoolSpec, RoleCounts
from weft_scheduler.core.model.request import Request
from weft_scheduler.core.policy.autoscaling.autoscaler import Autoscaler, PhaseBounds, PoolCapacity
from weft_scheduler.core.policy.autoscaling.throughput import DecayedRate, ReusedShare
from weft_scheduler.core.policy.phases.roles import RolePlan
from weft_scheduler.core.policy.priority.headroom import InteractiveArrivals
from weft_scheduler.core.policy.slo.attainment import ServiceLevel


class PoolScaling:
    """The autoscaler and the roles of a pool, and what they go by. `capacity`: of its runners."""

    def __init__(self, spec: PoolSpec, capacity: PoolCapacity) -> None:
        self.autoscaler = Autoscaler(capacity)
        self.roles = RolePlan()
        self.arrivals = InteractiveArrivals()
        self.departures = DecayedRate()  # of interactive requests
        self.reuse = ReusedShare()
        self.service_level = ServiceLevel(spec.slo_ttft_s, spec.slo_token_time_s)
        self._published_roles: tuple[RoleCounts, float] | None = None  # counts, and when they were published

    def follow(self, spec: PoolSpec) -> None:
        """Judge requests by the objectives of this spec."""
        self.service_level = ServiceLevel(spec.slo_ttft_s, spec.slo_token_time_s)

    def arrive(self, request: Request, now: float) -> None:
        """Count a new request. Expectations of arrivals follow interactive requests only."""
        if not request.batch:
            self.roles.work.observe(request.tokens.prompt, request.tokens.median_output)
            self.arrivals.count(now, request.tokens.prompt, request.reservation.footprint_tokens)

    def phase_bounds(self, spec: PoolSpec) -> PhaseBounds:
        """Return the bounds of the runners of each phase; empty for unsplit phases."""
        if not spec.split:
            return PhaseBounds()
        return PhaseBounds(spec.groups, PhaseCounts(prompt=1, token=1), self.roles.prompt_share)

    def published_roles(self, counts: RoleCounts, now: float, least_s: float) -> tuple[RoleCounts, float]:
        """Return the counts to publish, and the time of the next change: for changed roles, `least_s` later."""
        if self._published_roles is not None:
            last, published_s = self._published_roles
            if last[:3] == counts[:3]:
                return last, now
            if sum(last[:3]) == sum(counts[:3]) and now < published_s + least_s:
                return last, published_s + least_s
        counts = counts._replace(why=self.roles.reason)
        self._published_roles = counts, now
        return counts, now

"""The pace of refusals: at once within a tenant's rate, else later, so that a flood waits for itself.

A client that comes back at once after a refusal gets its next refusal a second later. So the cost of a flooding tenant
is bounded by `QUICK_PER_S`, and by a refusal a second for each of its open connections. Pure.
"""

from collections import Counter
from dataclasses import dataclass

from weft.domain.lru import LruDict

QUICK_PER_S, QUICK_BURST = 10.0, 20.0  # refusals of a tenant answered at once
HOLD_S = 1.0
MAX_HELD = 1000  # refusals of a tenant; beyond it a connection is closed instead
MAX_TENANTS = 10_000  # tenants remembered


@dataclass(frozen=True, slots=True)
class RefusalPace:
    """The wait of a refusal for its answer, and whether its connection ends with it."""

    hold_s: float
    closes: bool = False


AT_ONCE = RefusalPace(0.0)


class RefusalPacing:
    """Refusals by tenant, "" for all unknown callers. Times are of a clock that never goes back; it has a single
    owner."""

    def __init__(self) -> None:
        self._used: LruDict[str, tuple[float, float]] = LruDict(MAX_TENANTS)  # debt of quick refusals; its time
        self._delayed = Counter[str]()

    def begin(self, tenant: str, now: float) -> RefusalPace:
        """Count a refusal; `end` follows a held refusal."""
        used, at = self._used.get(tenant, (0.0, now))
        used = max(0.0, used - (now - at) * QUICK_PER_S)
        if used < QUICK_BURST:
            self._used[tenant] = used + 1.0, now
            return AT_ONCE
        if self._delayed[tenant] >= MAX_HELD:
            return RefusalPace(0.0, closes=True)
        self._delayed[tenant] += 1
        return RefusalPace(HOLD_S)

    def end(self, tenant: str) -> None:
        """Note the answer of a held refusal, or the loss of its client."""
        self._delayed[tenant] -= 1
        if not self._delayed[tenant]:
            del self._delayed[tenant]

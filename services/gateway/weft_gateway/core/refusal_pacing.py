"""When a refusal is answered: at once within a rate of its tenant's, else later, so that a flood waits behind itself.

A client that comes back as soon as it is refused gets its next refusal a second later. What such a tenant costs others
is bounded so: by `QUICK_PER_S`, and by one refusal a second for each connection that it keeps open. Pure.
"""

from collections import Counter
from dataclasses import dataclass

from weft.domain.lru import LruDict

QUICK_PER_S, QUICK_BURST = 10.0, 20.0  # refusals of a tenant that are answered at once
HOLD_S = 1.0
MAX_HELD = 1000  # refusals of a tenant; beyond it a connection is closed instead
MAX_TENANTS = 10_000  # that are remembered


@dataclass(frozen=True, slots=True)
class RefusalPace:
    """How long a refusal waits for its answer, and whether its connection ends with it."""

    hold_s: float
    closes: bool = False


AT_ONCE = RefusalPace(0.0)


class RefusalPacing:
    """Refusals by tenant, "" for all who are not known. Times are of one clock that never goes back; one owner."""

    def __init__(self) -> None:
        self._used: LruDict[str, tuple[float, float]] = LruDict(MAX_TENANTS)  # quick ones, as a debt; when
        self._paused = Counter[str]()

    def begin(self, tenant: str, now: float) -> RefusalPace:
        """Count a refusal; `end` follows one that is held."""
        used, at = self._used.get(tenant, (0.0, now))
        used = max(0.0, used - (now - at) * QUICK_PER_S)
        if used < QUICK_BURST:
            self._used[tenant] = used + 1.0, now
            return AT_ONCE
        if self._paused[tenant] >= MAX_HELD:
            return RefusalPace(0.0, closes=True)
        self._paused[tenant] += 1
        return RefusalPace(HOLD_S)

    def end(self, tenant: str) -> None:
        """Note that a refusal which was held is answered, or its client has gone."""
        self._paused[tenant] -= 1
        if not self._paused[tenant]:
            del self._paused[tenant]

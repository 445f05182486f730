"""Which digests the depot has to keep.

Streams of a replaced or deleted digest finish on it within its pool's drain time, so a digest that leaves the registry
stays retained for that long. The ledger is memory only: after a restart nothing is dropped before the longest drain
time has passed, because what was draining then is not known.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Retention:
    """The ledger of digests that drain, and which list the depot was sent last. Times are the clock of `now`."""

    started_at: float = 0.0
    until: dict[str, float] = field(default_factory=dict)
    last_sent: frozenset[str] | None = None  # the last complete list that the depot accepted

    def left(self, digest: str, now: float, drain_s: float) -> None:
        """A digest has left the registry: its streams may run for `drain_s` more."""
        self.until[digest] = max(self.until.get(digest, 0.0), now + drain_s)

    def forget(self, now: float) -> None:
        """Drop what has drained."""
        for digest in [digest for digest, until in self.until.items() if until <= now]:
            del self.until[digest]

    def wanted(self, live: Iterable[str], now: float) -> frozenset[str]:
        """The complete list to keep: everything live and everything that still drains."""
        return frozenset(live) | {digest for digest, until in self.until.items() if until > now}

    def due_at(self, longest_drain_s: float) -> float | None:
        """When the list may next grow shorter by itself; None while nothing drains and the depot knows."""
        ends = list(self.until.values())
        return (
            max(min(ends, default=0.0), self.started_at + longest_drain_s) if ends or self.last_sent is None else None
        )

"""What the runners of a pool should know: the registry's digests, and retired ones that streams still use.

A digest that is replaced or deleted *retires*: it stays on the list while requests use it, and for a short grace after
that, since a gateway with an older route table may still send some; at its deadline its requests are ended.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from weft_scheduler.core.values import BASE, DesiredAdapter, DesiredList


@dataclass(frozen=True, slots=True)
class Retired:
    """A digest on its way out. Times in seconds."""

    adapter: DesiredAdapter
    grace_until: float
    deadline: float


class Desired:
    """The list of one pool, versioned. `since` says in which version a digest came."""

    def __init__(self) -> None:
        self.registered: dict[str, DesiredAdapter] = {}
        self.retired: dict[str, Retired] = {}
        self.since: dict[str, int] = {}
        self.list = DesiredList(0, ())
        self.pinned: tuple[str, ...] = ()  # of the list, in its order

    def knows(self, digest: str) -> bool:
        return digest == BASE or digest in self.registered or digest in self.retired

    def rank(self, digest: str) -> int:
        """0 for the base and for digests nobody described."""
        if digest in self.registered:
            return self.registered[digest].rank
        return self.retired[digest].adapter.rank if digest in self.retired else 0

    def register(self, adapters: Iterable[DesiredAdapter], now: float, grace_s: float, drain_s: float) -> None:
        """Take the registry's adapters of this pool; what is not among them any more retires."""
        before, self.registered = self.registered, merge(adapters)
        for digest, adapter in before.items():
            if digest not in self.registered:
                self.retire(adapter, now, grace_s, drain_s)
        for digest in self.registered:
            self.retired.pop(digest, None)

    def retire(self, adapter: DesiredAdapter, now: float, grace_s: float, drain_s: float) -> None:
        """Keep a digest for a while. Pinned no more: nobody has to wait for it."""
        unpinned = DesiredAdapter(adapter.digest, adapter.rank, adapter.bytes, False)  # of no tier either
        self.retired[adapter.digest] = Retired(unpinned, now + min(grace_s, drain_s), now + drain_s)

    def forget(self, live: Mapping[str, int], now: float) -> list[str]:
        """Drop retired digests nobody uses any more. Returns those whose deadline has come while somebody does."""
        for digest in [d for d, r in self.retired.items() if r.grace_until <= now and not live.get(d)]:
            del self.retired[digest]
        return [digest for digest, retired in self.retired.items() if retired.deadline <= now]

    def next_deadline(self, live: Mapping[str, int]) -> float | None:
        """When `forget` may have something to do."""
        return min((r.deadline if live.get(d) else r.grace_until for d, r in self.retired.items()), default=None)

    def adapters(self) -> tuple[DesiredAdapter, ...]:
        """The complete list, by digest."""
        both = {**{d: r.adapter for d, r in self.retired.items()}, **self.registered}
        return tuple(both[digest] for digest in sorted(both))

    def publish(self, version: int, adapters: tuple[DesiredAdapter, ...]) -> None:
        """A new version of the list."""
        self.list = DesiredList(version, adapters)
        self.pinned = tuple(a.digest for a in adapters if a.pinned)
        self.since = {a.digest: self.since.get(a.digest, version) for a in adapters}

    def renumber(self, version: int) -> None:
        """The same list under a new version: one of an earlier process may have been numbered higher."""
        if self.list.version:
            self.list = DesiredList(version, self.list.adapters)
            self.since = dict.fromkeys(self.since, version)


def merge(adapters: Iterable[DesiredAdapter]) -> dict[str, DesiredAdapter]:
    """By digest; two adapters with the same content are one, pinned if either is, at the higher of their tiers."""
    merged: dict[str, DesiredAdapter] = {}
    for adapter in adapters:
        known = merged.setdefault(adapter.digest, adapter)
        if known.pinned < adapter.pinned or known.tier < adapter.tier:
            pinned, tier = known.pinned or adapter.pinned, max(known.tier, adapter.tier)
            merged[adapter.digest] = replace(adapter, pinned=pinned, tier=tier)
    return merged

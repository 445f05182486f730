"""The adapters of a pool: those that the registry declares, those that still drain, and what its runners hold.

A digest that is replaced or deleted *drains*: requests that use it run on, and for a short grace new ones are accepted,
since a gateway with an older route table may send some; at its deadline its requests are ended. Runners are sent only
what they have to hold (pinned, or of tier Disk or Host) and what they have to remove: a change of one adapter costs
what that adapter carries.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

from weft.domain.adapter import MAX_METRIC_NAMES, DesiredAdapter, DesiredChange, Tier
from weft.domain.ids import BASE
from weft.domain.routes import AdapterSpec

HELD_TIERS = (Tier.DISK, Tier.HOST)


@dataclass(frozen=True, slots=True)
class DrainingAdapter:
    """A digest on its way out. Times in seconds."""

    adapter: DesiredAdapter
    grace_until: float
    deadline: float


class PoolAdapters:
    """The registry's adapters of one pool by uid and by digest, and the versioned list for runners."""

    def __init__(self) -> None:
        self.by_uid: dict[str, AdapterSpec] = {}
        self.by_digest: dict[str, dict[str, AdapterSpec]] = {}  # digest -> uid -> spec
        self.draining: dict[str, DrainingAdapter] = {}
        self.published: dict[str, DesiredAdapter] = {}  # as published
        self.held_since: dict[str, int] = {}  # digest -> the version that it came with, in the order of versions
        self.pinned: tuple[str, ...] = ()  # pinned digests of `published`, sorted
        self.version = 0
        self.removed_version = 0  # version of the last publication that removed a digest
        self._registered: dict[str, DesiredAdapter] = {}  # merged, as of the last `settle`
        self._unsettled: dict[str, None] = {}  # digests whose adapters changed since
        self._unpublished: dict[str, None] = {}  # digests that may have to be published

    # ------------------------------------------------------------ registry

    def put(self, spec: AdapterSpec) -> None:
        """Take an adapter in, or its newer version. One without a digest is neither routed nor held."""
        self.drop(spec.uid)
        self.by_uid[spec.uid] = spec
        for content in spec.contents:
            self.by_digest.setdefault(content.digest, {})[content.uid] = content
            self._unsettled[content.digest] = None

    def drop(self, uid: str) -> None:
        """Take an adapter out, if it is there."""
        spec = self.by_uid.pop(uid, None)
        for content in spec.contents if spec is not None else ():
            of_digest = self.by_digest[content.digest]
            del of_digest[uid]
            if not of_digest:
                del self.by_digest[content.digest]
            self._unsettled[content.digest] = None

    def settle(self, now: float, grace_s: float, drain_s: float) -> list[str]:
        """Start to drain digests without an adapter. Return the digests with a changed rank or presence."""
        changed: list[str] = []
        for digest in self._unsettled:
            registered, merged = self._registered.get(digest), _merged(self.by_digest.get(digest, {}))
            if merged is None and registered is not None:
                del self._registered[digest]
                self.drain(registered, now, grace_s, drain_s)
            elif merged is not None:
                self._registered[digest] = merged
                self.draining.pop(digest, None)
                self._unpublished[digest] = None
            if registered is None or merged is None or registered.rank != merged.rank:
                changed.append(digest)
        self._unsettled.clear()
        return changed

    # ------------------------------------------------------------ draining

    def drain(self, adapter: DesiredAdapter, now: float, grace_s: float, drain_s: float) -> None:
        """Keep a digest for a while. It is held no more: no request has to wait for it."""
        self.draining[adapter.digest] = DrainingAdapter(adapter, now + min(grace_s, drain_s), now + drain_s)
        self._unpublished[adapter.digest] = None

    def drained(self, digest: str) -> None:
        """Forget a draining digest."""
        del self.draining[digest]
        self._unpublished[digest] = None

    # ------------------------------------------------------------ reading

    def registered(self, digest: str) -> bool:
        """Return whether an adapter of the registry has this content."""
        return digest in self._registered

    def knows(self, digest: str) -> bool:
        """Return whether requests for this digest are served."""
        return digest == BASE or digest in self._registered or digest in self.draining

    def size(self, digest: str) -> tuple[int, int]:
        """Return (rank, bytes); zeros for the base and for digests that no spec described."""
        adapter = self._registered.get(digest)
        if adapter is None and digest in self.draining:
            adapter = self.draining[digest].adapter
        return (adapter.rank, adapter.bytes) if adapter is not None else (0, 0)

    def rank(self, digest: str) -> int:
        """Return a digest's rank; 0 for the base and for digests that no spec described."""
        return self.size(digest)[0]

    # ------------------------------------------------------------ what runners hold

    def held_after(self, version: int) -> Iterator[str]:
        """Yield the digests that runners must hold only since a later version."""
        return takewhile(lambda digest: self.held_since[digest] > version, reversed(self.held_since))

    def publish(self, new_version: Callable[[], int]) -> DesiredChange | None:
        """Publish the change since the last publication, under a new version. Returns it; None: there is none."""
        if self.version and not self._unpublished:
            return None
        version = new_version()
        adapters: list[DesiredAdapter] = []
        removed: list[str] = []
        for digest in sorted(self._unpublished):
            registered = self._registered.get(digest)
            if not self.knows(digest):
                removed.append(digest)
            if registered is not None and (registered.pinned or registered.tier in HELD_TIERS):
                if registered != self.published.get(digest):
                    self.published[digest] = registered
                    self.held_since.setdefault(digest, version)
                    adapters.append(registered)
            elif (held := self.published.pop(digest, None)) is not None:
                del self.held_since[digest]
                if digest not in removed:
                    adapters.append(replace(held, pinned=False, tier=Tier.UNSPECIFIED))
        self._unpublished.clear()
        first = not self.version
        if not (first or adapters or removed):
            return None
        self.version = version
        if removed:
            self.removed_version = version
        if adapters or removed:
            self.pinned = tuple(sorted(digest for digest, adapter in self.published.items() if adapter.pinned))
        return DesiredChange(version, first, tuple(adapters), tuple(removed))

    def full(self, removed: tuple[str, ...] = ()) -> DesiredChange:
        """Return all adapters that a runner must hold, and the digests to remove."""
        return DesiredChange(
            self.version, True, tuple(self.published[digest] for digest in sorted(self.published)), removed
        )

    def renumber(self, version: int) -> None:
        """Put the list under a new version: one of an earlier process may have had a higher number."""
        if self.version:
            self.version = version
            self.held_since = dict.fromkeys(self.held_since, version)
            self.removed_version = version if self.removed_version else 0


def _merged(specs: dict[str, AdapterSpec]) -> DesiredAdapter | None:
    """Return adapters with the same content as one: pinned if any is, at the highest of their tiers."""
    if not specs:
        return None
    first = next(iter(specs.values()))
    pinned, tier = any(s.pinned for s in specs.values()), max(s.tier for s in specs.values())
    names = tuple(sorted(spec.model_name for spec in specs.values())[:MAX_METRIC_NAMES])
    return DesiredAdapter(first.digest, first.rank, first.bytes, pinned, tier, names)

"""Every adapter that this runner knows: desired, pinned, on demand, removed, forgotten.

Pinned adapters are loaded unasked and are not evicted. They protect at most all slots but one, so that every other
adapter can be served in turn. What is neither desired nor removed stays on disk after its last sequence, up to
`MAX_ON_DEMAND` adapters, least recently used out first.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from weft.domain.adapter import DesiredAdapter, DesiredChange
from weft.domain.lru import LruDict
from weft_runner.core.adapters.adapter import Adapter, LoadState
from weft_runner.core.adapters.slots import AdapterSlots

MAX_SIZES = 4096  # remembered of adapters that were forgotten
MAX_ON_DEMAND = 4096  # on disk, and of no tier


class KnownAdapters:
    """One owner: the adapter manager."""

    def __init__(self, slots: AdapterSlots) -> None:
        self.adapters: dict[str, Adapter] = {}
        self.version: int | None = None  # of the desired list; None: it has not come yet
        self.protected: list[Adapter] = []  # pinned, and within what pinned adapters may hold
        self._slots = slots
        self._pinned: dict[str, Adapter] = {}
        self._on_demand: OrderedDict[str, Adapter] = OrderedDict()  # not desired, least recently used first
        self._removed: dict[str, Adapter] = {}  # forgotten after their last sequence
        self._sizes: LruDict[str, tuple[int, bool]] = LruDict(MAX_SIZES)

    def get_or_add(self, digest: str) -> Adapter:
        """Return the record of an adapter, which somebody uses or wants now."""
        if digest not in self.adapters:
            self.adapters[digest] = self._on_demand[digest] = self.peek(digest)
        elif digest in self._on_demand:
            self._on_demand.move_to_end(digest)
        return self.adapters[digest]

    def peek(self, digest: str) -> Adapter:
        """Return what is known; a digest names one content for ever, so a size counts after it was forgotten, too."""
        n_bytes, size_known = self._sizes.get(digest, (0, False))
        return self.adapters.get(digest) or Adapter(digest, n_bytes=n_bytes, size_known=size_known)

    def find_on_disk(self, digests: Iterable[str]) -> None:
        """Take what an earlier process left, the least recently used first: on demand until it is desired."""
        assert not self.adapters, "nothing is known before"
        for digest in digests:
            self.get_or_add(digest).advance(LoadState.ON_DISK)

    def apply(self, change: DesiredChange) -> list[Adapter]:
        """Take what has to be held, as a whole or as a change. Returns the adapters that it names or takes back."""
        named = {desired.digest for desired in change.adapters}
        dropped = [a for a in self.adapters.values() if a.desired and a.digest not in named] if change.full else []
        for digest in change.removed:
            if digest not in named and (adapter := self.adapters.get(digest)) is not None:
                dropped.append(adapter)
                self._removed[digest] = adapter
        for adapter in dropped:
            adapter.want(None)
            self._on_demand[adapter.digest] = adapter
            self._unpin(adapter)
        if change.full:
            self._pinned.clear()  # the list's order counts
        self.version = change.version
        return dropped + [self._want(desired) for desired in change.adapters]

    def protect(self) -> None:
        """Protect pinned adapters in their order: all slots but one, and no more pages than one adapter may hold."""
        old_protected, self.protected, left = self.protected, list[Adapter](), self._slots.max_pages
        for adapter in old_protected:
            adapter.protect(protected=False, why_not=adapter.unpinned_reason)
        for adapter in islice(self._pinned.values(), max(0, self._slots.slots - 1)):
            needed = self._slots.pages_needed(adapter)
            reason = f"loaded on demand: {needed} pages do not fit beside other pinned adapters" * (needed > left)
            changed = adapter.unpinned_reason != reason
            adapter.protect(protected=not reason, why_not=reason)
            if changed:
                self._slots.mark_changed(adapter)
            if not reason:
                self.protected.append(adapter)
                left -= needed
        for adapter in (*old_protected, *self.protected):
            self._slots.update(adapter)

    def missing_pinned(self) -> list[str]:
        """List the protected adapters missing on the device, except adapters with damaged artifacts."""
        return [a.digest for a in self.protected if not a.resident and not a.permanent_failure]

    def take_forgotten(self) -> list[Adapter]:
        """Take out removed adapters that no sequence uses, and the least recently used beyond the bound."""
        over = [adapter for adapter in self._removed.values() if adapter.idle]
        excess = len(self._on_demand) - len(over) - MAX_ON_DEMAND
        if excess > 0:
            idle = (a for a in self._on_demand.values() if a.idle and a.digest not in self._removed)
            over.extend(islice(idle, excess + MAX_ON_DEMAND // 16))
        for adapter in over:
            if adapter.n_bytes:  # a request that was answered NoCapacity is judged by it when it comes again
                self._sizes[adapter.digest] = adapter.n_bytes, adapter.size_known
            del self.adapters[adapter.digest], self._on_demand[adapter.digest]
            self._removed.pop(adapter.digest, None)
        return over

    def check(self) -> None:
        """Whatever is not desired is on demand, and nothing else."""
        assert {digest for digest, adapter in self.adapters.items() if not adapter.desired} == {*self._on_demand}

    def _want(self, desired: DesiredAdapter) -> Adapter:
        adapter = self.get_or_add(desired.digest)
        self._on_demand.pop(desired.digest, None)
        self._removed.pop(desired.digest, None)
        adapter.want(desired.tier)
        adapter.announce(desired.rank, desired.bytes)
        if desired.pinned:
            self._pinned[adapter.digest] = adapter
        else:
            self._unpin(adapter)
        return adapter

    def _unpin(self, adapter: Adapter) -> None:
        self._pinned.pop(adapter.digest, None)
        adapter.protect(protected=adapter.protected, why_not="")

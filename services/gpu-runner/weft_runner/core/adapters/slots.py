"""Adapters on the device and their pages: which adapter has them, which may be evicted, and what that would free.

An adapter of n bytes holds ceil(n / page_bytes) pages from the start of its load: its true rank, no padding and no slot
of a fixed size (S-LoRA's unified paging, arXiv 2311.03285, section 5.1). A slot is an index that steps name it by, and
costs nothing worth a bound: as many adapters are here as pages hold, unless people set fewer. A page that is reserved
for tokens is never taken for an adapter. Unused adapters are evicted, the least valuable first: cost-aware LRU by size
(GreedyDual-Size, Cao and Irani 1997: value = clock + cost of another load / pages, clock = value of the adapter that
was evicted last), so that an adapter which is expensive to load stays longer and none stays for ever. Pinned adapters
stay, unless nothing else can run (`pinned_too`).
"""

from heapq import heappop, heappush
from typing import Any

from weft.domain.runner import KV_SHARE
from weft_runner.core.adapters.adapter import Adapter, LoadState
from weft_runner.core.events import AdapterPages, Unload
from weft_runner.core.page_table import PageTable

MAX_SLOTS = 4096  # of any runner: beyond it the books of idle adapters would cost more than their memory is worth


class AdapterSlots:
    """The slots of adapters, owned by the adapter manager. `page_bytes` 0: adapters have separate memory and no pages.

    `actions` takes what follows, `dirty` each adapter whose state has changed.
    """

    def __init__(
        self, slots: int, pages: PageTable, page_bytes: int, actions: list[Any], dirty: dict[str, Adapter]
    ) -> None:
        self.slots, self.pages, self.page_bytes = slots, pages, page_bytes
        self.by_slot: dict[int, Adapter] = {}
        self._free_slots: list[int] = []  # below the highest that was ever used; a heap
        self._by_state: dict[LoadState, dict[str, Adapter]] = {
            state: {} for state in (LoadState.LOADING, LoadState.DRAINING)
        }
        self._unused: dict[str, tuple[Adapter, bool, int]] = {}  # may be evicted: is it protected, and its pages
        self._unused_pages = {False: 0, True: 0}  # by whether they are protected
        self._actions, self._dirty = actions, dirty
        self._clock = 0.0

    @property
    def max_pages(self) -> int:
        """The maximum number of pages of one adapter."""
        max_pages = self.pages.total_pages - max(1, self.pages.total_pages // KV_SHARE)
        return max_pages if self.pages.most_adapter_pages is None else min(max_pages, self.pages.most_adapter_pages)

    def pages_needed(self, adapter: Adapter) -> int:
        """The pages that it takes. An announced size is a hint: it never makes an adapter infeasible."""
        n_pages = -(-adapter.n_bytes // self.page_bytes) if self.page_bytes else 0
        return n_pages if adapter.size_known else min(n_pages, self.max_pages)

    @property
    def loading(self) -> bool:
        """A load is under way."""
        return bool(self._by_state[LoadState.LOADING])

    @property
    def draining(self) -> list[Adapter]:
        """Adapters with slots closed to new sequences."""
        return [*self._by_state[LoadState.DRAINING].values()]

    def mark_changed(self, adapter: Adapter) -> None:
        """Count an adapter anew, and mark it for the next report."""
        self.update(adapter)
        self._dirty[adapter.digest] = adapter

    def update(self, adapter: Adapter) -> None:
        """Count an adapter anew whose state, users or protection have changed."""
        digest = adapter.digest
        for state, adapters in self._by_state.items():
            if adapter.state is state:
                adapters[digest] = adapter
            else:
                adapters.pop(digest, None)
        if (counted := self._unused.pop(digest, None)) is not None:
            self._unused_pages[counted[1]] -= counted[2]
        if _is_unused(adapter):
            n_pages = len(adapter.pages)
            self._unused[digest] = adapter, adapter.protected, n_pages
            self._unused_pages[adapter.protected] += n_pages

    def evictable_pages(self, except_for: str = "", *, pinned_too: bool = False) -> int:
        """Count the pages of unused adapters, except for `except_for`."""
        n_pages = self._unused_pages[False] + (self._unused_pages[True] if pinned_too else 0)
        _, protected, own_pages = self._unused.get(except_for, (None, False, 0))
        return n_pages if protected and not pinned_too else n_pages - own_pages

    def on_use(self, adapter: Adapter) -> None:
        """Raise the adapter's value to the value of a newly loaded adapter."""
        adapter.weigh(self._clock + adapter.load_cost / max(1, len(adapter.pages)))

    def assign(self, adapter: Adapter, *, pinned_too: bool = False) -> bool:
        """Give it a slot and its pages, evicting what that takes. False: not enough may be evicted, nothing changed."""
        needed = self.pages_needed(adapter)
        if needed > self.pages.free_adapter_pages + self.evictable_pages(pinned_too=pinned_too):
            return False
        if len(self.by_slot) == self.slots or needed > self.pages.free_adapter_pages:
            evictions = self._in_eviction_order(pinned_too=pinned_too)
            if len(self.by_slot) == self.slots and not evictions:
                return False
            for evicted in evictions:
                self._evict(evicted)  # which leaves a slot free
                if needed <= self.pages.free_adapter_pages:
                    break
        pages = self.pages.allocate(needed)
        if pages:
            self._actions.append(AdapterPages([*pages]))
        slot = heappop(self._free_slots) if self._free_slots else len(self.by_slot)
        adapter.take_slot(slot, pages)
        self.by_slot[slot] = adapter
        self.mark_changed(adapter)
        return True

    def evict_for(self, n_pages: int, except_for: str = "", *, pinned_too: bool = False) -> bool:
        """Free n pages. Return False, without evicting, if unused adapters except `except_for` hold too few pages."""
        if n_pages <= self.pages.free_pages:
            return True
        if n_pages > self.pages.free_pages + self.evictable_pages(except_for, pinned_too=pinned_too):
            return False
        evictions = iter(self._in_eviction_order(except_for, pinned_too=pinned_too))
        while n_pages > self.pages.free_pages:
            self._evict(next(evictions))
        return True

    def unload(self, adapter: Adapter) -> None:
        """Take slot and pages back."""
        assert adapter.slot is not None, adapter
        if adapter.resident:
            self._actions.append(Unload(adapter.slot))
        del self.by_slot[adapter.slot]
        heappush(self._free_slots, adapter.slot)
        self.pages.take_back(adapter.pages)
        adapter.leave_slot()
        self.mark_changed(adapter)

    def check(self) -> None:
        """Check that each slot has one adapter with exactly its pages, and that the counts are right."""
        slots = self.by_slot
        assert len(slots) <= self.slots, slots
        assert all(0 <= slot < self.slots and adapter.slot == slot for slot, adapter in slots.items())
        for adapter in slots.values():
            assert len(adapter.pages) == self.pages_needed(adapter) <= self.max_pages, adapter
            assert not (adapter.state is LoadState.DRAINING and adapter.protected and adapter.running), adapter
        assert sorted([*self._free_slots, *slots]) == list(range(len(self._free_slots) + len(slots)))
        for state, adapters in self._by_state.items():
            assert adapters == {a.digest: a for a in slots.values() if a.state is state}, (state, adapters)
        counted = {a.digest: (a, a.protected, len(a.pages)) for a in slots.values() if _is_unused(a)}
        assert self._unused == counted, (self._unused, counted)
        for protected, n_pages in self._unused_pages.items():
            assert n_pages == sum(n for _, kind, n in counted.values() if kind is protected), counted

    def _evict(self, adapter: Adapter) -> None:
        self._clock = max(self._clock, adapter.value)
        self.unload(adapter)

    def _in_eviction_order(self, except_for: str = "", *, pinned_too: bool) -> list[Adapter]:
        """Draining adapters first, then the least valuable; pinned ones last."""
        unused = [a for a, *_ in self._unused.values() if (pinned_too or not a.protected) and a.digest != except_for]
        return sorted(unused, key=lambda a: (a.protected, a.state is not LoadState.DRAINING, a.value, a.slot))


def _is_unused(adapter: Adapter) -> bool:
    if adapter.running or not adapter.resident:
        return False
    return adapter.state is LoadState.DRAINING or not adapter.waiting

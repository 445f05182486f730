"""Device slots and the pages behind them: which adapter holds one, which may be evicted, and what that would free.

An adapter of n bytes holds ceil(n / page_bytes) pages from the start of its load: its true rank, no padding and no slot
of a fixed size. A page that is reserved for tokens is never taken for an adapter. Unused adapters are evicted, the
least valuable first: cost-aware LRU by size (GreedyDual-Size, Cao and Irani 1997: value = clock + cost of another load
/ pages, clock = value of the adapter that was evicted last), so that an adapter which is expensive to load stays longer
and none stays for ever. Pinned adapters stay, unless nothing else can run (`pinned_too`).
"""

from collections.abc import Callable

from weft_runner.core.adapter import Adapter, LoadState
from weft_runner.core.events import Action, Unload
from weft_runner.core.page_table import PageTable

MOST_SLOTS = 256  # of any runner
KV_SHARE = 4  # an adapter leaves one page in so many to sequences, or it is refused


class AdapterSlots:
    """One owner: the adapter manager. `page_bytes` 0: adapters have memory of their own and hold no pages.

    `order` takes the actions that follow, `changed` each adapter whose state has changed.
    """

    def __init__(
        self,
        slots: int,
        pages: PageTable,
        page_bytes: int,
        order: Callable[[Action], None],
        changed: Callable[[Adapter], None],
    ) -> None:
        self.slots, self.pages, self.page_bytes = slots, pages, page_bytes
        self.by_slot: dict[int, Adapter] = {}
        self._order, self._changed = order, changed
        self._clock = 0.0

    @property
    def most_pages(self) -> int:
        """What one adapter may hold."""
        return self.pages.total_pages - max(1, self.pages.total_pages // KV_SHARE)

    def need(self, adapter: Adapter) -> int:
        """Pages that it takes. An announced size is a hint: it never makes an adapter infeasible."""
        n_pages = -(-adapter.n_bytes // self.page_bytes) if self.page_bytes else 0
        return n_pages if adapter.size_known else min(n_pages, self.most_pages)

    @property
    def loading(self) -> bool:
        return any(adapter.state is LoadState.LOADING for adapter in self.by_slot.values())

    def draining(self) -> list[Adapter]:
        return [adapter for adapter in self.by_slot.values() if adapter.state is LoadState.DRAINING]

    def evictable_pages(self, *besides: str, pinned_too: bool = False) -> int:
        """Pages that unused adapters hold."""
        unused = self._unused(pinned_too=pinned_too)
        return sum(self.pages.n_adapter_pages(adapter.digest) for adapter in unused if adapter.digest not in besides)

    def on_use(self, adapter: Adapter) -> None:
        adapter.value = self._clock + adapter.load_cost / max(1, self.pages.n_adapter_pages(adapter.digest))

    def assign(self, adapter: Adapter, *, pinned_too: bool = False) -> bool:
        """Give it a slot and its pages, evicting what that takes. False: not enough may be evicted, nothing changed."""
        need, unused = self.need(adapter), self._unused(pinned_too=pinned_too)
        available = self.pages.free_pages + sum(self.pages.n_adapter_pages(a.digest) for a in unused)
        if need > available or (len(self.by_slot) == self.slots and not unused):
            return False
        evictions = iter(self._in_eviction_order(unused))
        while len(self.by_slot) == self.slots or need > self.pages.free_pages:
            self._evict(next(evictions))
        allocated = self.pages.allocate_adapter(adapter.digest, need)
        assert allocated, "enough pages were freed"
        adapter.advance(LoadState.LOADING)
        adapter.slot = next(slot for slot in range(self.slots) if slot not in self.by_slot)
        self.by_slot[adapter.slot] = adapter
        self._changed(adapter)
        return True

    def evict_for(self, n_pages: int, *besides: str, pinned_too: bool = False) -> bool:
        """Free n pages. False: all unused adapters together hold too few, and none was evicted."""
        if n_pages <= self.pages.free_pages:
            return True
        unused = [adapter for adapter in self._unused(pinned_too=pinned_too) if adapter.digest not in besides]
        if n_pages > self.pages.free_pages + sum(self.pages.n_adapter_pages(a.digest) for a in unused):
            return False
        evictions = iter(self._in_eviction_order(unused))
        while n_pages > self.pages.free_pages:
            self._evict(next(evictions))
        return True

    def unload(self, adapter: Adapter) -> None:
        """A resident adapter leaves its slot; its file stays on disk."""
        assert adapter.slot is not None, adapter
        self._order(Unload(adapter.slot))
        adapter.advance(LoadState.ON_DISK)
        self._vacate(adapter)

    def on_load_failed(self, adapter: Adapter) -> None:
        """Nothing was put into its slot."""
        adapter.advance(LoadState.ABSENT)
        self._vacate(adapter)

    def next_to_drain(self) -> Adapter | None:
        candidates = [
            a for a in self.by_slot.values() if a.state is LoadState.RESIDENT and a.running and not a.protected
        ]
        return min(candidates, key=lambda a: (a.running, a.value), default=None)

    def _evict(self, adapter: Adapter) -> None:
        self._clock = max(self._clock, adapter.value)
        self.unload(adapter)

    def _vacate(self, adapter: Adapter) -> None:
        assert adapter.slot is not None, adapter
        del self.by_slot[adapter.slot]
        self.pages.free_adapter(adapter.digest)
        adapter.slot = None
        self._changed(adapter)

    def _unused(self, *, pinned_too: bool) -> list[Adapter]:
        return [a for a in self.by_slot.values() if _is_unused(a) and (pinned_too or not a.protected)]

    def _in_eviction_order(self, unused: list[Adapter]) -> list[Adapter]:
        """Draining adapters first, then the least valuable; pinned ones last."""
        return sorted(unused, key=lambda a: (a.protected, a.state is not LoadState.DRAINING, a.value, a.slot))


def _is_unused(adapter: Adapter) -> bool:
    if adapter.running or not adapter.resident:
        return False
    return adapter.state is LoadState.DRAINING or not adapter.waiting


def check_slots(slots: AdapterSlots) -> None:
    """One adapter a slot; every adapter in a slot holds exactly its pages, and no other adapter holds any."""
    taken = slots.by_slot
    assert len(taken) <= slots.slots, taken
    assert all(0 <= slot < slots.slots and adapter.slot == slot for slot, adapter in taken.items())
    assert slots.pages.adapter_owners() <= {adapter.digest for adapter in taken.values()}, "pages without an adapter"
    for adapter in taken.values():
        assert slots.pages.n_adapter_pages(adapter.digest) == slots.need(adapter) <= slots.most_pages, adapter
        assert not (adapter.state is LoadState.DRAINING and adapter.protected and adapter.running), adapter

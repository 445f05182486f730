"""Adapters on the device and their pages: which adapter has them, which may be evicted, and what that would free.

An adapter of n bytes holds ceil(n / page_bytes) pages from the start of its load: its true rank, no padding and no slot
of a fixed size (S-LoRA's unified paging, arXiv 2311.03285, section 5.1). A slot is an index that steps name it by, and
costs nothing worth a bound: as many adapters are here as pages hold, unless people set fewer. A page that is reserved
for tokens is never taken for an adapter. Unused adapters are evicted, the least valuable first: cost-aware LRU by size
(GreedyDual-Size, Cao and Irani 1997: value = clock + cost of another load / pages, clock = value of the adapter that
was evicted last), so that an adapter which is expensive to load stays longer and none stays for ever. Pinned adapters
stay, unless nothing else can run (`pinned_too`).
"""

from collections.abc import Callable
from heapq import heappop, heappush

from weft.domain.runner import KV_SHARE
from weft_runner.core.adapter import Adapter, LoadState
from weft_runner.core.events import Action, Unload
from weft_runner.core.page_table import PageTable

MOST_SLOTS = 4096  # of any runner: beyond it the books of idle adapters would cost more than their memory is worth


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
        self._free_slots: list[int] = []  # below the highest that was ever used; a heap
        self._by_state: dict[LoadState, dict[str, Adapter]] = {
            state: {} for state in (LoadState.LOADING, LoadState.DRAINING)
        }
        self._unused: dict[str, Adapter] = {}  # may be evicted; `update` keeps these books
        self._unused_pages = {False: 0, True: 0}  # by whether they are protected
        self._counted: dict[str, tuple[bool, int]] = {}  # of `_unused`: as it is counted there
        self._order, self._changed = order, changed
        self._clock = 0.0

    @property
    def most_pages(self) -> int:
        """What one adapter may hold."""
        most = self.pages.total_pages - max(1, self.pages.total_pages // KV_SHARE)
        return most if self.pages.most_adapter_pages is None else min(most, self.pages.most_adapter_pages)

    def need(self, adapter: Adapter) -> int:
        """Pages that it takes. An announced size is a hint: it never makes an adapter infeasible."""
        n_pages = -(-adapter.n_bytes // self.page_bytes) if self.page_bytes else 0
        return n_pages if adapter.size_known else min(n_pages, self.most_pages)

    @property
    def loading(self) -> bool:
        return bool(self._by_state[LoadState.LOADING])

    def draining(self) -> list[Adapter]:
        return list(self._by_state[LoadState.DRAINING].values())

    def update(self, adapter: Adapter) -> None:
        """An adapter's state, its users or its protection have changed: count it anew."""
        digest = adapter.digest
        for state, adapters in self._by_state.items():
            if adapter.state is state:
                adapters[digest] = adapter
            else:
                adapters.pop(digest, None)
        if (counted := self._counted.pop(digest, None)) is not None:
            protected, n_pages = counted
            self._unused_pages[protected] -= n_pages
            del self._unused[digest]
        if _is_unused(adapter):
            counted = self._counted[digest] = adapter.protected, self.pages.n_adapter_pages(digest)
            self._unused_pages[counted[0]] += counted[1]
            self._unused[digest] = adapter

    def evictable_pages(self, *besides: str, pinned_too: bool = False) -> int:
        """Pages that unused adapters hold."""
        beside = [counted for digest in besides if (counted := self._counted.get(digest)) is not None]
        n_pages = self._unused_pages[False] + (self._unused_pages[True] if pinned_too else 0)
        return n_pages - sum(n for protected, n in beside if pinned_too or not protected)

    def on_use(self, adapter: Adapter) -> None:
        adapter.value = self._clock + adapter.load_cost / max(1, self.pages.n_adapter_pages(adapter.digest))

    def assign(self, adapter: Adapter, *, pinned_too: bool = False) -> bool:
        """Give it a slot and its pages, evicting what that takes. False: not enough may be evicted, nothing changed."""
        need = self.need(adapter)
        if need > self.pages.free_adapter_pages + self.evictable_pages(pinned_too=pinned_too):
            return False
        if len(self.by_slot) == self.slots or need > self.pages.free_adapter_pages:
            evictions = self._in_eviction_order(pinned_too=pinned_too)
            if len(self.by_slot) == self.slots and not evictions:
                return False
            for evicted in evictions:
                self._evict(evicted)
                if len(self.by_slot) < self.slots and need <= self.pages.free_adapter_pages:
                    break
        allocated = self.pages.allocate_adapter(adapter.digest, need)
        assert allocated, "enough pages were freed"
        adapter.advance(LoadState.LOADING)
        adapter.slot = heappop(self._free_slots) if self._free_slots else len(self.by_slot)
        self.by_slot[adapter.slot] = adapter
        self._changed(adapter)
        return True

    def evict_for(self, n_pages: int, *besides: str, pinned_too: bool = False) -> bool:
        """Free n pages. False: all unused adapters together hold too few, and none was evicted."""
        if n_pages <= self.pages.free_pages:
            return True
        if n_pages > self.pages.free_pages + self.evictable_pages(*besides, pinned_too=pinned_too):
            return False
        evictions = iter(self._in_eviction_order(*besides, pinned_too=pinned_too))
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

    def check_books(self) -> None:
        """What is counted is what counting gives; free slots and taken ones are those up to the highest."""
        assert sorted([*self._free_slots, *self.by_slot]) == list(range(len(self._free_slots) + len(self.by_slot)))
        for state, adapters in self._by_state.items():
            assert adapters == {a.digest: a for a in self.by_slot.values() if a.state is state}, (state, adapters)
        unused = {a.digest: a for a in self.by_slot.values() if _is_unused(a)}
        assert self._unused == unused, (self._unused, unused)
        for digest, counted in self._counted.items():
            assert counted == (unused[digest].protected, self.pages.n_adapter_pages(digest)), (digest, counted)
        for protected, n_pages in self._unused_pages.items():
            assert n_pages == sum(n for kind, n in self._counted.values() if kind is protected), self._counted

    def _evict(self, adapter: Adapter) -> None:
        self._clock = max(self._clock, adapter.value)
        self.unload(adapter)

    def _vacate(self, adapter: Adapter) -> None:
        assert adapter.slot is not None, adapter
        del self.by_slot[adapter.slot]
        heappush(self._free_slots, adapter.slot)
        self.pages.free_adapter(adapter.digest)
        adapter.slot = None
        self._changed(adapter)

    def _in_eviction_order(self, *besides: str, pinned_too: bool) -> list[Adapter]:
        """Draining adapters first, then the least valuable; pinned ones last."""
        unused = [a for a in self._unused.values() if (pinned_too or not a.protected) and a.digest not in besides]
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
    slots.check_books()

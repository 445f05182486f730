"""The books of all adapters: sequences come and go, fetches and loads end, the desired list changes.

A sequence whose adapter is resident joins at once; any other waits for its adapter (`load_queue.py`) while the batch
runs on. What the queue waits for is withheld from new sequences, so that it is served when those that run have ended.
Adapters with a tier are held there unasked (`host_cache.py`); which ones are kept otherwise: `known.py`.
"""

from collections.abc import Iterable
from typing import Any

from weft.domain.adapter import DesiredChange
from weft.domain.request import EndReason
from weft_runner.core.adapters.adapter import Adapter, HostCopy, LoadState, check_adapter
from weft_runner.core.adapters.known import KnownAdapters
from weft_runner.core.adapters.load_queue import LoadQueue
from weft_runner.core.adapters.slots import AdapterSlots
from weft_runner.core.events import AdapterBrought, Fetched, FetchFailed, Loaded, LoadFailed, Retain
from weft_runner.core.host_cache import HostCache, TierPrefetcher, check_host_cache, check_prefetcher
from weft_runner.core.page_table import PageTable


class AdapterManager:
    """The adapters of a runner, owned by the request pool. Most changes reconcile: they assign slots, drain and empty
    them.

    `effects`: the list that takes what follows, in the order in which it has to be done; `dirty`: the adapters that
    have changed since the last report.
    """

    def __init__(
        self, slots: int, *, starvation: int = 16, host_bytes: int = 1 << 30, keep_copies: bool = True,
        pages: PageTable | None = None, page_bytes: int = 0, effects: list[Any] | None = None,
    ) -> None:  # fmt: skip
        self.effects = [] if effects is None else effects
        self.dirty: dict[str, Adapter] = {}
        self.slots = AdapterSlots(slots, pages or PageTable(1, 1), page_bytes, self.effects, self.dirty)
        self.host = HostCache(host_bytes, self.effects.append, self.slots.mark_changed)
        self.prefetcher = TierPrefetcher(self.host, self.slots.mark_changed)
        self.queue = LoadQueue(self.slots, self.host, self.effects, starvation=starvation, keep_copies=keep_copies)
        self.catalog = KnownAdapters(self.slots)
        self.adapters = self.catalog.adapters

    # ---- sequences

    def acquire(self, digest: str, *, rank: int = 0, n_bytes: int = 0) -> bool:
        """Count a sequence in. True: its adapter is resident, it joins; False: it waits for `queue.take_ready`."""
        adapter = self.catalog.get_or_add(digest)
        adapter.announce(rank, n_bytes)
        joins = adapter.state is LoadState.RESIDENT
        if joins:
            adapter.count(running=1)
            self.slots.on_use(adapter)
            self.queue.overtake()
        else:
            adapter.count(waiting=1)
            self.queue.put(adapter)
        self.slots.mark_changed(adapter)
        self.reconcile()
        return joins

    def release(self, digest: str, *, joined: bool) -> None:
        """Count off a sequence that is over, wherever it was."""
        adapter = self.adapters[digest]
        if joined:
            adapter.count(running=-1)
        else:
            adapter.count(waiting=-1)
        self.slots.mark_changed(adapter)
        self.reconcile()

    def swap_out(self, digest: str) -> None:
        """Count a sequence as swapped out: its KV is in host memory; the adapter may leave the device, not the runner.

        `reconcile` follows.
        """
        self.adapters[digest].count(running=-1, swapped=1)
        self.slots.mark_changed(self.adapters[digest])

    def release_swapped(self, digest: str) -> None:
        """Count off a sequence whose KV was in host memory: it is over, or comes back and acquires its adapter anew.

        `reconcile` follows.
        """
        self.adapters[digest].count(swapped=-1)
        self.slots.mark_changed(self.adapters[digest])

    # ---- results of actions

    def on_event(self, event: Fetched | FetchFailed | Loaded | LoadFailed) -> tuple[EndReason, str] | None:
        """Take a result of the adapter pool. Returns why the sequences that wait for the adapter have to end, if so.

        An adapter that failed is tried again when the next sequence names it, or by `retry`: never by itself.
        """
        adapter, lost = self.adapters[event.digest], None
        match event:
            case Fetched(_, n_bytes, host_bytes, seconds):
                if not adapter.on_disk:
                    self.effects.append(AdapterBrought(to_device=False, seconds=seconds))
                self.prefetcher.on_fetch_ended(adapter)
                if adapter.state is LoadState.FETCHING:
                    adapter.advance(LoadState.ON_DISK)
                adapter.fail("")
                if n_bytes is not None:
                    adapter.take_size(n_bytes)
                    self.slots.mark_changed(adapter)
                    self.catalog.protect()
                if adapter.copy is HostCopy.COPYING:
                    if host_bytes is not None and self.prefetcher.admits(adapter, host_bytes):
                        self.host.hold(adapter, host_bytes)
                    else:
                        self.host.drop(adapter)
                if fault := self.infeasible_reason(adapter.digest):
                    lost = EndReason.LOAD_FAILED, fault
                    adapter.fail(fault, permanent=True)
            case Loaded(_, rank, n_bytes, host_bytes, load_cost):
                self.effects.append(AdapterBrought(to_device=True, seconds=load_cost))
                adapter.advance(LoadState.RESIDENT)
                adapter.fail("")
                adapter.take_size(n_bytes, rank, load_cost)
                if adapter.copy is HostCopy.COPYING:
                    if host_bytes is None:
                        adapter.advance_copy(HostCopy.NONE)
                    else:
                        self.prefetcher.admits(adapter, host_bytes)
                        self.host.hold(adapter, host_bytes)
                self.host.on_use(adapter)
                self.slots.on_use(adapter)
                self.queue.join(adapter)
            case FetchFailed(_, reason, detail, permanent):
                self.prefetcher.on_fetch_ended(adapter)
                if adapter.state is LoadState.FETCHING:
                    adapter.advance(LoadState.ABSENT)
                    lost = reason, detail
                self.host.drop(adapter)
                adapter.fail(detail, permanent=permanent)
            case LoadFailed(_, reason, detail, permanent):
                lost = reason, detail
                self.slots.unload(adapter)
                self.host.drop(adapter)
                adapter.fail(detail, permanent=permanent)
        if lost is not None:
            self.queue.adapters.pop(adapter.digest, None)
        self.slots.mark_changed(adapter)
        self.prefetcher.update(adapter, requeue=isinstance(event, Fetched | Loaded))
        self.reconcile()
        return lost

    # ---- what is desired

    def apply(self, change: DesiredChange) -> None:
        """Take what has to be held, as a whole or as a change; removed adapters go after their last sequence."""
        for adapter in self.catalog.apply(change):
            self.prefetcher.set_target(adapter)
            self.slots.mark_changed(adapter)
        self.catalog.protect()
        self.prefetcher.plan()
        if change.full:
            self.effects.append(Retain(frozenset(self.adapters)))
        self._enqueue_pinned()

    def retry(self) -> None:
        """Fetch and load what is pinned or has a tier and is missing, after a failure."""
        self.prefetcher.retry()
        self._enqueue_pinned()

    def not_ready_reason(self) -> str:
        """Say why requests should not come here yet; "": they may."""
        if self.catalog.version is None:
            return "desired adapters are not known yet"
        if missing := self.catalog.missing_pinned():
            return f"{len(missing)} pinned adapters are not resident yet"
        below = self.prefetcher.missing()
        return f"{len(below)} adapters are not held at their tier yet" if below else ""

    # ---- pages

    def infeasible_reason(self, digest: str) -> str:
        """Say why this device can never hold an adapter, by its true size; "": it can."""
        adapter, max_pages = self.catalog.peek(digest), self.slots.max_pages
        if (needed := self.slots.pages_needed(adapter)) <= max_pages:
            return ""
        total = self.slots.pages.total_pages
        return f"{adapter.n_bytes} bytes are {needed} pages; of {total} an adapter may hold {max_pages}"

    def pages_beside(self, digest: str, *, announced: bool) -> int:
        """Count the pages unavailable to sequences of this adapter. `announced`: include unmeasured sizes."""
        adapter = self.catalog.peek(digest)
        return self.slots.pages_needed(adapter) if adapter.size_known or announced else 0

    def pages_to_load(self, digests: Iterable[str]) -> int:
        """Count the pages needed to load the missing adapters of `digests` to the device."""
        adapters = (a for a in map(self.adapters.get, digests) if a is not None and a.slot is None)
        return sum(map(self.slots.pages_needed, adapters))

    def free_pages(self, digest: str = "", *, alone: bool = False) -> int:
        """Count the pages for a new sequence of the adapter: free and evictable pages, minus the pages needed by the
        queue.

        `alone`: no other sequence is here, so that pinned adapters are evictable and nothing waits.
        """
        pages = self.slots.pages.free_pages + self.slots.evictable_pages(digest, pinned_too=alone)
        return pages if alone else pages - self.queue.pages

    # ---- what follows

    def slot_of(self, digest: str) -> int:
        """Return the slot of an adapter that sequences run with."""
        slot = self.adapters[digest].slot
        assert slot is not None, digest
        return slot

    def take_marks(self) -> None:
        """Forget the changed adapters, after they were reported."""
        self.dirty.clear()

    def reconcile(self) -> None:
        """Continue the queue, draining slots and forgotten adapters after pages or slots may have become free.

        A pinned adapter that was evicted so that sequences could run waits for a slot again at once; one that failed
        waits for `retry`.
        """
        queue, catalog = self.queue, self.catalog
        for adapter in catalog.protected:
            if not (adapter.resident or adapter.error):
                queue.put(adapter)
        if queue.adapters:
            queue.keep(catalog.missing_pinned())  # a pinned adapter waits for itself
        if self.prefetcher.beside_kv and not self.host.kv_bytes:
            self.prefetcher.plan()
        if catalog.version is not None and (forgotten := catalog.take_forgotten()):
            for adapter in forgotten:
                self._empty(adapter)
            self.effects.append(Retain(frozenset(self.adapters)))
        queue.assign_slots()
        queue.drain_slots()
        fetches = self.prefetcher.next_fetches()
        for adapter in fetches:
            queue.fetch(adapter, urgent=False)
        if any(adapter.digest in queue.adapters for adapter in fetches):
            queue.assign_slots()  # one that is being copied now keeps nobody behind it waiting

    def _empty(self, adapter: Adapter) -> None:
        """Take a forgotten adapter out of every tier but the disk, which the next Retain is for."""
        if adapter.resident:
            self.slots.unload(adapter)
        self.host.drop(adapter)
        self.host.drop_pages_of(adapter.digest)
        adapter.fail("")
        self.slots.mark_changed(adapter)

    def _enqueue_pinned(self) -> None:
        for digest in self.catalog.missing_pinned():
            self.queue.put(self.adapters[digest])
        self.reconcile()


def check_adapters(manager: AdapterManager) -> None:
    """Slots, pages, copies and references balance; an adapter queues only if it has to."""
    adapters, queued = manager.adapters, manager.queue.adapters
    manager.slots.check()
    manager.catalog.check()
    check_host_cache(manager.host)
    check_prefetcher(manager.prefetcher, adapters.values())
    assert {a.digest for a in manager.slots.by_slot.values()} == {d for d, a in adapters.items() if a.slot is not None}
    assert {d for d, a in adapters.items() if a.copy is HostCopy.HELD} == set(manager.host.adapters)
    for digest, adapter in adapters.items():
        check_adapter(adapter)
        assert adapter.waiting == 0 or adapter.state is LoadState.LOADING or digest in queued, adapter
        assert digest not in queued or adapter.state not in (LoadState.LOADING, LoadState.RESIDENT), adapter

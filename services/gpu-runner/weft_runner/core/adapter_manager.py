"""Where every adapter is, and which adapter gets the next device slot.

An adapter is fetched to disk before it gets a slot and pages, so that a slow download holds neither. A sequence whose
adapter is resident joins at once; any other waits in a queue of digests, first come first served among those whose file
is on disk, while the batch runs on. The head of these gets a slot and its pages as soon as free ones and evictable
adapters suffice (`adapter_slots.py`); what the queue waits for is withheld from new sequences, so that it is served
when those that run have ended.

Ageing: a queued adapter that was overtaken `starvation` times by sequences of resident adapters drains a slot: the
running sequences of the draining adapter finish, its new ones queue, and the slot goes to the head of the queue.

Pinned adapters are loaded unasked and are not evicted. They protect at most all slots but one, so that every other
adapter can be served in turn. Adapters with a tier are held there unasked (`host_cache.py`). What is neither desired
nor removed stays on disk after its last sequence, up to `MOST_ON_DEMAND` adapters, least recently used out first.
"""

from collections import OrderedDict
from collections.abc import Iterable

from weft.domain.adapter import DesiredAdapter, DesiredChange, Tier
from weft.domain.lru import LruDict
from weft_runner.core.adapter import Adapter, HostCopy, LoadState, check_adapter
from weft_runner.core.adapter_slots import AdapterSlots, check_slots
from weft_runner.core.events import Action, Fetch, Load, Retain
from weft_runner.core.host_cache import HostCache, TierPrefetcher, check_host_cache, check_prefetcher
from weft_runner.core.page_table import PageTable

SIZES = 4096  # remembered of adapters that were forgotten
MOST_ON_DEMAND = 4096  # on disk, and of no tier


class AdapterManager:
    """One owner: the request pool. Every method that changes something reconciles: it assigns slots, drains, forgets.

    `keep_copies`: a load leaves a copy in host memory, so that the next one is short. Where the device's memory is this
    machine's, the system's cache holds the file's pages already, and only adapters of tier Host have a copy.
    """

    def __init__(
        self, slots: int, *, starvation: int = 16, host_bytes: int = 1 << 30, keep_copies: bool = True,
        pages: PageTable | None = None, page_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.adapters: dict[str, Adapter] = {}
        self.queue: dict[str, Adapter] = {}  # in order of arrival
        self.slots = AdapterSlots(slots, pages or PageTable(1, 1), page_bytes, self._order, self._changed)
        self.host = HostCache(host_bytes, self._order, self._changed)
        self.prefetcher = TierPrefetcher(self.host, self._changed)
        self.page_debt = False  # paused sequences come before the queue: it gets no page while one of them waits
        self.desired_version: int | None = None
        self.dirty: dict[str, Adapter] = {}  # changed since the last report
        self._starvation, self._keep_copies = starvation, keep_copies
        self._pinned: dict[str, Adapter] = {}
        self._protected: list[Adapter] = []
        self._on_demand: OrderedDict[str, Adapter] = OrderedDict()  # not desired, least recently used first
        self._removed: dict[str, Adapter] = {}  # forgotten after their last sequence
        self._sizes: LruDict[str, tuple[int, bool]] = LruDict(SIZES)
        self.actions: list[Action] = []
        self._ready: list[str] = []

    # ---- sequences

    def acquire(self, digest: str, *, rank: int = 0, n_bytes: int = 0) -> bool:
        """A sequence arrives. True: its adapter is resident, it joins; False: it waits for `take_ready`."""
        adapter = self._get_or_add(digest)
        adapter.rank, adapter.n_bytes = adapter.rank or rank, adapter.n_bytes or n_bytes
        if digest in self._on_demand:
            self._on_demand.move_to_end(digest)
        joins = adapter.state is LoadState.RESIDENT
        if joins:
            adapter.running += 1
            self.slots.on_use(adapter)
            for queued in self.queue.values():
                queued.overtaken += self._is_ready(queued)
        else:
            adapter.waiting += 1
            self._enqueue(adapter)
        self._changed(adapter)
        self.reconcile()
        return joins

    def release(self, digest: str, *, joined: bool) -> None:
        """A sequence is over, wherever it was."""
        adapter = self.adapters[digest]
        if joined:
            adapter.running -= 1
        else:
            adapter.waiting -= 1
        self._changed(adapter)
        self.reconcile()

    def swap_out(self, digest: str) -> None:
        """Count a sequence as swapped out: its KV is in host memory; the adapter may leave the device, not the runner.

        `reconcile` follows.
        """
        adapter = self.adapters[digest]
        adapter.running, adapter.swapped = adapter.running - 1, adapter.swapped + 1
        self._changed(adapter)

    def swap_in(self, digest: str) -> bool:
        """That sequence comes back. As `acquire`."""
        self.adapters[digest].swapped -= 1
        return self.acquire(digest)

    def release_swapped(self, digest: str) -> None:
        """Count off a sequence that had swapped its KV out and is over. `reconcile` follows."""
        self.adapters[digest].swapped -= 1
        self._changed(self.adapters[digest])

    def pages_to_load(self, digests: Iterable[str]) -> int:
        """What those that are not on the device take there."""
        return sum(self.slots.need(a) for a in map(self.adapters.get, digests) if a is not None and a.slot is None)

    def take_ready(self) -> list[str]:
        """Digests whose waiting sequences join now; they count as running already."""
        ready, self._ready = self._ready, []
        return ready

    # ---- results of actions

    def on_fetched(self, digest: str, *, n_bytes: int | None, host_bytes: int | None) -> str:
        """Its file is on disk, with a copy of `host_bytes` in host memory if that was ordered.

        `n_bytes`: what it takes on the device (None: not measured). Returns why it can never be there (it has failed
        for good), else "".
        """
        adapter = self.adapters[digest]
        self.prefetcher.on_fetch_ended(adapter)
        if adapter.state is LoadState.FETCHING:
            adapter.advance(LoadState.ON_DISK)
        self._recover(adapter)
        if n_bytes is not None:
            adapter.n_bytes, adapter.size_known = max(n_bytes, 1), True
            self._protect()
        if adapter.copy is HostCopy.COPYING:
            if host_bytes is not None and self.prefetcher.admits(adapter, host_bytes):
                self.host.hold(adapter, host_bytes)
            else:
                self.host.drop(adapter)
        if fault := self.infeasible_reason(digest):
            self._fail(adapter, fault, permanent=True)
        self.prefetcher.update(adapter, requeue=True)
        self.reconcile()
        return fault

    def on_fetch_failed(self, digest: str, error: str, *, permanent: bool = False) -> bool:
        """True: it cannot be loaded either, so that the caller ends the sequences that wait for it.

        It is tried again when the next sequence names it, or by `retry`: never by itself. `permanent`: the artifact is
        wrong, so that the runner does not wait for it.
        """
        adapter = self.adapters[digest]
        self.prefetcher.on_fetch_ended(adapter)
        lost = adapter.state is LoadState.FETCHING
        if lost:
            adapter.advance(LoadState.ABSENT)
        self.host.drop(adapter)
        self._fail(adapter, error, permanent=permanent, dequeue=lost)
        self.prefetcher.update(adapter)
        self.reconcile()
        return lost

    def on_loaded(self, digest: str, *, rank: int, n_bytes: int, host_bytes: int | None, load_cost: float) -> None:
        """The adapter is in its slot. `load_cost`: what another load would take, in any one unit."""
        adapter = self.adapters[digest]
        adapter.advance(LoadState.RESIDENT)
        adapter.rank, adapter.n_bytes, adapter.size_known, adapter.load_cost = rank, n_bytes, True, load_cost
        self._recover(adapter)
        if adapter.copy is HostCopy.COPYING:
            if host_bytes is None:
                adapter.advance_copy(HostCopy.NONE)
            else:
                self.prefetcher.admits(adapter, host_bytes)
                self.host.hold(adapter, host_bytes)
        self.host.on_use(adapter)
        self.slots.on_use(adapter)
        self._join(adapter)
        self.prefetcher.update(adapter, requeue=True)
        self.reconcile()

    def on_load_failed(self, digest: str, error: str, *, permanent: bool = False) -> None:
        """Slot, pages and host copy go. The caller ends the sequences that waited at once; see `on_fetch_failed`."""
        adapter = self.adapters[digest]
        self.slots.on_load_failed(adapter)
        self.host.drop(adapter)
        self._fail(adapter, error, permanent=permanent)
        self.prefetcher.update(adapter)
        self.reconcile()

    def on_found_on_disk(self, digests: Iterable[str]) -> None:
        """An earlier process left these, the least recently used first: they are on demand until they are desired."""
        assert not self.adapters, "nothing is known before"
        for digest in digests:
            self._get_or_add(digest).advance(LoadState.ON_DISK)

    # ---- what is desired

    def apply(self, change: DesiredChange) -> None:
        """What has to be held, as a whole or as a change; removed adapters go after their last sequence."""
        named = {desired.digest for desired in change.adapters}
        dropped = [a for a in self.adapters.values() if a.desired and a.digest not in named] if change.full else []
        self.desired_version = change.version
        for adapter in dropped:
            self._set_undesired(adapter)
        for digest in change.removed:
            if digest not in named and (adapter := self.adapters.get(digest)) is not None:
                self._set_undesired(adapter)
                self._removed[digest] = adapter
        if change.full:
            self._pinned.clear()  # the list's order counts
        for desired in change.adapters:
            self._set_desired(desired)
        self._protect()
        self.prefetcher.plan()
        if change.full:
            self._order(Retain(frozenset(self.adapters)))
        self._enqueue_pinned()

    def retry(self) -> None:
        """Fetch and load what is pinned or has a tier and is missing, after a failure."""
        self.prefetcher.retry()
        self._enqueue_pinned()

    def not_ready_reason(self) -> str:
        """Why requests should not come here yet, else ""."""
        if self.desired_version is None:
            return "desired adapters are not known yet"
        if missing := self.missing_pinned():
            return f"{len(missing)} pinned adapters are not resident yet"
        below = self.prefetcher.missing()
        return f"{len(below)} adapters are not held at their tier yet" if below else ""

    def missing_pinned(self) -> list[str]:
        return [a.digest for a in self._protected if not a.resident and not a.permanent_failure]

    # ---- pages

    def infeasible_reason(self, digest: str) -> str:
        """Why this device can never hold it, by its true size; "" where it can."""
        adapter, most = self._peek(digest), self.slots.most_pages
        need, total = self.slots.need(adapter), self.slots.pages.total_pages
        return (
            "" if need <= most else f"{adapter.n_bytes} bytes are {need} pages; of {total} an adapter may hold {most}"
        )

    def pages_beside(self, digest: str, *, announced: bool) -> int:
        """Pages that sequences of this adapter cannot have. `announced`: also by a size that was not measured."""
        adapter = self._peek(digest)
        return self.slots.need(adapter) if adapter.size_known or announced else 0

    def free_pages(self, digest: str = "", *, alone: bool = False) -> int:
        """What a new sequence of that adapter can have: free and evictable pages, less what the queue waits for.

        `alone`: no other sequence is here, so that pinned adapters are evictable and nothing waits.
        """
        pages = self.slots.pages.free_pages + self.slots.evictable_pages(digest, pinned_too=alone)
        return pages if alone else pages - self.queued_pages()

    def queued_pages(self) -> int:
        """What adapters that are ready for a slot wait for."""
        queued = (a for a in self.queue.values() if a.slot is None and self._is_ready(a))
        return sum(self.slots.need(adapter) for adapter in queued)

    def force_evict_pinned(self) -> bool:
        """Let the first that sequences wait for evict pinned ones, where nothing runs or loads. False: too little.

        `reconcile` follows.
        """
        head = next((a for a in self.queue.values() if a.waiting and self._is_ready(a)), None)
        if head is None or not self.slots.assign(head, pinned_too=True):
            return False
        self._begin_load(head)
        return True

    @property
    def fetching(self) -> bool:
        """A queued adapter is on its way to disk or into host memory."""
        return any(adapter.in_transfer for adapter in self.queue.values())

    # ---- what follows

    def take_actions(self) -> list[Action]:
        """Actions for the adapter pool, in the order in which they have to be executed."""
        actions, self.actions = self.actions, []
        return actions

    def slot_of(self, digest: str) -> int:
        slot = self.adapters[digest].slot
        assert slot is not None, digest
        return slot

    def reconcile(self) -> None:
        """Pages or slots may have come free: what follows for queue, draining slots and forgotten adapters.

        A pinned adapter that was evicted so that sequences could run waits for a slot again at once; one that failed
        waits for `retry`.
        """
        for adapter in self._protected:
            if not (adapter.resident or adapter.error):
                self._enqueue(adapter)
        if self.queue:
            missing = {*self.missing_pinned()}  # a pinned adapter waits for itself
            self.queue = {d: a for d, a in self.queue.items() if a.waiting or d in missing}
        if self.prefetcher.beside_kv and not self.host.kv_bytes:
            self.prefetcher.plan()
        if self.desired_version is not None:
            self._forget()
        self._assign_slots()
        self._drain_and_reopen()
        fetches = self.prefetcher.next_fetches()
        for adapter in fetches:
            self._fetch(adapter, urgent=False)
        if any(adapter.digest in self.queue for adapter in fetches):
            self._assign_slots()  # one that is being copied now keeps nobody behind it waiting

    # ---- how

    def _order(self, action: Action) -> None:
        self.actions.append(action)

    def _changed(self, adapter: Adapter) -> None:
        self.slots.update(adapter)
        self.dirty[adapter.digest] = adapter

    def _get_or_add(self, digest: str) -> Adapter:
        if digest not in self.adapters:
            self.adapters[digest] = self._on_demand[digest] = self._peek(digest)
        return self.adapters[digest]

    def _peek(self, digest: str) -> Adapter:
        """What is known of it; a digest names one content for ever, so its size counts after it was forgotten, too."""
        n_bytes, size_known = self._sizes.get(digest, (0, False))
        return self.adapters.get(digest) or Adapter(digest, n_bytes=n_bytes, size_known=size_known)

    def _set_desired(self, desired: DesiredAdapter) -> None:
        adapter = self._get_or_add(desired.digest)
        self._on_demand.pop(desired.digest, None)
        self._removed.pop(desired.digest, None)
        adapter.desired, adapter.tier = True, desired.tier
        adapter.rank, adapter.n_bytes = adapter.rank or desired.rank, adapter.n_bytes or desired.bytes
        if desired.pinned:
            self._pinned[adapter.digest] = adapter
        else:
            self._unpin(adapter)
        self.prefetcher.set_target(adapter)
        self._changed(adapter)

    def _set_undesired(self, adapter: Adapter) -> None:
        adapter.desired, adapter.tier = False, Tier.REMOTE
        self._on_demand[adapter.digest] = adapter
        self._unpin(adapter)
        self.prefetcher.set_target(adapter)
        self._changed(adapter)

    def _unpin(self, adapter: Adapter) -> None:
        self._pinned.pop(adapter.digest, None)
        adapter.unpinned_reason = ""

    def _protect(self) -> None:
        """Pinned adapters, in their order: all slots but one, and no more pages than one adapter may hold."""
        before = self._protected
        for adapter in before:
            adapter.protected = False
        left, self._protected = self.slots.most_pages, []
        for index, adapter in enumerate(self._pinned.values()):
            if index >= self.slots.slots - 1:
                break
            need = self.slots.need(adapter)
            reason = "" if need <= left else f"loaded on demand: {need} pages do not fit beside other pinned adapters"
            if adapter.unpinned_reason != reason:
                adapter.unpinned_reason = reason
                self._changed(adapter)
            if not reason:
                adapter.protected = True
                self._protected.append(adapter)
                left -= need
        for adapter in (*before, *self._protected):
            self.slots.update(adapter)

    def _enqueue_pinned(self) -> None:
        for digest in self.missing_pinned():
            self._enqueue(self.adapters[digest])
        self.reconcile()

    def _enqueue(self, adapter: Adapter) -> None:
        """It waits for a slot."""
        if adapter.state is LoadState.LOADING or adapter.digest in self.queue:
            return
        adapter.overtaken = 0
        self.queue[adapter.digest] = adapter

    def _needs_fetch(self, adapter: Adapter) -> bool:
        """Its file is not here, or what it takes on the device is not known."""
        return adapter.state is LoadState.ABSENT or (
            adapter.state is LoadState.ON_DISK and self._is_unmeasured(adapter)
        )

    def _is_unmeasured(self, adapter: Adapter) -> bool:
        return self.slots.page_bytes > 0 and not adapter.size_known

    def _fetch(self, adapter: Adapter, *, urgent: bool) -> None:
        if self._needs_fetch(adapter):
            adapter.advance(LoadState.FETCHING)
        to_host = adapter.digest in self.host.protected and adapter.copy is HostCopy.NONE
        if to_host:
            adapter.advance_copy(HostCopy.COPYING)
        self._changed(adapter)
        self._order(Fetch(adapter.digest, to_host, urgent, measure=self._is_unmeasured(adapter)))

    def _is_ready(self, adapter: Adapter) -> bool:
        """It waits for a slot and pages, and for nothing else."""
        waits = adapter.state in (LoadState.ON_DISK, LoadState.DRAINING) and adapter.copy is not HostCopy.COPYING
        return waits and not self._needs_fetch(adapter)

    def _assign_slots(self) -> None:
        """First come, first served: no adapter that is ready gets a slot before one that came earlier and is ready."""
        blocked = False
        for adapter in list(self.queue.values()):
            if self._needs_fetch(adapter) and not adapter.in_transfer:
                self._fetch(adapter, urgent=True)
            if not self._is_ready(adapter) or blocked:
                continue
            if adapter.state is LoadState.DRAINING:  # now it is its own turn
                self._reopen(adapter)
            elif (self.page_debt and self.slots.need(adapter)) or not self.slots.assign(adapter):
                blocked = True
            else:
                self._begin_load(adapter)

    def _begin_load(self, adapter: Adapter) -> None:
        """It has its slot and its pages."""
        del self.queue[adapter.digest]
        assert adapter.slot is not None
        to_host = self._keep_copies or adapter.digest in self.host.protected
        if to_host and adapter.copy is HostCopy.NONE:
            adapter.advance_copy(HostCopy.COPYING)
        self._order(Load(adapter.digest, adapter.slot, to_host, self.slots.pages.adapter_pages(adapter.digest)))

    def _drain_and_reopen(self) -> None:
        """As many slots drain as aged adapters wait for one."""
        for adapter in self.slots.draining():
            if adapter.protected:  # pinned since
                self._reopen(adapter)
        aged = sum(a.overtaken >= self._starvation for a in self.queue.values() if self._is_ready(a))
        while len(draining := self.slots.draining()) > aged:
            self._reopen(max(draining, key=lambda a: a.running))
        while len(self.slots.draining()) < aged and (adapter := self.slots.next_to_drain()) is not None:
            adapter.advance(LoadState.DRAINING)
            self._changed(adapter)

    def _reopen(self, adapter: Adapter) -> None:
        adapter.advance(LoadState.RESIDENT)
        self._join(adapter)
        self.queue.pop(adapter.digest, None)

    def _join(self, adapter: Adapter) -> None:
        if adapter.waiting:
            adapter.running, adapter.waiting = adapter.running + adapter.waiting, 0
            self._ready.append(adapter.digest)
        self._changed(adapter)

    def _fail(self, adapter: Adapter, error: str, *, permanent: bool, dequeue: bool = True) -> None:
        adapter.error, adapter.permanent_failure = error, permanent
        if dequeue:
            self.queue.pop(adapter.digest, None)
        self._changed(adapter)

    def _recover(self, adapter: Adapter) -> None:
        adapter.error, adapter.permanent_failure = "", False
        self._changed(adapter)

    def _forget(self) -> None:
        """Removed adapters that no sequence uses leave every tier; so do the least recently used beyond the bound."""
        over = [adapter for adapter in self._removed.values() if _is_idle(adapter)]
        excess = len(self._on_demand) - len(over) - MOST_ON_DEMAND
        if excess > 0:
            idle = (a for a in self._on_demand.values() if _is_idle(a) and a.digest not in self._removed)
            over.extend(adapter for adapter, _ in zip(idle, range(excess + MOST_ON_DEMAND // 16), strict=False))
        for adapter in over:
            self._drop(adapter)
        if over:
            self._order(Retain(frozenset(self.adapters)))

    def _drop(self, adapter: Adapter) -> None:
        """It leaves every tier but the disk, and that with the next Retain."""
        if adapter.resident:
            self.slots.unload(adapter)
        self.host.drop(adapter)
        self.host.drop_pages_of(adapter.digest)
        if adapter.n_bytes:  # a request that was answered NoCapacity is judged by it when it comes again
            self._sizes[adapter.digest] = adapter.n_bytes, adapter.size_known
        del self.adapters[adapter.digest], self._on_demand[adapter.digest]
        self._removed.pop(adapter.digest, None)
        adapter.error = ""
        self._changed(adapter)


def _is_idle(adapter: Adapter) -> bool:
    return not (adapter.running or adapter.waiting or adapter.swapped or adapter.in_transfer)


def check_adapters(manager: AdapterManager) -> None:
    """Slots, pages, copies and references balance; an adapter queues only if it has to."""
    adapters = manager.adapters
    check_slots(manager.slots)
    check_host_cache(manager.host)
    check_prefetcher(manager.prefetcher, adapters.values())
    assert {a.digest for a in manager.slots.by_slot.values()} == {d for d, a in adapters.items() if a.slot is not None}
    assert {d for d, a in adapters.items() if a.copy is HostCopy.HELD} == set(manager.host.held)
    on_demand = manager._on_demand  # pyright: ignore[reportPrivateUsage]
    assert {digest for digest, adapter in adapters.items() if not adapter.desired} == set(on_demand)
    for adapter in adapters.values():
        check_adapter(adapter)
        assert adapter.waiting == 0 or adapter.state is LoadState.LOADING or adapter.digest in manager.queue, adapter
        assert not (adapter.state is LoadState.LOADING and adapter.digest in manager.queue), adapter
        assert adapter.state is not LoadState.RESIDENT or adapter.digest not in manager.queue, adapter

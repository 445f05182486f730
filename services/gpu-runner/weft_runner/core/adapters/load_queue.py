"""The order in which adapters get slots: first come, first served among those whose file is on disk.

An adapter is fetched to disk before it gets a slot and pages, so that a slow download holds neither. The head of those
that are ready gets a slot and its pages as soon as free ones and evictable adapters suffice (`slots.py`).

Ageing: a queued adapter that was overtaken `starvation` times by sequences of resident adapters drains a slot: the
running sequences of the draining adapter finish, its new ones queue, and the slot goes to the head of the queue.
"""

from weft_runner.core.adapters.adapter import Adapter, HostCopy, LoadState
from weft_runner.core.adapters.slots import AdapterSlots
from weft_runner.core.events import Action, Fetch, Load
from weft_runner.core.host_cache import HostCache


class LoadQueue:
    """The queue of loads, owned by the adapter manager. `actions` receives the resulting orders.

    `keep_copies`: a load leaves a copy in host memory, so that the next one is short. Where the device's memory is this
    machine's, the system's cache holds the file's pages already, and only adapters of tier Host have a copy.
    """

    def __init__(
        self, slots: AdapterSlots, host: HostCache, actions: list[Action], *, starvation: int, keep_copies: bool
    ) -> None:
        self.adapters: dict[str, Adapter] = {}  # in order of arrival
        self._page_debt = False  # the queue gets no page while a paused sequence waits for one
        self._slots, self._host, self._actions = slots, host, actions
        self._starvation, self._keep_copies = starvation, keep_copies
        self._ready: list[str] = []

    def put(self, adapter: Adapter) -> None:
        """Add an adapter that waits for a slot, unless it is loading or waits already."""
        if adapter.state is not LoadState.LOADING and adapter.digest not in self.adapters:
            adapter.overtake(-adapter.overtaken)
            self.adapters[adapter.digest] = adapter

    def keep(self, missing: list[str]) -> None:
        """Drop adapters without waiting sequences, except `missing` pinned adapters."""
        self.adapters = {d: a for d, a in self.adapters.items() if a.waiting or d in missing}

    def owe_pages(self, *, owed: bool) -> None:
        """Say whether paused sequences wait for pages."""
        self._page_debt = owed

    def overtake(self) -> None:
        """Count a sequence of a resident adapter that joined before the waiting sequences."""
        for adapter in self.adapters.values():
            adapter.overtake(self._is_ready(adapter))

    def join(self, adapter: Adapter) -> None:
        """Let the sequences that wait for a resident adapter join; they count as running already."""
        if adapter.waiting:
            adapter.count(running=adapter.waiting, waiting=-adapter.waiting)
            self._ready.append(adapter.digest)
        self._slots.mark_changed(adapter)

    def take_ready(self) -> list[str]:
        """Take the digests of waiting sequences that join now."""
        ready, self._ready = self._ready, []
        return ready

    @property
    def pages(self) -> int:
        """The pages needed by adapters ready for a slot."""
        queued = (a for a in self.adapters.values() if a.slot is None and self._is_ready(a))
        return sum(map(self._slots.pages_needed, queued))

    @property
    def fetching(self) -> bool:
        """A queued adapter is on its way to disk or into host memory."""
        return any(adapter.in_transfer for adapter in self.adapters.values())

    def fetch(self, adapter: Adapter, *, urgent: bool) -> None:
        """Order an adapter to disk, and into host memory where it is to be there."""
        if self._needs_fetch(adapter):
            adapter.advance(LoadState.FETCHING)
        to_host = adapter.digest in self._host.protected and adapter.copy is HostCopy.NONE
        if to_host:
            adapter.advance_copy(HostCopy.COPYING)
        self._slots.mark_changed(adapter)
        self._actions.append(Fetch(adapter.digest, to_host, urgent, measure=self._is_unmeasured(adapter)))

    def assign_slots(self) -> None:
        """Give slots in order: among ready adapters the earlier adapter gets its slot first."""
        blocked = False
        for adapter in list(self.adapters.values()):
            if self._needs_fetch(adapter) and not adapter.in_transfer:
                self.fetch(adapter, urgent=True)
            if not self._is_ready(adapter) or blocked:
                continue
            if adapter.state is LoadState.DRAINING:  # now it is its own turn
                self._reopen(adapter)
            elif (self._page_debt and self._slots.pages_needed(adapter)) or not self._slots.assign(adapter):
                blocked = True
            else:
                self._load(adapter)

    def force_evict_pinned(self) -> bool:
        """Let the first adapter with waiting sequences evict pinned adapters, if nothing runs or loads. Return False if
        the room is too small.

        `reconcile` follows.
        """
        head = next((a for a in self.adapters.values() if a.waiting and self._is_ready(a)), None)
        if head is None or not self._slots.assign(head, pinned_too=True):
            return False
        self._load(head)
        return True

    def drain_slots(self) -> None:
        """Let as many slots drain as aged adapters wait for one."""
        for adapter in self._slots.draining:
            if adapter.protected:  # pinned since
                self._reopen(adapter)
        aged = sum(a.overtaken >= self._starvation for a in self.adapters.values() if self._is_ready(a))
        draining = self._slots.draining
        if len(draining) > aged:
            for adapter in sorted(draining, key=lambda a: -a.running)[: len(draining) - aged]:
                self._reopen(adapter)
        elif len(draining) < aged:
            resident = (a for a in self._slots.by_slot.values() if a.state is LoadState.RESIDENT)
            busy = [a for a in resident if a.running and not a.protected]
            for adapter in sorted(busy, key=lambda a: (a.running, a.value))[: aged - len(draining)]:
                adapter.advance(LoadState.DRAINING)
                self._slots.mark_changed(adapter)

    def _load(self, adapter: Adapter) -> None:
        """Order the load of an adapter that has its slot and its pages."""
        del self.adapters[adapter.digest]
        assert adapter.slot is not None
        to_host = self._keep_copies or adapter.digest in self._host.protected
        if to_host and adapter.copy is HostCopy.NONE:
            adapter.advance_copy(HostCopy.COPYING)
        self._actions.append(Load(adapter.digest, adapter.slot, to_host, adapter.pages))

    def _reopen(self, adapter: Adapter) -> None:
        adapter.advance(LoadState.RESIDENT)
        self.join(adapter)
        self.adapters.pop(adapter.digest, None)

    def _needs_fetch(self, adapter: Adapter) -> bool:
        """The file is not here, or what it takes on the device is not known."""
        on_disk = adapter.state is LoadState.ON_DISK
        return adapter.state is LoadState.ABSENT or (on_disk and self._is_unmeasured(adapter))

    def _is_unmeasured(self, adapter: Adapter) -> bool:
        return self._slots.page_bytes > 0 and not adapter.size_known

    def _is_ready(self, adapter: Adapter) -> bool:
        """Nothing is missing but a slot and pages."""
        waits = adapter.state in (LoadState.ON_DISK, LoadState.DRAINING) and adapter.copy is not HostCopy.COPYING
        return waits and not self._needs_fetch(adapter)

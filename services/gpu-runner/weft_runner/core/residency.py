"""Which adapter is where, and who gets the next device slot.

Tiers: remote (the depot) -> disk -> host -> device slot. A sequence whose adapter is on the device joins at once; any
other waits in a queue of digests, first come first served, while the batch runs on. A slot is taken from an adapter
that nobody uses: cost-aware LRU (GreedyDual, Young 1994: value = clock + cost of loading again, clock = value of the
last one evicted), so that what is dear to load stays longer and nothing stays forever.

Ageing: a queued digest that was passed `starvation` times by sequences of resident adapters closes a slot. A closed
adapter's running sequences finish, its newcomers queue up behind, and the slot goes to the head of the queue.

Pinned adapters are loaded without being asked and are never evicted. They protect at most all slots but one, so that
the others can always be served in turn. Adapters with a tier are held there without being asked (`keeping.py`).
"""

from collections.abc import Iterable

from weft_runner.core.adapter import Adapter
from weft_runner.core.events import Action, Desired, DropHost, Load, Retain, Tier, Unload
from weft_runner.core.host_tier import HostTier, check_host
from weft_runner.core.keeping import Keeper, check_keeping


class Residency:
    """Slots, references and the queue. Every mutator settles: assigns slots, closes, reopens, drops what is over."""

    def __init__(self, slots: int, *, starvation: int = 16, host_bytes: int = 1 << 30) -> None:
        self.slots = slots
        self.starvation = starvation
        self.host = HostTier(host_bytes)
        self.keeper = Keeper(self.host)
        self.adapters: dict[str, Adapter] = {}
        self.queue: list[str] = []
        self.closed: set[int] = set()
        self.desired_known = False
        self._by_slot: dict[int, Adapter] = {}
        self._protected: list[Adapter] = []
        self._undesired: dict[str, Adapter] = {}  # known for their sequences' sake; thousands may be desired
        self._failed: dict[str, Adapter] = {}
        self._clock = 0.0
        self._actions: list[Action] = []
        self._joinable: list[str] = []

    # ---- what happens

    def enter(self, digest: str) -> bool:
        """A sequence arrives. True: its adapter is on the device, it joins; False: it waits for `take_joinable`."""
        adapter = self._know(digest)
        if adapter.resident and adapter.slot not in self.closed:
            adapter.running += 1
            self._touch(adapter)
            self._pass_by()
            self._settle()
            return True
        adapter.waiting += 1
        self._enqueue(adapter)
        self._settle()
        return False

    def leave(self, digest: str, *, joined: bool) -> None:
        """A sequence is over, wherever it was."""
        adapter = self.adapters[digest]
        if joined:
            adapter.running -= 1
        else:
            adapter.waiting -= 1
        assert adapter.running >= 0, digest
        assert adapter.waiting >= 0, digest
        self._settle()

    def loaded(self, digest: str, *, rank: int, n_bytes: int, host_bytes: int, cost: float) -> None:
        """The adapter is in its slot. `cost`: what loading it again would take, in any one unit."""
        adapter = self.adapters[digest]
        assert adapter.loading, digest
        adapter.loading, adapter.on_disk = False, True
        adapter.rank, adapter.n_bytes, adapter.host_bytes, adapter.cost = rank, n_bytes, host_bytes, cost
        self._recover(adapter)
        self._touch(adapter)
        if adapter.spoiled:
            adapter.spoiled = adapter.fetching
            self._drop_host(adapter)
            self.keeper.again(adapter)
        else:
            self.keeper.admits(adapter)
            self._hold(adapter)
        self._join(adapter)
        self._settle()

    def failed(self, digest: str, error: str, *, hopeless: bool = False) -> None:
        """Loading has failed; slot and host copy go. The caller ends the sequences that waited at once.

        It is tried again when the next sequence asks for it, or by `retry`: never by itself. `hopeless`: the artifact
        is wrong, so that it is waited for no more.
        """
        adapter = self.adapters[digest]
        assert adapter.loading, digest
        assert adapter.slot is not None
        adapter.loading, adapter.spoiled = False, adapter.fetching
        self._fail(adapter, error, hopeless=hopeless)
        del self._by_slot[adapter.slot]
        adapter.slot = None
        self._drop_host(adapter)
        self._settle()

    def fetched(self, digest: str, *, host_bytes: int | None) -> None:
        """A fetch has brought it to disk, and a copy of `host_bytes` into host memory (None: no copy)."""
        adapter = self.adapters[digest]
        self.keeper.ended(adapter)
        adapter.on_disk = True
        if adapter.spoiled:
            adapter.spoiled = False
            self._drop_host(adapter)
        else:
            self._recover(adapter)
            self._take_copy(adapter, host_bytes)
        self.keeper.look(adapter)
        self.keeper.again(adapter)
        self._settle()

    def fetch_failed(self, digest: str, error: str, *, hopeless: bool = False) -> None:
        """A fetch has failed: as `failed`, for those that nobody has asked for yet."""
        adapter = self.adapters[digest]
        self.keeper.ended(adapter)
        adapter.spoiled = False
        self._fail(adapter, error, hopeless=hopeless)
        self._settle()

    def set_desired(self, desired: Iterable[Desired]) -> None:
        """The complete list of what the runner should know; everything else goes after its last sequence."""
        wanted = list(desired)
        self.desired_known = True
        pinned = [d.digest for d in wanted if d.pinned][: max(self.slots - 1, 0)]
        for adapter in self.adapters.values():
            adapter.desired = adapter.protected = False
            adapter.tier, adapter.shortfall = Tier.REMOTE, ""
        for item in wanted:
            adapter = self._know(item.digest)
            adapter.desired, adapter.protected, adapter.tier = True, item.digest in pinned, item.tier
            adapter.rank, adapter.n_bytes = adapter.rank or item.rank, adapter.n_bytes or item.n_bytes
        self._protected = [self.adapters[digest] for digest in dict.fromkeys(pinned)]
        self._undesired = {digest: a for digest, a in self.adapters.items() if not a.desired}
        self._actions.append(Retain(frozenset(self.adapters)))
        self.keeper.want(self.adapters[item.digest] for item in wanted)
        self._drop_copies(self.host.trim())
        self._load_pinned()

    def on_disk(self, digests: Iterable[str]) -> None:
        """These were found on disk."""
        for digest in digests:
            if digest in self.adapters:
                self.adapters[digest].on_disk = True
                self.keeper.look(self.adapters[digest])

    def retry(self) -> None:
        """Bring what is pinned or has a tier and is not there, after a failure."""
        self.keeper.retry()
        self._load_pinned()

    # ---- what follows from it

    def take_actions(self) -> list[Action]:
        """Orders for the adapter pool, in the order in which they have to be carried out."""
        actions, self._actions = self._actions, []
        return actions

    def take_joinable(self) -> list[str]:
        """Digests whose waiting sequences join now; they are counted as running already."""
        joinable, self._joinable = self._joinable, []
        return joinable

    def slot_of(self, digest: str) -> int:
        slot = self.adapters[digest].slot
        assert slot is not None, digest
        return slot

    def tier_of(self, adapter: Adapter) -> Tier:
        if adapter.resident:
            return Tier.DEVICE
        if adapter.digest in self.host:
            return Tier.HOST
        return Tier.DISK if adapter.on_disk else Tier.REMOTE

    def missing_pinned(self) -> list[str]:
        return [a.digest for a in self._protected if not a.resident and not a.hopeless]

    def listed(self) -> list[Adapter]:
        """On the device, on the way there, in host memory, waited for or failed: what is worth a line in a report."""
        in_slots = (adapter.digest for adapter in self._by_slot.values())
        told = (*in_slots, *self.queue, *self.host, *self._failed, *self.keeper.told())
        return [self.adapters[d] for d in dict.fromkeys(told)]

    # ---- how

    def _know(self, digest: str) -> Adapter:
        if digest not in self.adapters:
            self.adapters[digest] = self._undesired[digest] = Adapter(digest)
        return self.adapters[digest]

    def _load_pinned(self) -> None:
        """Queue every protected adapter that is not there: at first, and again after a failure."""
        for adapter in self._protected:
            if not adapter.resident and not adapter.hopeless:
                self._enqueue(adapter)
        self._settle()

    def _fail(self, adapter: Adapter, error: str, *, hopeless: bool) -> None:
        adapter.error, adapter.hopeless = error, hopeless
        self._failed[adapter.digest] = adapter

    def _recover(self, adapter: Adapter) -> None:
        adapter.error, adapter.hopeless = "", False
        self._failed.pop(adapter.digest, None)

    def _hold(self, adapter: Adapter) -> None:
        """Its copy is in host memory; others may have to go."""
        self._drop_copies(self.host.hold(adapter.digest, adapter.host_bytes))
        self.keeper.look(adapter)

    def _drop_copies(self, digests: Iterable[str]) -> None:
        """There is no room for these. One that is being loaded from its copy will still tell of it."""
        for digest in digests:
            self.adapters[digest].spoiled |= self.adapters[digest].loading
            self._actions.append(DropHost(digest))

    def _take_copy(self, adapter: Adapter, host_bytes: int | None) -> None:
        """A fetch has read it. A load that is under way since then accounts for its copy itself."""
        adapter.host_bytes = host_bytes or adapter.host_bytes
        if host_bytes is None:
            return
        if self.keeper.admits(adapter):
            self._hold(adapter)
        elif adapter.digest not in self.host and not adapter.loading:
            self._drop_host(adapter)

    def _drop_host(self, adapter: Adapter) -> None:
        self.host.drop(adapter.digest)
        self._actions.append(DropHost(adapter.digest))  # even if this book has none: what was read may not be one
        self.keeper.look(adapter)

    def _touch(self, adapter: Adapter) -> None:
        adapter.value = self._clock + adapter.cost

    def _enqueue(self, adapter: Adapter) -> None:
        if not adapter.loading and adapter.digest not in self.queue:
            adapter.passed = 0
            self.queue.append(adapter.digest)

    def _pass_by(self) -> None:
        for digest in self.queue:
            self.adapters[digest].passed += 1

    def _join(self, adapter: Adapter) -> None:
        if adapter.waiting:
            adapter.running, adapter.waiting = adapter.running + adapter.waiting, 0
            self._joinable.append(adapter.digest)

    def _settle(self) -> None:
        self._leave_queue()
        self._drop_undesired()
        self._assign_slots()
        self._close_and_reopen()
        self._actions.extend(self.keeper.take())

    def _leave_queue(self) -> None:
        """Nobody waits for it any more (a pinned one waits for itself)."""
        missing = {*self.missing_pinned()}
        self.queue = [digest for digest in self.queue if self.adapters[digest].waiting or digest in missing]

    def _drop_undesired(self) -> None:
        over = [a for a in self._undesired.values() if self._is_over(a)] if self.desired_known else []
        for adapter in over:
            self._empty_slot(adapter)
            if self.host.drop(adapter.digest):
                self._actions.append(DropHost(adapter.digest))
            del self.adapters[adapter.digest], self._undesired[adapter.digest]
            self._failed.pop(adapter.digest, None)
        if over:
            self._actions.append(Retain(frozenset(self.adapters)))

    @staticmethod
    def _is_over(adapter: Adapter) -> bool:
        return not (adapter.running or adapter.waiting or adapter.loading or adapter.fetching)

    def _assign_slots(self) -> None:
        """First come, first served: nobody behind the head gets a slot before it."""
        while self.queue:
            adapter = self.adapters[self.queue[0]]
            if adapter.resident:  # it was closed, and now it is its own turn
                self._reopen(adapter)
                continue
            slot = self._find_slot()
            if slot is None:
                return
            self.queue.pop(0)
            adapter.slot, adapter.loading = slot, True
            self._by_slot[slot] = adapter
            self._actions.append(Load(adapter.digest, slot))

    def _find_slot(self) -> int | None:
        """A free slot, else one whose adapter nobody uses: a closed one first, then the least valuable."""
        free = next((slot for slot in range(self.slots) if slot not in self._by_slot), None)
        if free is not None:
            return free
        unused = [(s not in self.closed, a.value, s) for s, a in self._by_slot.items() if self._may_evict(s, a)]
        if not unused:
            return None
        slot = min(unused)[2]
        self._clock = max(self._clock, self._by_slot[slot].value)
        self._empty_slot(self._by_slot[slot])
        return slot

    def _may_evict(self, slot: int, adapter: Adapter) -> bool:
        unused = adapter.running == 0 and (adapter.waiting == 0 or slot in self.closed)
        return unused and not adapter.loading and not adapter.protected

    def _empty_slot(self, adapter: Adapter) -> None:
        if adapter.slot is not None:
            self._actions.append(Unload(adapter.slot))
            self.closed.discard(adapter.slot)
            del self._by_slot[adapter.slot]
            adapter.slot = None

    def _close_and_reopen(self) -> None:
        for adapter in [a for slot in self.closed if (a := self._by_slot[slot]).protected]:
            self._reopen(adapter)  # pinned since
        aged = sum(self.adapters[digest].passed >= self.starvation for digest in self.queue)
        while len(self.closed) > aged:
            self._reopen(max((self._by_slot[slot] for slot in self.closed), key=lambda a: a.running))
        while len(self.closed) < aged and (victim := self._least_used_open()) is not None:
            assert victim.slot is not None
            self.closed.add(victim.slot)

    def _least_used_open(self) -> Adapter | None:
        opened = [a for s, a in self._by_slot.items() if s not in self.closed and a.running and not a.protected]
        return min(opened, key=lambda a: (a.running, a.value), default=None)

    def _reopen(self, adapter: Adapter) -> None:
        assert adapter.slot is not None
        self.closed.discard(adapter.slot)
        self._join(adapter)
        self._leave_queue()

    def in_slots(self) -> dict[int, Adapter]:
        """slot -> the adapter that is there or on its way."""
        return dict(self._by_slot)


def check_slots(book: Residency) -> None:
    """free + taken = slots, one adapter a slot, references balance, nobody queues who needs not."""
    taken = book.in_slots()
    assert len(taken) <= book.slots, taken
    assert all(0 <= slot < book.slots and adapter.slot == slot for slot, adapter in taken.items())
    assert {a.digest for a in taken.values()} == {a.digest for a in book.adapters.values() if a.slot is not None}
    listed = {adapter.digest for adapter in book.listed()}
    for adapter in book.adapters.values():
        used = adapter.running or adapter.waiting or adapter.slot is not None or adapter.error
        assert adapter.digest in listed or not (used or adapter.digest in book.host), adapter
        assert adapter.running >= 0, adapter
        assert adapter.waiting >= 0, adapter
        assert adapter.running == 0 or adapter.resident, adapter
        assert adapter.waiting == 0 or adapter.loading or adapter.digest in book.queue, adapter
        assert not (adapter.loading and adapter.digest in book.queue), adapter
    assert len(set(book.queue)) == len(book.queue), book.queue
    assert book.closed <= set(taken), (book.closed, taken)
    assert not any(taken[slot].protected for slot in book.closed if taken[slot].running)
    check_host(book.host)
    check_keeping(book.keeper, book.adapters.values())

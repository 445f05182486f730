"""Which adapter is where, and who gets the next device slot.

Tiers: remote (the depot) -> disk -> host -> device slot. A sequence whose adapter is on the device joins at once; any
other waits in a queue of digests, first come first served, while the batch runs on. The head of the queue gets a slot
and its pages as soon as free ones and adapters that nobody uses give enough (`device.py`); what the queue waits for is
not given to newcomers, so that it is served when those who run have ended.

Ageing: a queued digest that was passed `starvation` times by sequences of resident adapters closes a slot. A closed
adapter's running sequences finish, its newcomers queue up behind, and the slot goes to the head of the queue.

Pinned adapters are loaded without being asked and are not evicted. They protect at most all slots but one, so that
the others can always be served in turn. Adapters with a tier are held there without being asked (`keeping.py`).
"""

from collections.abc import Iterable, Mapping

from weft_runner.core.adapter import Adapter
from weft_runner.core.copies import Copies
from weft_runner.core.device import Device, check_device
from weft_runner.core.events import Action, Desired, Load, Retain, Tier
from weft_runner.core.host_tier import check_host
from weft_runner.core.keeping import check_keeping
from weft_runner.core.known import Known
from weft_runner.core.pages import PageBook


class Residency:
    """References and the queue. Every mutator settles: assigns slots, closes, reopens, drops what is over."""

    def __init__(
        self, slots: int, *, starvation: int = 16, host_bytes: int = 1 << 30, keep_copies: bool = True,
        pages: PageBook | None = None, page_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.starvation = starvation
        self.device = Device(slots, pages or PageBook(1, 1), page_bytes, self._order)
        self.copies = Copies(host_bytes, self._all, self._order, keep_all=keep_copies)
        self.host, self.keeper = self.copies.host, self.copies.keeper
        self.known = Known(self.device)
        self.queue: list[str] = []
        self.owing = False  # paused sequences come before the queue: it gets no page while one of them waits
        self._actions: list[Action] = []
        self._joinable: list[str] = []

    @property
    def adapters(self) -> dict[str, Adapter]:
        return self.known.adapters

    # ---- what happens

    def enter(self, digest: str) -> bool:
        """A sequence arrives. True: its adapter is on the device, it joins; False: it waits for `take_joinable`."""
        adapter = self.known.know(digest)
        if adapter.resident and adapter.slot not in self.device.closed:
            adapter.running += 1
            self.device.touch(adapter)
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

    def sized(self, digest: str, *, n_bytes: int, host_bytes: int | None) -> str:
        """A load could not begin before its size was known: first in the queue, it now waits for its pages.

        Returns why it can never be here (it has failed for good), else "".
        """
        adapter = self._loading(digest)
        adapter.n_bytes, adapter.on_disk, adapter.sized = max(n_bytes, 1), True, True
        self.device.vacate(adapter)
        self.copies.loaded(adapter, host_bytes)
        if fault := self.too_large(digest):
            self.known.fail(adapter, fault, hopeless=True)
        else:
            self._first(adapter)
        self.known.protect()
        self._settle()
        return fault

    def loaded(self, digest: str, *, rank: int, n_bytes: int, host_bytes: int | None, cost: float) -> str:
        """The adapter is in its slot. `cost`: what loading it again would take, in any one unit.

        Where it takes more than was set aside and that is not there, it leaves the slot and comes again. Returns why it
        can never be here (it has failed for good), else "".
        """
        adapter = self._loading(digest)
        adapter.on_disk = adapter.sized = True
        adapter.rank, adapter.n_bytes, adapter.cost = rank, n_bytes, cost
        self.known.recover(adapter)
        adapter.loading = False
        self.copies.loaded(adapter, host_bytes)
        if fault := self.too_large(digest):
            self.known.fail(adapter, fault, hopeless=True)
            self.device.empty(adapter)
        elif self.device.fit(adapter):
            self.device.touch(adapter)
            self._join(adapter)
        else:
            self.device.empty(adapter)
            self._first(adapter)
        self.known.protect()
        self._settle()
        return fault

    def failed(self, digest: str, error: str, *, hopeless: bool = False) -> None:
        """Loading has failed; slot, pages and host copy go. The caller ends the sequences that waited at once.

        It is tried again when the next sequence asks for it, or by `retry`: never by itself. `hopeless`: the artifact
        is wrong, so that it is waited for no more.
        """
        adapter = self._loading(digest)
        self.known.fail(adapter, error, hopeless=hopeless)
        self.device.vacate(adapter)
        self.copies.failed(adapter)
        self._settle()

    def fetched(self, digest: str, *, host_bytes: int | None) -> None:
        """A fetch has brought it to disk, and a copy of `host_bytes` into host memory (None: no copy)."""
        adapter = self.adapters[digest]
        self.keeper.ended(adapter)
        adapter.on_disk = True
        if not adapter.spoiled:
            self.known.recover(adapter)
        self.copies.fetched(adapter, host_bytes)
        self._settle()

    def fetch_failed(self, digest: str, error: str, *, hopeless: bool = False) -> None:
        """A fetch has failed: as `failed`, for those that nobody has asked for yet."""
        adapter = self.adapters[digest]
        self.keeper.ended(adapter)
        adapter.spoiled = False
        self.known.fail(adapter, error, hopeless=hopeless)
        self._settle()

    def set_desired(self, desired: Iterable[Desired]) -> None:
        """The complete list of what the runner should know; everything else goes after its last sequence."""
        wanted = list(desired)
        self.known.desire(wanted)
        self._order(Retain(frozenset(self.adapters)))
        self.copies.want(self.adapters[item.digest] for item in wanted)
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

    # ---- pages

    def too_large(self, digest: str) -> str:
        """Why this device can never hold it, by its true size; "" where it can."""
        adapter = self.known.look_up(digest)
        pages, most, total = self.device.need(adapter), self.device.most_pages, self.device.pages.total_pages
        return (
            "" if pages <= most else f"{adapter.n_bytes} bytes are {pages} pages; of {total} an adapter may hold {most}"
        )

    def pages_beside(self, digest: str, *, surely: bool) -> int:
        """Pages that sequences of this adapter cannot have. `surely`: by its true size only, not by what was told."""
        adapter = self.known.look_up(digest)
        return self.device.need(adapter) if adapter.sized or not surely else 0

    def free_pages(self, digest: str = "", *, last: bool = False) -> int:
        """What a newcomer with that adapter can have: free pages and those of unused ones, less what the queue needs.

        `last`: nobody else is here, so that pinned adapters give way to it and nothing waits.
        """
        pages = self.device.pages.free_pages + self.device.give_back_pages(digest, last=last)
        return pages if last else pages - self.waited_pages()

    def waited_pages(self) -> int:
        """What the queue waits for."""
        queued = [self.adapters[digest] for digest in self.queue]
        return sum(self.device.need(adapter) for adapter in queued if adapter.slot is None)

    def force(self) -> bool:
        """Nobody runs, nothing loads: the head of the queue may have what pinned adapters hold. False: not enough."""
        adapter = self.adapters[self.queue[0]]
        placed = self.device.place(adapter, last=True)
        if placed:
            self._begin(adapter)
            self._settle()
        return placed

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
        return [adapter.digest for adapter in self.known.absent()]

    def listed(self) -> list[Adapter]:
        """On the device, on the way there, in host memory, waited for or failed: what is worth a line in a report."""
        in_slots = (adapter.digest for adapter in self.device.in_slots().values())
        told = (*in_slots, *self.queue, *self.host, *self.known.failed, *self.keeper.told())
        return [self.adapters[d] for d in dict.fromkeys(told)]

    # ---- how

    def _order(self, action: Action) -> None:
        self._actions.append(action)

    def _all(self) -> Mapping[str, Adapter]:
        return self.adapters

    def _loading(self, digest: str) -> Adapter:
        adapter = self.adapters[digest]
        assert adapter.loading, digest
        return adapter

    def _load_pinned(self) -> None:
        """Queue every protected adapter that is not there: at first, and again after a failure."""
        for adapter in self.known.absent():
            self._enqueue(adapter)
        self._settle()

    def _enqueue(self, adapter: Adapter) -> None:
        if not adapter.loading and adapter.digest not in self.queue:
            adapter.passed = 0
            self.queue.append(adapter.digest)

    def _first(self, adapter: Adapter) -> None:
        """Back to the head of the queue, where it came from."""
        self.queue.insert(0, adapter.digest)

    def _pass_by(self) -> None:
        for digest in self.queue:
            self.adapters[digest].passed += 1

    def _join(self, adapter: Adapter) -> None:
        if adapter.waiting:
            adapter.running, adapter.waiting = adapter.running + adapter.waiting, 0
            self._joinable.append(adapter.digest)

    def settle(self) -> None:
        """Pages or slots may have come free."""
        self._settle()

    def _settle(self) -> None:
        self._leave_queue()
        self._drop_undesired()
        self._assign_slots()
        self._close_and_reopen()
        self._actions.extend(self.keeper.take())

    def _leave_queue(self) -> None:
        """Nobody waits for it any more (a pinned one waits for itself)."""
        missing = {*self.missing_pinned()} if self.queue else set[str]()
        self.queue = [digest for digest in self.queue if self.adapters[digest].waiting or digest in missing]

    def _drop_undesired(self) -> None:
        over = self.known.take_over()
        for adapter in over:
            self.device.empty(adapter)
            self.copies.forget(adapter)
        if over:
            self._order(Retain(frozenset(self.adapters)))

    def _assign_slots(self) -> None:
        """First come, first served: nobody behind the head gets a slot before it."""
        while self.queue:
            adapter = self.adapters[self.queue[0]]
            if adapter.resident:  # it was closed, and now it is its own turn
                self._reopen(adapter)
            elif (self.owing and self.device.need(adapter)) or not self.device.place(adapter):
                return
            else:
                self._begin(adapter)

    def _begin(self, adapter: Adapter) -> None:
        """The head of the queue has its slot and its pages."""
        self.queue.pop(0)
        assert adapter.slot is not None
        only_size = bool(self.device.page_bytes) and not adapter.n_bytes
        pages = self.device.pages.lent_pages_of(adapter.digest)
        self._order(Load(adapter.digest, adapter.slot, only_size, self.copies.wants(adapter), pages))

    def _close_and_reopen(self) -> None:
        """As many slots are closed as aged adapters wait for one."""
        closed, by_slot = self.device.closed, self.device.in_slots()
        for adapter in [by_slot[slot] for slot in closed if by_slot[slot].protected]:
            self._reopen(adapter)  # pinned since
        aged = sum(self.adapters[digest].passed >= self.starvation for digest in self.queue)
        while len(closed) > aged:
            self._reopen(max((by_slot[slot] for slot in closed), key=lambda a: a.running))
        while len(closed) < aged and (victim := self.device.least_used_open()) is not None:
            assert victim.slot is not None
            closed.add(victim.slot)

    def _reopen(self, adapter: Adapter) -> None:
        assert adapter.slot is not None
        self.device.closed.discard(adapter.slot)
        self._join(adapter)
        self._leave_queue()

    def in_slots(self) -> dict[int, Adapter]:
        """slot -> the adapter that is there or on its way."""
        return self.device.in_slots()


def check_slots(book: Residency) -> None:
    """Slots and pages balance, references too, nobody queues who needs not."""
    check_device(book.device)
    taken = book.in_slots()
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
    check_host(book.host)
    check_keeping(book.keeper, book.adapters.values())

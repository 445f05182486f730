"""Device slots and the pages behind them: who is there, who may go, and what that would give back.

An adapter of n bytes holds ceil(n / page_bytes) pages from the moment its load starts: its true rank, no padding and no
slot of a fixed size. Nobody who reserves a page for tokens loses it to an adapter. Adapters that nobody uses give way,
the one with the least value first: cost-aware LRU by size (GreedyDual-Size, Cao and Irani 1997: value = clock + cost of
loading again / pages, clock = value of the last one evicted), so that what is dear to load stays longer and nothing
stays for ever. Pinned adapters stay, unless nothing else can go on (`last`).
"""

from collections.abc import Callable

from weft_runner.core.adapter import Adapter
from weft_runner.core.events import Action, Unload
from weft_runner.core.pages import PageBook

MOST_SLOTS = 256  # of any runner
KV_SHARE = 4  # an adapter leaves a page in so many to sequences, or it is refused


class Device:
    """One owner: the residency book. `page_bytes` 0: adapters have memory of their own and hold no pages."""

    def __init__(self, slots: int, pages: PageBook, page_bytes: int, order: Callable[[Action], None]) -> None:
        self.slots = slots
        self.pages = pages
        self.page_bytes = page_bytes
        self.closed: set[int] = set()
        self._by_slot: dict[int, Adapter] = {}
        self._order = order
        self._clock = 0.0

    @property
    def most_pages(self) -> int:
        """What one adapter may hold."""
        return self.pages.total_pages - max(1, self.pages.total_pages // KV_SHARE)

    def need(self, adapter: Adapter) -> int:
        """Pages it takes, ceil(n / page_bytes). A size that was only told may be wrong: it is no reason to refuse."""
        n_pages = -(-adapter.n_bytes // self.page_bytes) if self.page_bytes else 0
        return n_pages if adapter.sized else min(n_pages, self.most_pages)

    def in_slots(self) -> dict[int, Adapter]:
        """slot -> the adapter that is there or on its way."""
        return dict(self._by_slot)

    @property
    def loading(self) -> bool:
        return any(adapter.loading for adapter in self._by_slot.values())

    def give_back_pages(self, *besides: str, last: bool = False) -> int:
        """Pages that unused adapters hold."""
        return sum(self.pages.lent_to(a.digest) for a in self._unused(last=last) if a.digest not in besides)

    def touch(self, adapter: Adapter) -> None:
        """It has just been used."""
        adapter.value = self._clock + adapter.cost / max(1, self.pages.lent_to(adapter.digest))

    def place(self, adapter: Adapter, *, last: bool = False) -> bool:
        """Give it a slot and its pages, as far as unused ones give way. False: it has to wait, nothing has changed.

        `last`: a size that was only told does not keep it out either; it may come to be smaller.
        """
        need, unused = self.need(adapter), self._unused(last=last)
        room = self.pages.free_pages + sum(self.pages.lent_to(a.digest) for a in unused)
        need = min(need, room) if last and not adapter.sized else need
        if need > room or (len(self._by_slot) == self.slots and not unused):
            return False
        while len(self._by_slot) == self.slots or need > self.pages.free_pages:
            self._evict(unused.pop(0))
        lent = self.pages.lend(adapter.digest, need)
        assert lent, "room was made"
        adapter.slot = next(slot for slot in range(self.slots) if slot not in self._by_slot)
        adapter.loading = True
        self._by_slot[adapter.slot] = adapter
        return True

    def give_way(self, n_pages: int, *besides: str, last: bool = False) -> bool:
        """Make n pages free. False: all unused adapters together do not have them, and none has gone."""
        unused = [adapter for adapter in self._unused(last=last) if adapter.digest not in besides]
        if n_pages > self.pages.free_pages + sum(self.pages.lent_to(a.digest) for a in unused):
            return False
        while n_pages > self.pages.free_pages:
            self._evict(unused.pop(0))
        return True

    def fit(self, adapter: Adapter) -> bool:
        """Its size is known now: it holds as many pages as that takes. False: those are not there."""
        need = self.need(adapter)
        missing = need - self.pages.lent_to(adapter.digest)
        return (missing <= 0 or self.give_way(missing, adapter.digest)) and self.pages.lend(adapter.digest, need)

    def empty(self, adapter: Adapter) -> None:
        """It leaves the device, if it is there."""
        if adapter.slot is not None:
            self._order(Unload(adapter.slot))
            self.vacate(adapter)

    def vacate(self, adapter: Adapter) -> None:
        """Its slot and its pages are free; nothing was put there."""
        assert adapter.slot is not None, adapter
        self.closed.discard(adapter.slot)
        del self._by_slot[adapter.slot]
        self.pages.unlend(adapter.digest)
        adapter.slot, adapter.loading = None, False

    def least_used_open(self) -> Adapter | None:
        """Whose slot is closed next."""
        opened = [a for s, a in self._by_slot.items() if s not in self.closed and a.running and not a.protected]
        return min(opened, key=lambda a: (a.running, a.value), default=None)

    def _evict(self, adapter: Adapter) -> None:
        self._clock = max(self._clock, adapter.value)
        self.empty(adapter)

    def _unused(self, *, last: bool = False) -> list[Adapter]:
        """Who may go, in that order: closed ones, then the least valuable. `last`: at the end the pinned ones, too."""
        unused = [(s, a) for s, a in self._by_slot.items() if self._is_unused(s, a) and (last or not a.protected)]
        return [a for _, a in sorted(unused, key=lambda i: (i[1].protected, i[0] not in self.closed, i[1].value, i[0]))]

    def _is_unused(self, slot: int, adapter: Adapter) -> bool:
        return not adapter.running and not adapter.loading and (not adapter.waiting or slot in self.closed)


def check_device(device: Device) -> None:
    """One adapter a slot; every adapter in a slot holds its pages, and no other holds any."""
    taken = device.in_slots()
    assert len(taken) <= device.slots, taken
    assert all(0 <= slot < device.slots and adapter.slot == slot for slot, adapter in taken.items())
    assert device.pages.borrowers() <= {adapter.digest for adapter in taken.values()}, "pages without an adapter"
    for adapter in taken.values():
        held = device.pages.lent_to(adapter.digest)
        assert adapter.loading or held == device.need(adapter) <= device.most_pages, adapter
    assert device.closed <= set(taken), (device.closed, taken)
    assert not any(taken[slot].protected for slot in device.closed if taken[slot].running)

"""The page table: the runner's one account of device memory, and the truth about it.

A page holds P tokens of one sequence, for all layers. A reservation owns physical pages from the moment it is granted,
so that what is promised is there. An adapter on the device holds pages too, as many as its bytes fill: its weights lie
in their memory.

**free + reusable + held by sequences + held by adapters = total.** A page that several sequences read is counted for
the one that has held it longest, and passes to the next when that one goes; so for each sequence and in sum
**reserved >= used**. What is free when a sequence leaves is the pages that no other one holds: at most what it is
it owns, and less where another one, older or newer, has come to read what it wrote.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weft_runner.core.prefix.cache import PrefixCache, check_prefixes

NEED = 4  # evictions are near where less than this part of all pages is free without one


@dataclass(slots=True)
class Allocation:
    """How many tokens one sequence's pages hold, how many of them are counted for it, and they, in token order."""

    tokens: int
    owned: int = 0
    pages: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class PageTable:
    """The owner of each page: `total_pages` pages of `page_tokens` tokens. `most_adapter_pages` None: no bound.

    Pages of adapters are lent: which adapter has them is its own record's to say.
    """

    total_pages: int
    page_tokens: int
    most_adapter_pages: int | None = None
    prefixes: PrefixCache = field(init=False)
    dirty: dict[str, None] = field(init=False, default_factory=dict[str, None])  # owned pages changed since reported
    _free: list[int] = field(init=False)
    _allocations: dict[str, Allocation] = field(init=False, default_factory=dict[str, Allocation])
    _holders: dict[int, dict[str, None]] = field(init=False, default_factory=dict[int, dict[str, None]])  # oldest first

    def __post_init__(self) -> None:
        assert self.total_pages > 0, self.total_pages
        assert self.page_tokens > 0, self.page_tokens
        self.prefixes = PrefixCache(self.total_pages)
        self._free = list(range(self.total_pages - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        """The pages for the next owner: pages without a sequence or adapter, including reusable pages."""
        return len(self._free) + len(self.prefixes)

    @property
    def free_adapter_pages(self) -> int:
        """Pages available to the next adapter: fewer pages have memory if KV is on a disk."""
        if self.most_adapter_pages is None:
            return self.free_pages
        return min(self.free_pages, self.most_adapter_pages - self.all_adapter_pages)

    @property
    def short(self) -> bool:
        """Pages of earlier prompts are soon evicted for what comes."""
        return NEED * len(self._free) < self.total_pages

    @property
    def reserved_pages(self) -> int:
        """Held by sequences, each page once."""
        return len(self._holders)

    @property
    def used_pages(self) -> int:
        used, page_tokens = 0, self.page_tokens
        for allocation in self._allocations.values():  # `used_by` of each, in every report
            used += -(-allocation.tokens // page_tokens) - len(allocation.pages) + allocation.owned
        return used

    def pages_for(self, n_tokens: int) -> int:
        """ceil(n / P)."""
        return -(-n_tokens // self.page_tokens)

    # ---- sequences

    def reserve(self, key: str, n_pages: int, shared: Sequence[int] = ()) -> list[int] | None:
        """Take n pages for a new sequence, all or none (None: no room). The first ones are `shared`, full already."""
        assert key not in self._allocations, key
        assert len(shared) <= n_pages, (len(shared), n_pages)
        if n_pages - len(shared) > self.free_beside(shared):
            return None
        allocation = self._allocations[key] = Allocation(len(shared) * self.page_tokens)
        for page in shared:
            self._hold(key, page)
        for page in self._take(n_pages - len(shared)):
            self._hold(key, page)
        return allocation.pages

    def free_beside(self, shared: Sequence[int]) -> int:
        """The free pages after a sequence takes these shared pages."""
        return self.free_pages - sum(self.prefixes.is_reusable(page) for page in shared)

    def share(self, key: str, shared: Sequence[int]) -> list[int]:
        """Read these full pages in place of the sequence's next pages, which are unwritten and are returned."""
        allocation = self._allocations[key]
        at, rest = divmod(allocation.tokens, self.page_tokens)
        assert rest == 0, (key, allocation.tokens)
        mine = allocation.pages[at : at + len(shared)]
        replaced = allocation.pages[at + len(shared) :]
        assert len(mine) == len(shared), (key, allocation, shared)
        del allocation.pages[at:]
        for page in mine:
            self._leave(key, page)
        for page in shared:
            self._hold(key, page)
        allocation.pages.extend(replaced)
        allocation.tokens += len(shared) * self.page_tokens
        return mine

    def grow(self, key: str, n_pages: int) -> list[int]:
        """Take as many of n further pages as are free. Returns the new ones, in order."""
        pages = self._take(min(n_pages, self.free_pages))
        for page in pages:
            self._hold(key, page)
        return pages

    def fill(self, key: str, n_tokens: int) -> None:
        """The sequence has n tokens in KV from now on."""
        allocation = self._allocations[key]
        assert allocation.tokens <= n_tokens <= len(allocation.pages) * self.page_tokens, (key, n_tokens, allocation)
        allocation.tokens = n_tokens

    def name(self, key: str, index: int, name: bytes, adapter: str = "") -> None:
        """The sequence's page of that index is full and will not be written to any more: others may read it."""
        allocation = self._allocations[key]
        assert (index + 1) * self.page_tokens <= allocation.tokens, (key, index, allocation.tokens)
        self.prefixes.name(allocation.pages[index], name, adapter)

    def release(self, key: str, *, forget: bool = False) -> int:
        """Give a sequence's pages back; how many it held. `forget`: what it wrote is not to be read by others."""
        pages = self._allocations[key].pages
        self.dirty[key] = None
        for page in reversed(pages):  # the end of a text is given away before its beginning
            if forget:
                self.prefixes.forget(page)
            self._leave(key, page)
        del self._allocations[key]
        return len(pages)

    def pages_of(self, key: str) -> list[int]:
        """Pages that it reads or writes, whichever sequence owns them, in token order."""
        return self._allocations[key].pages

    def reserved_by(self, key: str) -> int:
        """Pages counted for this sequence; 0 for a sequence in host memory."""
        allocation = self._allocations.get(key)
        return 0 if allocation is None else allocation.owned

    def used_by(self, key: str) -> int:
        """Pages with tokens counted for this sequence. Shared pages, counted elsewhere, are full and come first."""
        allocation = self._allocations[key]
        return self.pages_for(allocation.tokens) - (len(allocation.pages) - allocation.owned)

    def tokens_of(self, key: str) -> int:
        return self._allocations[key].tokens

    def is_full(self, key: str) -> bool:
        """Whether the pages of the sequence have no room for one more token."""
        allocation = self._allocations[key]
        return allocation.tokens == len(allocation.pages) * self.page_tokens

    def mark(self, key: str) -> None:
        """Report that sequence anew."""
        self.dirty[key] = None

    def take_marks(self) -> None:
        """Forget the marks, after they were reported."""
        self.dirty.clear()

    def holders(self) -> set[str]:
        return set(self._allocations)

    # ---- adapters

    def allocate(self, n_pages: int) -> tuple[int, ...]:
        """Take n free pages for an adapter, from the other end of memory, so that pages of adapters lie together."""
        pages = self._free[:n_pages]
        del self._free[:n_pages]
        return (*pages, *(self.prefixes.evict() for _ in range(n_pages - len(pages))))

    def take_back(self, pages: Sequence[int]) -> None:
        """Take pages of an adapter back."""
        self._free[:0] = pages

    @property
    def all_adapter_pages(self) -> int:
        return self.total_pages - self.free_pages - self.reserved_pages

    # ---- how

    def _take(self, n_pages: int) -> list[int]:
        return [self._free.pop() if self._free else self.prefixes.evict() for _ in range(n_pages)]

    def _hold(self, key: str, page: int) -> None:
        allocation, holders = self._allocations[key], self._holders.setdefault(page, {})
        self.prefixes.acquire(page)
        if not holders:
            allocation.owned += 1
            self.dirty[key] = None
        holders[key] = None
        allocation.pages.append(page)

    def _leave(self, key: str, page: int) -> None:
        """Release a page. Its longest remaining holder becomes its owner."""
        holders = self._holders[page]
        if next(iter(holders)) == key:
            self._allocations[key].owned -= 1
            self.dirty[key] = None
            for heir in list(holders)[1:2]:
                self._allocations[heir].owned += 1
                self.dirty[heir] = None
        del holders[key]
        if not holders:
            del self._holders[page]
            if not self.prefixes.release(page):
                self._free.append(page)

    def everything(self) -> list[int]:
        """List every page without an adapter, free pages first: each must occur once."""
        return [*self._free, *self.prefixes, *self._holders]


def check_page_table(table: PageTable, adapter_pages: Iterable[int] = ()) -> None:
    """Check: free + reusable + held = total, no page twice, references and charges balance, reserved >= used."""
    check_prefixes(table.prefixes)
    allocations, holders = table._allocations, table._holders  # pyright: ignore[reportPrivateUsage]
    pages = [*table.everything(), *adapter_pages]
    assert len(set(pages)) == len(pages) == table.total_pages, "a page is lost or held twice"
    assert not pages or (min(pages), max(pages)) == (0, table.total_pages - 1), "a page that is not there"
    pages_by_key: dict[str, list[int]] = {key: [] for key in allocations}
    for page, keys in holders.items():
        for key in keys:
            pages_by_key.setdefault(key, []).append(page)
    owned = Counter(map(next, map(iter, holders.values())))
    assert pages_by_key.keys() == allocations.keys(), "a page of nobody"
    for key, allocation in allocations.items():
        assert sorted(allocation.pages) == sorted(pages_by_key[key]), "a page is lost or held twice"
        assert allocation.owned == owned[key], key
        assert 0 <= table.used_by(key) <= table.reserved_by(key), key
    assert sum(table.reserved_by(key) for key in allocations) == table.reserved_pages

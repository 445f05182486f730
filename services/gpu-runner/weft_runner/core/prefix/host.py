"""The prefix cache's tier in host memory: pages of earlier prompts that the device evicts.

A page that was needed twice (`cache.py`) is copied out while no sequence holds it and pages are short: ahead of its
eviction, since who evicts it needs it at once. It stays after it was read, so that the next eviction copies nothing.
"""

from collections.abc import Callable, Iterable

from weft_runner.core.events import DropSwap, Effect, SwapOut
from weft_runner.core.host_cache import CachedPage, HostCache
from weft_runner.core.prefix.cache import PrefixCache
from weft_runner.core.swap.swaps import KvSwap

MAX_COPY_PAGES = 32  # of a copy: a sequence's own copies wait for no more than these


class HostPrefixes:
    """Prefixes in host memory, owned by the request pool. They answer lookups of the prefix cache."""

    def __init__(self, prefixes: PrefixCache, host: HostCache, swap: KvSwap, effects: list[Effect]) -> None:
        self._prefixes, self._host, self._swap, self._effects = prefixes, host, swap, effects
        self.saves: dict[int, dict[int, CachedPage]] = {}  # copies out by number: pages, and what they become
        self.out_bytes = 0
        prefixes.copy_to_host(self, self._discard)
        host.watch(self._on_dropped)

    def __contains__(self, name: object) -> bool:
        return name in self._host.cached

    def __len__(self) -> int:
        """Pages in host memory, complete or in copy, except pages with waiting sequences."""
        return len(self._host.cached)

    def _discard(self, name: bytes) -> None:
        if (page := self._host.cached.get(name)) is not None:
            self._host.drop_page(page)

    def find(self, names: Iterable[bytes]) -> list[CachedPage]:
        """Find the longest run of present names from the first name on."""
        pages: list[CachedPage] = []
        for name in names:
            if (page := self._host.cached.get(name)) is None or page.number:
                break
            pages.append(page)
        return pages

    def save(self, page_ms: float, is_known: Callable[[str], bool]) -> None:
        """Copy out pages before their eviction, one copy at a time. Pages without room wait for their next use.

        `page_ms`: of computing a page again. `is_known`: of its adapter.
        """
        swap, unsaved = self._swap, self._prefixes.unsaved
        if self.saves or not unsaved or not swap.page_bytes or 2 * swap.copy_ms(1) >= page_ms:
            return
        number, pages = swap.next_number(), dict[int, CachedPage]()
        while unsaved and len(pages) < MAX_COPY_PAGES:
            page, _ = unsaved.popitem(last=False)
            name, adapter = self._prefixes.named(page)
            if name not in self and (not adapter or is_known(adapter)):
                (host,) = swap.next_hosts([page])
                cached = CachedPage(name, adapter, host, swap.page_bytes, number)
                if not self._host.cache(cached):
                    break
                pages[page] = cached
        if pages:
            self.saves[number] = pages
            self._prefixes.begin_saving(pages)
            self._effects.append(SwapOut(number, tuple(pages), tuple(cached.host for cached in pages.values())))

    def on_copied(self, number: int) -> None:
        """Record a complete copy, if it is known here and not dropped."""
        pages = self.saves.pop(number, {})
        self._prefixes.end_saving(pages)
        for cached in pages.values():
            cached.complete()
        self.out_bytes += len(pages) * self._swap.page_bytes

    def on_failed(self, number: int) -> None:
        """Drop the pages of a failed copy."""
        for cached in list(self.saves.get(number, {}).values())[:1]:
            self._host.drop_page(cached)

    def _on_dropped(self, page: CachedPage) -> None:
        """A page that is on its way out ends its copy, and what else comes with it is lost, too."""
        if not page.number:
            self._effects.append(DropSwap((), (page.host,)))
            return
        pages = self.saves.pop(page.number)
        self._prefixes.end_saving(pages)
        self._swap.drop(page.number, [cached.host for cached in pages.values()])
        for cached in pages.values():
            if cached is not page:
                self._host.forget_page(cached)


def check_host_prefixes(tier: HostPrefixes) -> None:
    """A page that is on its way out has its name, and no other owner, until it is complete."""
    prefixes, cached = tier._prefixes, tier._host.cached  # pyright: ignore[reportPrivateUsage]
    saving = {page: copy for pages in tier.saves.values() for page, copy in pages.items()}
    assert prefixes.saving == saving.keys(), (prefixes.saving, saving)
    assert all(prefixes.named(page) == (copy.name, copy.adapter) for page, copy in saving.items()), saving
    assert {copy.name for copy in saving.values()} == {name for name, copy in cached.items() if copy.number}
    assert len({copy.host for copy in cached.values()}) == len(cached), "two pages in one"

"""Host memory: copies of adapters, KV of sequences and of earlier prompts; and which adapters a Ready runner holds on
disk or there unasked.

`HostCache` is one byte budget for all. KV of sequences comes first: it is of living ones and leaves with them. Copies
of adapters and pages of earlier prompts leave for it and for each other, least recently used first; protected copies
never, and one whose sequences have their KV here is dropped for other adapters only, and last. Whatever uses a page
uses its adapter, too, so an adapter's copy leaves after its pages, and pages of an adapter that is forgotten leave at
once: KV without its adapter is of no use (FastLibra, arXiv 2505.03756).

`TierPrefetcher` decides which copies are protected and fetches what is missing, a few at a time. Where the budget
cannot hold all adapters of tier Host, those that are there stay, then the order of the list decides; the others are
degraded: they are kept on disk, say why, and the runner does not wait for more. A failed fetch is tried again and
waited for, unless the artifact itself is wrong.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import merge
from itertools import chain

from weft.domain.adapter import Tier
from weft_runner.core.adapters.adapter import Adapter, HostCopy
from weft_runner.core.events import Action, DropHost

PREFETCHES = 2  # at a time: a fetch that a request waits for shares the depot's and the disk's bandwidth with them


@dataclass(slots=True, eq=False)
class CachedPage:
    """A named page of an earlier prompt. `host`: its number in host memory; `used`: when, on the host cache's clock."""

    name: bytes
    adapter: str
    host: int
    host_bytes: int
    number: int  # of the copy that brings it there; 0: it is there
    used: int = 0

    def complete(self) -> None:
        """Record that the copy is complete."""
        self.number = 0


class HostCache:
    """Host memory's copies. The newest adapter stays even above the budget: it is on its way to a slot."""

    def __init__(self, budget_bytes: int, order: Callable[[Action], None], changed: Callable[[Adapter], None]) -> None:
        self.budget_bytes = budget_bytes
        self.adapters: OrderedDict[str, Adapter] = OrderedDict()  # least recently used first
        self.cached: OrderedDict[bytes, CachedPage] = OrderedDict()  # so, too
        self.protected: set[str] = set()
        self.held_bytes = self.kv_bytes = self.cached_bytes = 0
        self._on_dropped: Callable[[CachedPage], None] = lambda _: None
        self._cached_of: Counter[str] = Counter()  # pages by adapter
        self._order, self._changed = order, changed
        self._clock = 0

    def watch(self, on_dropped: Callable[[CachedPage], None]) -> None:
        """Call `on_dropped` for each dropped page."""
        self._on_dropped = on_dropped

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.held_bytes - self.kv_bytes - self.cached_bytes

    def fits(self, adapter: Adapter) -> bool:
        """Return whether the adapter's copy fits together with the protected copies."""
        rest = (a.host_bytes for digest, a in self.adapters.items() if digest in self.protected and a is not adapter)
        return sum(rest) + adapter.host_bytes <= self.budget_bytes - self.kv_bytes

    def reserve_kv(self, n_bytes: int, adapter: str) -> bool:
        """Set memory aside for KV of a sequence of that adapter. False: all that may leave for it is too little."""
        if not self._evict_for(n_bytes, adapter):
            return False
        self.kv_bytes += n_bytes
        return True

    def release_kv(self, n_bytes: int) -> None:
        self.kv_bytes -= n_bytes

    def cache(self, page: CachedPage) -> bool:
        """Set memory aside for a page of an earlier prompt. False: all that may leave for it is too little."""
        if not self._evict_for(page.host_bytes, page.adapter, number=page.number):
            return False
        self._put(page)
        return True

    def take(self, pages: Iterable[CachedPage]) -> None:
        """Count these pages as KV of a waiting sequence, until `put_back`."""
        for page in pages:
            self.forget_page(page)
            self.kv_bytes += page.host_bytes

    def put_back(self, pages: Iterable[CachedPage]) -> None:
        """Cache pages again, in order of their text, whose beginning stays longest. A name's second page is dropped.

        No copy may read them any more.
        """
        for page in reversed([*pages]):
            self.kv_bytes -= page.host_bytes
            if page.name in self.cached:
                self._on_dropped(page)
            else:
                self._put(page)
        self.trim()

    def drop_page(self, page: CachedPage) -> None:
        """Drop a page, complete or not."""
        self.forget_page(page)
        self._on_dropped(page)

    def drop_pages_of(self, adapter: str) -> None:
        """Drop the pages of an adapter, which are of no use any more."""
        if self._cached_of[adapter]:
            for page in [page for page in self.cached.values() if page.adapter == adapter]:
                if page.name in self.cached:
                    self.drop_page(page)

    def hold(self, adapter: Adapter, host_bytes: int) -> None:
        """Take the complete copy of an adapter; less recently used copies are dropped for it."""
        adapter.advance_copy(HostCopy.HELD)
        adapter.measure_copy(host_bytes)
        self.adapters[adapter.digest] = adapter
        self.held_bytes += host_bytes
        self.on_use(adapter)
        self._changed(adapter)
        self.trim()

    def on_use(self, adapter: Adapter) -> None:
        if adapter.copy is HostCopy.HELD:
            self.adapters.move_to_end(adapter.digest)
            self._clock += 1
            adapter.use_copy(self._clock)

    def drop(self, adapter: Adapter) -> None:
        """Drop a copy, complete or not; the action reaches the builder after whatever still reads it."""
        if adapter.copy is HostCopy.HELD:
            del self.adapters[adapter.digest]
            self.held_bytes -= adapter.host_bytes
        if adapter.copy is not HostCopy.NONE:
            adapter.advance_copy(HostCopy.NONE)
            self._changed(adapter)
            self._order(DropHost(adapter.digest))

    def trim(self) -> None:
        """Shrink into the budget, as far as protected copies and the newest allow."""
        self._evict_for(0, next(reversed(self.adapters), ""), swapped_too=True)

    def _evict_for(
        self, n_bytes: int, except_for: str, *, number: int | None = None, swapped_too: bool = False
    ) -> bool:
        """Drop the least recently used copies, except for `except_for`. If all copies are too small, drop nothing and
        return False.

        `number`: pages of that copy stay. `swapped_too`: adapters whose sequences have their KV here leave as well, at
        last, and what may leave does even if it is too little.
        """
        if (free_bytes := self.free_bytes) >= n_bytes:
            return True
        copies = [
            copy for copy in self.adapters.values() if copy.digest not in self.protected and copy.digest != except_for
        ]
        pages = (page for page in self.cached.values() if page.number != number)
        last = [copy for copy in copies if copy.swapped and swapped_too]
        leaving: list[Adapter | CachedPage] = []
        for copy in chain(merge((c for c in copies if not c.swapped), pages, key=lambda copy: copy.used), last):
            leaving.append(copy)
            free_bytes += copy.host_bytes
            if free_bytes >= n_bytes:
                break
        if free_bytes < n_bytes and not swapped_too:
            return False
        for copy in leaving:
            if isinstance(copy, Adapter):
                self.drop(copy)
            elif copy.name in self.cached:  # else it went with another page of its copy
                self.drop_page(copy)
        return free_bytes >= n_bytes

    def _put(self, page: CachedPage) -> None:
        """Cache a page as the most recently used one, but for its adapter."""
        self._clock += 1
        page.used = self._clock
        self.cached[page.name] = page
        self.cached_bytes += page.host_bytes
        self._cached_of[page.adapter] += 1
        if (adapter := self.adapters.get(page.adapter)) is not None:
            self.on_use(adapter)

    def forget_page(self, page: CachedPage) -> None:
        """Take a page out of the cache, whose memory is another's business now."""
        del self.cached[page.name]
        self.cached_bytes -= page.host_bytes
        self._cached_of[page.adapter] -= 1
        if not self._cached_of[page.adapter]:
            del self._cached_of[page.adapter]  # else an entry stays for each adapter that ever had a page


class TierPrefetcher:
    """Fetches missing adapters with a tier on disk or in host memory. The cache protects the adapters that fit."""

    def __init__(self, host: HostCache, changed: Callable[[Adapter], None]) -> None:
        self._host, self._changed = host, changed
        self.targets: dict[str, Adapter] = {}  # in the order in which they were desired
        self._missing: dict[str, Adapter] = {}
        self._queue: deque[Adapter] = deque()
        self._fetching: dict[str, Adapter] = {}
        self.beside_kv = False  # an adapter was degraded while KV was in host memory: plan again when that has gone

    def set_target(self, adapter: Adapter) -> None:
        """Follow a desired tier that may have changed; `plan` follows, once for all."""
        if adapter.tier is not None and adapter.tier > Tier.REMOTE:
            self.targets[adapter.digest] = adapter
        else:
            self.targets.pop(adapter.digest, None)
            self._missing.pop(adapter.digest, None)
            self._set_degraded(adapter, "")

    def plan(self) -> None:
        """Protect the copies that fit, by their known sizes; then fetch missing adapters."""
        self.beside_kv = False
        host_adapters = [adapter for adapter in self.targets.values() if adapter.tier is Tier.HOST]
        left, protected = self._host.budget_bytes - self._host.kv_bytes, set[str]()
        for adapter in sorted(host_adapters, key=lambda a: a.copy is not HostCopy.HELD):
            n_bytes = adapter.host_bytes or adapter.n_bytes
            if n_bytes > left:
                self._degrade(adapter, n_bytes)
                continue
            self._set_degraded(adapter, "")
            protected.add(adapter.digest)
            left -= n_bytes
        self._host.protected = protected
        self._host.trim()
        for adapter in self.targets.values():
            if adapter.tier is not Tier.HOST:
                self._set_degraded(adapter, "")
        self._missing = {digest: adapter for digest, adapter in self.targets.items() if self._misses(adapter)}
        self.retry()

    def retry(self) -> None:
        """Queue a fetch of every missing adapter, including earlier failures."""
        self._queue = deque(adapter for adapter in self._missing.values() if not adapter.permanent_failure)

    def missing(self) -> list[str]:
        """List the missing digests still awaited."""
        return [digest for digest, adapter in self._missing.items() if not adapter.permanent_failure]

    @property
    def idle(self) -> bool:
        return not self._fetching

    def next_fetches(self) -> list[Adapter]:
        fetches: list[Adapter] = []
        while self._queue and len(self._fetching) < PREFETCHES:
            adapter = self._queue.popleft()
            if adapter.digest in self._missing and not adapter.in_transfer:
                self._fetching[adapter.digest] = adapter
                fetches.append(adapter)
        return fetches

    def on_fetch_ended(self, adapter: Adapter) -> None:
        self._fetching.pop(adapter.digest, None)

    def admits(self, adapter: Adapter, host_bytes: int) -> bool:
        """Say whether a copy that has just been made stays: its true size may not fit after all."""
        adapter.measure_copy(host_bytes)
        if adapter.digest not in self._host.protected:
            return False
        if self._host.fits(adapter):
            return True
        self._host.protected.remove(adapter.digest)
        self._degrade(adapter, host_bytes)
        return False

    def update(self, adapter: Adapter, *, requeue: bool = False) -> None:
        """Record changed copies of an adapter. `requeue`: missing copies may be fetched at once."""
        if adapter.digest not in self.targets or not self._misses(adapter):
            self._missing.pop(adapter.digest, None)
        else:
            self._missing[adapter.digest] = adapter
            if requeue:
                self._queue.append(adapter)

    def _misses(self, adapter: Adapter) -> bool:
        if adapter.digest in self._host.protected:
            return adapter.copy is not HostCopy.HELD
        return not adapter.on_disk

    def _degrade(self, adapter: Adapter, n_bytes: int) -> None:
        budget, self.beside_kv = self._host.budget_bytes, self.beside_kv or self._host.kv_bytes > 0
        self._set_degraded(adapter, f"kept on disk: {n_bytes} bytes do not fit into the {budget} bytes of host memory")

    def _set_degraded(self, adapter: Adapter, reason: str) -> None:
        if adapter.degraded_reason != reason:
            adapter.degrade(reason)
            self._changed(adapter)


def check_host_cache(host: HostCache) -> None:
    """Check that protected copies and KV fit, and that at most one unprotected copy exceeds the budget.

    An adapter's copy was used after its pages.
    """
    sizes = {digest: adapter.host_bytes for digest, adapter in host.adapters.items()}
    assert all(adapter.copy is HostCopy.HELD for adapter in host.adapters.values()), host.adapters
    assert host.held_bytes == sum(sizes.values())
    protected = sum(size for digest, size in sizes.items() if digest in host.protected)
    assert 0 <= host.kv_bytes <= host.budget_bytes - protected, (host.kv_bytes, protected)
    is_over = host.free_bytes < 0
    assert not is_over or sum(digest not in host.protected for digest in sizes) == 1, sizes
    assert not is_over or not host.cached, "pages of earlier prompts stay beyond the budget"
    assert host.cached_bytes == sum(page.host_bytes for page in host.cached.values())
    pages_of = Counter(page.adapter for page in host.cached.values())
    assert dict(host._cached_of) == dict(pages_of), pages_of  # pyright: ignore[reportPrivateUsage]
    for copies in (host.adapters.values(), host.cached.values()):
        used = [copy.used for copy in copies]
        assert used == sorted(used), "not in order of use"
    for page in host.cached.values():
        assert page.adapter not in host.adapters or page.used < host.adapters[page.adapter].used, (
            "used without its adapter"
        )


def check_prefetcher(prefetcher: TierPrefetcher, adapters: Iterable[Adapter]) -> None:
    """Check that desired adapters are held or missing, and that missing adapters are in transfer, queued or failed."""
    fetching = prefetcher._fetching  # pyright: ignore[reportPrivateUsage]
    assert all(adapter.in_transfer for adapter in fetching.values()), fetching
    assert len(fetching) <= PREFETCHES, fetching
    for adapter in adapters:
        target = adapter.digest in prefetcher.targets
        missing = target and prefetcher._misses(adapter)  # pyright: ignore[reportPrivateUsage]
        assert missing == (adapter.digest in prefetcher._missing), adapter  # pyright: ignore[reportPrivateUsage]
        coming = adapter.in_transfer or adapter in prefetcher._queue  # pyright: ignore[reportPrivateUsage]
        assert not missing or coming or adapter.error, adapter
        assert target or not adapter.degraded_reason, adapter

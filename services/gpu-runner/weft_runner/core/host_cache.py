"""Host memory: copies of adapters, KV of sequences; and which adapters a Ready runner holds on disk or there unasked.

`HostCache` is one byte budget for both. Copies of adapters leave for KV and for each other, least recently used first,
protected ones never; one whose sequences have their KV here is dropped for other adapters only, and last. KV is of
living sequences and leaves with them. `TierPrefetcher` decides which
copies are protected and fetches what is missing, a few at a time. Where the budget cannot hold all adapters of tier
Host, those that are there stay, then the order of the list decides; the others are degraded: they are kept on disk,
say why, and the runner does not wait for more. A failed fetch is tried again and waited for, unless the artifact itself
is wrong.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from weft.domain.adapter import Tier
from weft_runner.core.adapter import Adapter, HostCopy
from weft_runner.core.events import Action, DropHost

PREFETCHES = 2  # at a time: a fetch that a request waits for shares the depot's and the disk's bandwidth with them


class HostCache:
    """The copies. The newest stays even above the budget: it is on its way to a slot."""

    def __init__(self, budget_bytes: int, order: Callable[[Action], None], changed: Callable[[Adapter], None]) -> None:
        self.budget_bytes = budget_bytes
        self.held: OrderedDict[str, Adapter] = OrderedDict()  # least recently used first
        self.protected: set[str] = set()
        self.held_bytes = self.kv_bytes = 0
        self._order, self._changed = order, changed

    def fits(self, adapter: Adapter) -> bool:
        """Whether its copy fits beside the protected ones."""
        others = (a.host_bytes for digest, a in self.held.items() if digest in self.protected and a is not adapter)
        return sum(others) + adapter.host_bytes <= self.budget_bytes - self.kv_bytes

    def reserve_kv(self, n_bytes: int, adapter: str) -> bool:
        """Set memory aside for KV of a sequence of that adapter. False: all that may leave for it is too little."""
        free_bytes = self.budget_bytes - self.held_bytes - self.kv_bytes
        leaving: list[Adapter] = []
        for digest, copy in self.held.items() if free_bytes < n_bytes else ():
            if free_bytes >= n_bytes:
                break
            if digest not in self.protected and digest != adapter and not copy.swapped:
                leaving.append(copy)
                free_bytes += copy.host_bytes
        if free_bytes < n_bytes:
            return False
        for copy in leaving:
            self.drop(copy)
        self.kv_bytes += n_bytes
        return True

    def release_kv(self, n_bytes: int) -> None:
        self.kv_bytes -= n_bytes

    def hold(self, adapter: Adapter, host_bytes: int) -> None:
        """Its copy is complete; less recently used copies are dropped for it."""
        adapter.advance_copy(HostCopy.HELD)
        adapter.host_bytes = host_bytes
        self.held[adapter.digest] = adapter
        self.held_bytes += host_bytes
        self._changed(adapter)
        self.trim()

    def on_use(self, adapter: Adapter) -> None:
        if adapter.copy is HostCopy.HELD:
            self.held.move_to_end(adapter.digest)

    def drop(self, adapter: Adapter) -> None:
        """The copy goes, complete or not; the action reaches the builder after whatever still reads it."""
        if adapter.copy is HostCopy.HELD:
            del self.held[adapter.digest]
            self.held_bytes -= adapter.host_bytes
        if adapter.copy is not HostCopy.NONE:
            adapter.advance_copy(HostCopy.NONE)
            self._changed(adapter)
            self._order(DropHost(adapter.digest))

    def trim(self) -> None:
        """Back into the budget, as far as protected copies and the newest allow."""
        over, newest = self.held_bytes + self.kv_bytes - self.budget_bytes, next(reversed(self.held), None)
        dropped: list[Adapter] = []
        for digest, adapter in sorted(self.held.items(), key=lambda item: item[1].swapped > 0) if over > 0 else ():
            if over <= 0:
                break
            if digest != newest and digest not in self.protected:
                dropped.append(adapter)
                over -= adapter.host_bytes
        for adapter in dropped:
            self.drop(adapter)


class TierPrefetcher:
    """Which adapters have to be held where, and which of them are missing. The cache protects what it wants there."""

    def __init__(self, host: HostCache, changed: Callable[[Adapter], None]) -> None:
        self._host, self._changed = host, changed
        self.targets: dict[str, Adapter] = {}  # in the order in which they were desired
        self._missing: dict[str, Adapter] = {}
        self._queue: deque[Adapter] = deque()
        self._fetching: dict[str, Adapter] = {}
        self.beside_kv = False  # an adapter was degraded while KV was in host memory: plan again when that has gone

    def set_target(self, adapter: Adapter) -> None:
        """Its desired tier may have changed; `plan` follows, once for all."""
        if adapter.desired and adapter.tier > Tier.REMOTE:
            self.targets[adapter.digest] = adapter
        else:
            self.targets.pop(adapter.digest, None)
            self._missing.pop(adapter.digest, None)
            self._set_degraded(adapter, "")

    def plan(self) -> None:
        """Which copies are protected, by the sizes that are known; then fetch what is missing."""
        self.beside_kv = False
        wanted = [adapter for adapter in self.targets.values() if adapter.tier is Tier.HOST]
        left, protected = self._host.budget_bytes - self._host.kv_bytes, set[str]()
        for adapter in sorted(wanted, key=lambda a: a.copy is not HostCopy.HELD):
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
        """Fetch what is missing; what failed before, again."""
        self._queue = deque(adapter for adapter in self._missing.values() if not adapter.permanent_failure)

    def missing(self) -> list[str]:
        """What is still waited for."""
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
        """Whether a copy that has just been made stays: its true size may not fit after all."""
        adapter.host_bytes = host_bytes
        if adapter.digest not in self._host.protected:
            return False
        if self._host.fits(adapter):
            return True
        self._host.protected.remove(adapter.digest)
        self._degrade(adapter, host_bytes)
        return False

    def update(self, adapter: Adapter, *, requeue: bool = False) -> None:
        """Its copies have changed. `requeue`: and what is missing may be fetched at once."""
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
            adapter.degraded_reason = reason
            self._changed(adapter)


def check_host_cache(host: HostCache) -> None:
    """Protected copies and KV are within the budget; at most one copy is beyond it, and that one is not protected."""
    sizes = {digest: adapter.host_bytes for digest, adapter in host.held.items()}
    assert all(adapter.copy is HostCopy.HELD for adapter in host.held.values()), host.held
    assert host.held_bytes == sum(sizes.values())
    protected = sum(size for digest, size in sizes.items() if digest in host.protected)
    assert 0 <= host.kv_bytes <= host.budget_bytes - protected, (host.kv_bytes, protected)
    beyond = host.held_bytes + host.kv_bytes > host.budget_bytes
    assert not beyond or sum(digest not in host.protected for digest in sizes) == 1, sizes


def check_prefetcher(prefetcher: TierPrefetcher, adapters: Iterable[Adapter]) -> None:
    """What is desired is held, or missing; what is missing is in transfer, queued, or has failed."""
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

"""Which adapters the runner knows: those that are desired, and those that some sequence still uses.

Pinned ones are protected in the list's order, as far as that leaves a slot and pages for the others.
"""

from collections import OrderedDict
from collections.abc import Iterable

from weft_runner.core.adapter import Adapter
from weft_runner.core.device import Device
from weft_runner.core.events import Desired, Tier

SIZES = 4096  # remembered of adapters that are known no more


class Known:
    """One owner: the residency book. Nothing here costs more with the number of adapters but `desire`."""

    def __init__(self, device: Device) -> None:
        self.adapters: dict[str, Adapter] = {}
        self.failed: dict[str, Adapter] = {}
        self.desired_known = False
        self._device = device
        self._pinned: list[Adapter] = []
        self._protected: list[Adapter] = []
        self._undesired: dict[str, Adapter] = {}  # known for their sequences' sake; thousands may be desired
        self._sizes: OrderedDict[str, tuple[int, bool]] = OrderedDict()

    def know(self, digest: str) -> Adapter:
        """Known from now on."""
        if digest not in self.adapters:
            self.adapters[digest] = self._undesired[digest] = self.look_up(digest)
            self._sizes.pop(digest, None)
        return self.adapters[digest]

    def look_up(self, digest: str) -> Adapter:
        """What is known of it; by its digest it is what it was, also where it had been forgotten."""
        n_bytes, sized = self._sizes.get(digest, (0, False))
        return self.adapters.get(digest) or Adapter(digest, n_bytes=n_bytes, sized=sized)

    def desire(self, wanted: list[Desired]) -> None:
        """The complete list."""
        self.desired_known = True
        for adapter in self.adapters.values():
            adapter.desired, adapter.tier, adapter.shortfall, adapter.unpinned = False, Tier.REMOTE, "", ""
        for item in wanted:
            adapter = self.know(item.digest)
            adapter.desired, adapter.tier = True, item.tier
            adapter.rank, adapter.n_bytes = adapter.rank or item.rank, adapter.n_bytes or item.n_bytes
        self._pinned = [self.adapters[digest] for digest in dict.fromkeys(d.digest for d in wanted if d.pinned)]
        self._undesired = {digest: a for digest, a in self.adapters.items() if not a.desired}
        self.protect()

    def protect(self) -> None:
        """Pinned adapters, in the list's order: all slots but one, and no more pages than one adapter may hold."""
        for adapter in self._protected:
            adapter.protected = False
        left, self._protected = self._device.most_pages, []
        for adapter in self._pinned[: max(self._device.slots - 1, 0)]:
            need = self._device.need(adapter)
            adapter.protected, adapter.unpinned = need <= left, ""
            if adapter.protected:
                self._protected.append(adapter)
                left -= need
            else:
                adapter.unpinned = f"loaded on demand: {need} pages find no room beside other pinned adapters"

    def absent(self) -> list[Adapter]:
        """Protected ones that are not on the device and may still come."""
        return [a for a in self._protected if not a.resident and not a.hopeless]

    def fail(self, adapter: Adapter, error: str, *, hopeless: bool) -> None:
        adapter.error, adapter.hopeless = error, hopeless
        self.failed[adapter.digest] = adapter

    def recover(self, adapter: Adapter) -> None:
        adapter.error, adapter.hopeless = "", False
        self.failed.pop(adapter.digest, None)

    def take_over(self) -> Iterable[Adapter]:
        """Those that nobody desires and nobody uses any more: known no longer."""
        over = [a for a in self._undesired.values() if _is_over(a)] if self.desired_known else []
        for adapter in over:
            self._remember_size(adapter)
            del self.adapters[adapter.digest], self._undesired[adapter.digest]
            self.failed.pop(adapter.digest, None)
        return over

    def _remember_size(self, adapter: Adapter) -> None:
        """Whoever was told NoRoom for its sake is judged by it when asking again."""
        if adapter.n_bytes:
            self._sizes[adapter.digest] = adapter.n_bytes, adapter.sized
        if len(self._sizes) > SIZES:
            self._sizes.popitem(last=False)


def _is_over(adapter: Adapter) -> bool:
    return not (adapter.running or adapter.waiting or adapter.loading or adapter.fetching)

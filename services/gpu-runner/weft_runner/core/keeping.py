"""Adapters that every Ready runner holds on disk or in host memory: fetched unasked, a few at a time, and kept.

Where the host budget cannot hold all that have tier Host, those that are there stay, then it goes by the order of the
list; the others *fall short*: they are kept on disk, say so, and nobody waits for more. What failed is tried again, and
waited for, unless the artifact itself is wrong: then it says so and nobody waits for it.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice

from weft_runner.core.adapter import Adapter
from weft_runner.core.events import Fetch, Tier
from weft_runner.core.host_tier import HostTier

FETCHES = 2  # at a time: what a request asks for is not to wait behind what nobody has asked for yet
TOLD = 20  # adapters that fall short, in a report


class Keeper:
    """Who has to be held where, and who is not yet. The host tier protects exactly the copies that it wants there."""

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._kept: dict[str, Adapter] = {}
        self._missing: dict[str, Adapter] = {}
        self._short: dict[str, Adapter] = {}
        self._queue: deque[Adapter] = deque()
        self._fetching: dict[str, Adapter] = {}

    def want(self, adapters: Iterable[Adapter]) -> None:
        """The complete list of what is desired, in order."""
        self._kept = {adapter.digest: adapter for adapter in adapters if adapter.tier > Tier.REMOTE}
        self._plan()
        self._missing = {digest: adapter for digest, adapter in self._kept.items() if self._misses(adapter)}
        self.retry()

    def retry(self) -> None:
        """Everything that is missing is to be fetched; what failed before, again."""
        self._queue = deque(adapter for adapter in self._missing.values() if not adapter.hopeless)

    def missing(self) -> list[str]:
        """What is still waited for."""
        return [digest for digest, adapter in self._missing.items() if not adapter.hopeless]

    @property
    def idle(self) -> bool:
        """Nothing is on its way."""
        return not self._fetching

    def told(self) -> list[str]:
        """What is worth a line in a report: on its way, or kept lower than it should be (the first ones)."""
        return [*self._fetching, *islice(self._short, TOLD)]

    def take(self) -> list[Fetch]:
        """The next fetches to begin."""
        fetches: list[Fetch] = []
        while self._queue and len(self._fetching) < FETCHES:
            adapter = self._queue.popleft()
            if adapter.digest in self._missing and not (adapter.fetching or adapter.loading):
                adapter.fetching, self._fetching[adapter.digest] = True, adapter
                fetches.append(Fetch(adapter.digest, to_host=adapter.digest in self._host.protected))
        return fetches

    def ended(self, adapter: Adapter) -> None:
        """A fetch is over, well or badly."""
        adapter.fetching = False
        del self._fetching[adapter.digest]

    def again(self, adapter: Adapter) -> None:
        """What a fetch brought is not there any more."""
        if adapter.digest in self._missing:
            self._queue.append(adapter)

    def admits(self, adapter: Adapter) -> bool:
        """Whether a copy that has just been read is to stay in host memory: the true size may not fit after all."""
        if adapter.digest not in self._host.protected:
            return False
        if self._host.has_room(adapter.digest, adapter.host_bytes):
            return True
        self._host.protected -= {adapter.digest}
        self._fall_short(adapter, adapter.host_bytes)
        return False

    def look(self, adapter: Adapter) -> None:
        """Something changed about it."""
        if adapter.digest in self._kept and self._misses(adapter):
            self._missing[adapter.digest] = adapter
        else:
            self._missing.pop(adapter.digest, None)

    def _misses(self, adapter: Adapter) -> bool:
        if adapter.digest in self._host.protected:
            return adapter.digest not in self._host
        return not adapter.on_disk

    def _plan(self) -> None:
        """Who stays in host memory, by the sizes that are known."""
        wanted = [adapter for adapter in self._kept.values() if adapter.tier is Tier.HOST]
        left, protected = self._host.budget_bytes, set[str]()
        self._short = {}
        for adapter in sorted(wanted, key=lambda a: a.digest not in self._host):
            n_bytes = adapter.host_bytes or adapter.n_bytes
            if n_bytes > left:
                self._fall_short(adapter, n_bytes)
                continue
            adapter.shortfall = ""
            protected.add(adapter.digest)
            left -= n_bytes
        self._host.protected = frozenset(protected)

    def _fall_short(self, adapter: Adapter, n_bytes: int) -> None:
        self._short[adapter.digest], budget = adapter, self._host.budget_bytes
        adapter.shortfall = f"kept on disk: {n_bytes} bytes find no room in the {budget} bytes of host memory"


def check_keeping(keeper: Keeper, adapters: Iterable[Adapter]) -> None:
    """What is wanted is held, or missing; what is missing is fetched, loading, queued, or has failed."""
    known = list(adapters)
    fetching = keeper._fetching  # pyright: ignore[reportPrivateUsage]
    assert {*fetching.values()} == {adapter for adapter in known if adapter.fetching}, fetching
    assert len(fetching) <= FETCHES, fetching
    for adapter in known:
        kept = adapter.digest in keeper._kept  # pyright: ignore[reportPrivateUsage]
        missing = kept and keeper._misses(adapter)  # pyright: ignore[reportPrivateUsage]
        assert missing == (adapter.digest in keeper._missing), adapter  # pyright: ignore[reportPrivateUsage]
        coming = adapter.fetching or adapter.loading or adapter in keeper._queue  # pyright: ignore[reportPrivateUsage]
        assert not missing or coming or adapter.error, adapter
        assert kept or not adapter.shortfall, adapter

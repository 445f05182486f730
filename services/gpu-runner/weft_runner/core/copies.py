"""Host copies of adapters: who has one, who is to have one, and whose goes.

A load reads an adapter's file. Where the device has memory of its own the copy stays as far as the budget goes, so that
the next load is short; where it has not (`keep_all` off), a second copy would only take room that the file's pages in
the system's cache do not need: then only adapters of tier Host have one.
"""

from collections.abc import Callable, Iterable, Mapping

from weft_runner.core.adapter import Adapter
from weft_runner.core.events import Action, DropHost
from weft_runner.core.host_tier import HostTier
from weft_runner.core.keeping import Keeper


class Copies:
    """One owner: the residency book, whose adapters it shares."""

    def __init__(
        self, budget_bytes: int, adapters: Callable[[], Mapping[str, Adapter]], order: Callable[[Action], None], *,
        keep_all: bool,
    ) -> None:  # fmt: skip
        self.host = HostTier(budget_bytes)
        self.keeper = Keeper(self.host)
        self._adapters, self._order, self._keep_all = adapters, order, keep_all

    def wants(self, adapter: Adapter) -> bool:
        """Whether a load should leave a copy behind."""
        return self._keep_all or adapter.digest in self.host.protected

    def loaded(self, adapter: Adapter, host_bytes: int | None) -> None:
        """A load has ended, with a copy of so many bytes in host memory (None: it has made none)."""
        adapter.host_bytes = host_bytes or adapter.host_bytes
        if host_bytes is not None and not adapter.spoiled:
            self.keeper.admits(adapter)
            self._hold(adapter)
            return
        if adapter.spoiled:
            adapter.spoiled = adapter.fetching
            self.drop(adapter)
        self.keeper.look(adapter)
        self.keeper.again(adapter)

    def failed(self, adapter: Adapter) -> None:
        """A load has failed: whatever it had read goes."""
        adapter.spoiled = adapter.fetching
        self.drop(adapter)

    def fetched(self, adapter: Adapter, host_bytes: int | None) -> None:
        """A fetch has ended, with a copy (None: on disk only). A load under way accounts for its copy itself."""
        if adapter.spoiled:
            adapter.spoiled = False
            self.drop(adapter)
        else:
            adapter.host_bytes = host_bytes or adapter.host_bytes
            self._take(adapter, host_bytes)
        self.keeper.look(adapter)
        self.keeper.again(adapter)

    def drop(self, adapter: Adapter) -> None:
        """Whatever there is of it goes."""
        self.host.drop(adapter.digest)
        self._order(DropHost(adapter.digest))  # even if this book has none: what was read may not be one
        self.keeper.look(adapter)

    def forget(self, adapter: Adapter) -> None:
        """It is known no more."""
        if self.host.drop(adapter.digest):
            self._order(DropHost(adapter.digest))

    def want(self, adapters: Iterable[Adapter]) -> None:
        """The complete list of what is desired, in order."""
        self.keeper.want(adapters)
        self._crowd_out(self.host.trim())

    def _take(self, adapter: Adapter, host_bytes: int | None) -> None:
        if host_bytes is None:
            return
        if self.keeper.admits(adapter):
            self._hold(adapter)
        elif adapter.digest not in self.host and not adapter.loading:
            self.drop(adapter)

    def _hold(self, adapter: Adapter) -> None:
        """Its copy is in host memory; others may have to go."""
        self._crowd_out(self.host.hold(adapter.digest, adapter.host_bytes))
        self.keeper.look(adapter)

    def _crowd_out(self, digests: Iterable[str]) -> None:
        """There is no room for these. One that is being loaded from its copy will still tell of it."""
        for digest in digests:
            adapter = self._adapters()[digest]
            adapter.spoiled |= adapter.loading
            self._order(DropHost(digest))

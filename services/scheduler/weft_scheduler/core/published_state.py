"""The statuses that registries were sent last, and what may differ from them: only changes are sent."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from weft.domain.machine import Peer
from weft.domain.routes import AdapterStatus, PoolStatus


@dataclass(frozen=True, slots=True)
class PendingDeletion:
    """A removed adapter of the registry, and its last place of service. All empty: unknown here.

    `digests`: its content, then the earlier ones.
    """

    pool: str = ""
    digests: tuple[str, ...] = ()
    model_name: str = ""


@dataclass(frozen=True, slots=True)
class Registry:
    """An open stream of a registry; `term`: of the operator's leadership, None while it only listens."""

    peer: Peer
    term: int | None


class PublishedState:
    """The registries' streams with their statuses. Cleared if a new registry needs everything."""

    def __init__(self) -> None:
        self.registries: dict[str, Registry] = {}
        self.registry_term = 0  # the highest that any registry has spoken under
        self.pools: dict[str, PoolStatus] = {}
        self.adapters: dict[str, AdapterStatus] = {}
        self.dirty_pools: dict[str, None] = {}
        self.deletions: dict[str, PendingDeletion] = {}  # by uid: the registry waits for the final status
        self._dirty_adapters: dict[str, None] = {}  # uids, in order

    @property
    def dirty(self) -> bool:
        return bool(self.dirty_pools or self.deletions or self._dirty_adapters)

    def put_registry(self, registry: Registry) -> None:
        """Send changes on the stream of this registry."""
        self.registries[registry.peer.name] = registry

    def forget_registry(self, name: str) -> None:
        """Send a stream nothing any more."""
        self.registries.pop(name, None)

    def mark_pool(self, name: str) -> None:
        """Record a possible change in the status of a pool."""
        self.dirty_pools[name] = None

    def take_pools(self) -> list[str]:
        """Return the sorted names of pools with possibly changed statuses, and forget them."""
        pools, self.dirty_pools = sorted(self.dirty_pools), {}
        return pools

    def advance_term(self, term: int) -> None:
        """Record the term of a registry's message."""
        self.registry_term = max(self.registry_term, term)

    def mark_adapters(self, uids: Iterable[str]) -> None:
        """Record possible changes in the statuses of adapters."""
        self._dirty_adapters.update(dict.fromkeys(uids))

    def begin_deletion(self, uid: str, deletion: PendingDeletion) -> None:
        """Let the registry wait for the final status of an adapter."""
        self.deletions[uid] = deletion

    def finish_deletion(self, uid: str) -> None:
        """Let the registry wait no longer, if it did."""
        self.deletions.pop(uid, None)

    def forget_adapter(self, uid: str) -> None:
        """Forget the status of an adapter without a pool."""
        self.adapters.pop(uid, None)

    def take_adapters(self, limit: int) -> list[str]:
        """Return at most `limit` uids whose status may differ; the rest comes next time."""
        uids = list(islice(self._dirty_adapters, limit))
        for uid in uids:
            del self._dirty_adapters[uid]
        return uids

    def clear(self) -> None:
        """Forget every status sent: a registry needs everything."""
        self.pools.clear()
        self.adapters.clear()
        self._dirty_adapters.clear()

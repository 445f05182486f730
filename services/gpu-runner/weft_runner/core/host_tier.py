"""Which adapters have a copy in host memory: a byte budget, least recently used out first."""

from collections import OrderedDict


class HostTier:
    """digest -> bytes. The newest stays even when it alone is above the budget: it is on its way to a slot."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._held: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, digest: str) -> bool:
        return digest in self._held

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    def hold(self, digest: str, n_bytes: int) -> list[str]:
        """A copy is there (again); returns the digests that have to go."""
        self._held[digest] = n_bytes
        self._held.move_to_end(digest)
        dropped: list[str] = []
        while self.held_bytes > self.budget_bytes and len(self._held) > 1:
            dropped.append(self._held.popitem(last=False)[0])
        return dropped

    def drop(self, digest: str) -> bool:
        """Forget a copy; False when there was none."""
        return self._held.pop(digest, None) is not None

"""Which adapters have a copy in host memory: a byte budget, least recently used out first."""

from collections import OrderedDict
from collections.abc import Iterator


class HostTier:
    """digest -> bytes. The newest stays even when it alone is above the budget: it is on its way to a slot."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._held: OrderedDict[str, int] = OrderedDict()
        self.held_bytes = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def hold(self, digest: str, n_bytes: int) -> list[str]:
        """A copy is there (again); returns the digests that have to go."""
        self.drop(digest)
        self._held[digest] = n_bytes
        self.held_bytes += n_bytes
        dropped: list[str] = []
        while self.held_bytes > self.budget_bytes and len(self._held) > 1:
            dropped.append(next(iter(self._held)))
            self.drop(dropped[-1])
        return dropped

    def drop(self, digest: str) -> bool:
        """Forget a copy; False when there was none."""
        n_bytes = self._held.pop(digest, None)
        self.held_bytes -= n_bytes or 0
        return n_bytes is not None

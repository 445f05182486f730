"""Which adapters have a copy in host memory: a byte budget, least recently used out first, protected ones never."""

from collections import OrderedDict
from collections.abc import Iterator


class HostTier:
    """digest -> bytes. The newest stays even where the others leave it no room: it is on its way to a slot."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.protected: frozenset[str] = frozenset()
        self.held_bytes = 0
        self._held: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, digest: str) -> bool:
        return digest in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def has_room(self, digest: str, n_bytes: int) -> bool:
        """Whether a protected copy of that size fits beside the other protected ones."""
        others = sum(size for held, size in self._held.items() if held in self.protected and held != digest)
        return others + n_bytes <= self.budget_bytes

    def hold(self, digest: str, n_bytes: int) -> list[str]:
        """A copy is there (again); returns the digests that have to go."""
        self.drop(digest)
        self._held[digest] = n_bytes
        self.held_bytes += n_bytes
        return self.trim()

    def trim(self) -> list[str]:
        """Back into the budget, as far as that goes; returns the digests that have to go."""
        dropped = self._crowded_out()
        for digest in dropped:
            self.drop(digest)
        return dropped

    def drop(self, digest: str) -> bool:
        """Forget a copy; False when there was none."""
        n_bytes = self._held.pop(digest, None)
        self.held_bytes -= n_bytes or 0
        return n_bytes is not None

    def _crowded_out(self) -> list[str]:
        """The least recently used ones that make room, as far as they may go."""
        over, gone, newest = self.held_bytes - self.budget_bytes, list[str](), next(reversed(self._held), None)
        for digest, n_bytes in self._held.items():
            if over <= 0:
                break
            if digest != newest and digest not in self.protected:
                gone.append(digest)
                over -= n_bytes
        return gone


def check_host(host: HostTier) -> None:
    """Protected copies are within the budget; beyond it is at most one copy, and that one is not protected."""
    sizes = dict(host._held)  # pyright: ignore[reportPrivateUsage]
    assert host.held_bytes == sum(sizes.values())
    assert sum(size for digest, size in sizes.items() if digest in host.protected) <= host.budget_bytes
    assert host.held_bytes <= host.budget_bytes or sum(digest not in host.protected for digest in sizes) == 1, sizes

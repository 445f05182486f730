"""Names in order, cut into pages. A list is made when it is asked for, and kept in order while changes are small."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from weft.domain.lru import LruDict

MAX_LISTS = 64  # namespaces whose lists are kept
FEW = 64  # entries of a change that are put in their places; after more the list is made again
Key = tuple[str, str]  # model name, uid


@dataclass(frozen=True, slots=True)
class NamePage:
    """A part of a list. `total`: of the whole list, whatever was searched for."""

    keys: Sequence[Key]
    total: int
    more: bool


class Directory:
    """One kind of entry, by namespace; None: of all namespaces."""

    def __init__(self) -> None:
        self._lists = LruDict[str | None, list[Key]](MAX_LISTS)

    def change(self, removed: Sequence[tuple[str, Key]], added: Sequence[tuple[str, Key]]) -> None:
        """Entries as (namespace, key)."""
        if not self._lists or not (removed or added):
            return
        if len(removed) + len(added) > FEW:
            self._lists.clear()
            return
        for namespace, key in removed:
            for keys in self._of(namespace):
                place = bisect_left(keys, key)
                if place < len(keys) and keys[place] == key:
                    del keys[place]
        for namespace, key in added:
            for keys in self._of(namespace):
                insort(keys, key)

    def keys(self, namespace: str | None, entries: Callable[[], Iterable[Key]]) -> Sequence[Key]:
        """The list of a namespace; `entries`: all that is in it."""
        return self._lists.touch(namespace, lambda: sorted(entries()))

    def _of(self, namespace: str) -> Iterable[list[Key]]:
        return [self._lists[name] for name in (namespace, None) if name in self._lists]


def page_of(keys: Sequence[Key], search: str, skip: int, limit: int) -> NamePage:
    """Entries whose model name holds `search`, whatever its case, from the `skip`-th on."""
    needle = search.lower()
    found = (key for key in keys if needle in key[0].lower()) if needle else iter(keys)
    part = list(islice(found, skip, skip + limit + 1))
    return NamePage(part[:limit], len(keys), len(part) > limit)

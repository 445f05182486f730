"""Names in order, cut into pages. A list is made at its first use, and kept in order while changes are small."""

import re
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from itertools import islice

from weft.domain.lru import LruDict

MAX_LISTS = 64  # lists kept
FEW = 64  # changed entries inserted singly; after more the list is made again
Key = tuple[str, str]  # model name, uid


@dataclass(frozen=True, slots=True)
class NamePage:
    """A part of a list. `total`: the length of the full list, without any search."""

    keys: Sequence[Key]
    total: int
    is_partial: bool


class Directory:
    """The entries of a kind, by namespace (None: of all) and by the models of the caller's key (empty: every model)."""

    def __init__(self) -> None:
        self._lists = LruDict[tuple[str | None, tuple[str, ...]], list[Key]](MAX_LISTS)

    def change(self, removed: Sequence[tuple[str, Key]], added: Sequence[tuple[str, Key]]) -> None:
        """Remove and add entries, given as (namespace, key)."""
        if len(removed) + len(added) > FEW:
            self._lists.clear()
            return
        for namespace, key in removed:
            for keys in self._lists_of(namespace, key[0]):
                del keys[bisect_left(keys, key)]
        for namespace, key in added:
            for keys in self._lists_of(namespace, key[0]):
                insort(keys, key)

    def keys(
        self, namespace: str | None, models: tuple[str, ...], entries: Callable[[], Iterable[Key]]
    ) -> Sequence[Key]:
        """Return the list of a namespace and of models; `entries`: all entries of the namespace."""
        made = lambda: sorted(key for key in entries() if matches(models, key[0]))  # noqa: E731
        return self._lists.touch((namespace, models), made)

    def _lists_of(self, namespace: str, model: str) -> list[list[Key]]:
        return [
            keys for (name, models), keys in self._lists.items() if name in (namespace, None) and matches(models, model)
        ]


def matches(models: tuple[str, ...], model: str) -> bool:
    """Whether a model matches the names and patterns (with * and ?); without any, every model matches."""
    return not models or _pattern_of(models).match(model) is not None


@lru_cache(maxsize=1024)
def _pattern_of(models: tuple[str, ...]) -> re.Pattern[str]:
    """Compile all patterns as one: a list goes through every name of a namespace, and each pattern would be a pass."""
    return re.compile("|".join(map(translate, models)))


def page_of(keys: Sequence[Key], search: str, skip: int, limit: int) -> NamePage:
    """Return a page of the entries with `search` in their model name, in any case, from the `skip`-th on."""
    needle = search.lower()
    matches = (key for key in keys if needle in key[0].lower()) if needle else iter(keys)
    part = list(islice(matches, skip, skip + limit))
    return NamePage(part, len(keys), next(matches, None) is not None)

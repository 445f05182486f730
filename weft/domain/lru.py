"""Dictionaries of bounded size."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruDict(OrderedDict[K, V]):
    """At most `limit` entries: writing a key makes its entry the newest, and the oldest entries are dropped.

    Reading does not change the order; `touch` does.
    """

    def __init__(self, limit: int) -> None:
        assert limit > 0, "an LruDict without a bound"
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self.limit:
            self.popitem(last=False)

    def touch(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, now the newest entry; a missing one is made."""
        if key in self:
            self.move_to_end(key)
        else:
            self[key] = make()
        return self[key]


class ExpiringDict(Generic[K, V]):
    """At most `limit` entries, each for `keep_s` after it was written last. Every call says what time it is (seconds).

    Expired entries are dropped when something is written, so that what nobody needs any more takes no memory.
    """

    def __init__(self, limit: int, keep_s: float) -> None:
        self._entries = LruDict[K, tuple[float, V]](limit)
        self._keep_s = keep_s

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K, now: float) -> V | None:
        entry = self._entries.get(key)
        return None if entry is None or now - entry[0] >= self._keep_s else entry[1]

    def put(self, key: K, value: V, now: float) -> None:
        """Write an entry; it is kept from now on."""
        self._entries[key] = now, value
        while self._entries and now - next(iter(self._entries.values()))[0] >= self._keep_s:
            self._entries.popitem(last=False)

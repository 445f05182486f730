"""A dictionary of bounded size."""

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

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

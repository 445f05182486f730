"""Whether a result is news: operators ask again about every source all the time, and mostly nothing has changed."""

from collections import OrderedDict
from typing import NamedTuple


class Result(NamedTuple):
    """How a resolve ended: one of the two is empty."""

    digest: str
    reason: str


class News:
    """The last result of each request, bounded: the longest unasked go first, and are news again."""

    def __init__(self, limit: int = 20_000) -> None:
        self._limit = limit
        self._last: OrderedDict[str, Result] = OrderedDict()

    def is_new(self, key: str, result: Result) -> bool:
        """Whether this request ended otherwise the last time, or is asked for the first time."""
        before = self._last.pop(key, None)
        self._last[key] = result
        if len(self._last) > self._limit:
            self._last.popitem(last=False)
        return before != result

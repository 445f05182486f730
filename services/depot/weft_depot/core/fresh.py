"""Which requests succeeded so lately that their source is not looked at again.

Operators ask about every source every few seconds; hubs and clouds count requests. Bounded: the longest unseen go.
"""

from collections import OrderedDict


class Fresh:
    """When each request last succeeded. `now` is in seconds."""

    def __init__(self, keep_s: float, limit: int = 50_000) -> None:
        self._keep_s, self._limit = keep_s, limit
        self._seen: OrderedDict[str, float] = OrderedDict()

    def is_fresh(self, key: str, now: float) -> bool:
        seen = self._seen.get(key)
        return seen is not None and now - seen < self._keep_s

    def see(self, key: str, now: float) -> None:
        self._seen[key] = now
        self._seen.move_to_end(key)
        if len(self._seen) > self._limit:
            self._seen.popitem(last=False)

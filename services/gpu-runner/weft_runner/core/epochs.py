"""The highest epoch seen for each request, in bounded memory.

A runner ignores whatever is not above the highest epoch it has seen. Requests that were not heard of for longest are
forgotten first; `limit` is far above what can be in flight between one gateway and one runner.
"""

from collections import OrderedDict

from weft_runner.core.sequence import Epoch


class EpochBook:
    """request -> highest epoch seen, least recently seen forgotten beyond `limit`."""

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._seen: OrderedDict[str, Epoch] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def is_stale(self, request_id: str, epoch: Epoch) -> bool:
        """True when this epoch or a higher one was seen before."""
        seen = self._seen.get(request_id)
        return seen is not None and epoch <= seen

    def see(self, request_id: str, epoch: Epoch) -> None:
        """Remember an epoch; a lower one than known changes nothing."""
        if not self.is_stale(request_id, epoch):
            self._seen[request_id] = epoch
        self._seen.move_to_end(request_id)
        if len(self._seen) > self._limit:
            self._seen.popitem(last=False)

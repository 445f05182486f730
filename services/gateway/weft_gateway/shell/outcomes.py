"""The one terminal record of each request, kept until it is stored: bounded, re-sent on each new stream."""

import logging
from collections.abc import Callable, Iterable, Iterator, Set

from weft.telemetry.logs import kv
from weft.wire.v1 import common_pb2

MAX_UNACKED = 10_000
log = logging.getLogger(__name__)


class Outcomes:
    """Outcomes that nobody has acknowledged. Beyond the limit the oldest is dropped, counted and logged."""

    def __init__(self, *, on_dropped: Callable[[], None], limit: int = MAX_UNACKED) -> None:
        self._kept: dict[str, common_pb2.Outcome] = {}
        self._on_dropped, self._limit = on_dropped, limit

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[common_pb2.Outcome]:
        return iter(self._kept.values())

    def ids(self) -> Set[str]:
        return self._kept.keys()

    def keep(self, outcome: common_pb2.Outcome) -> None:
        assert outcome.request_id not in self._kept, "a second outcome"
        self._kept[outcome.request_id] = outcome
        if len(self._kept) > self._limit:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._on_dropped()
            log.warning("outcome dropped: too many are unacknowledged", extra=kv(request_id=oldest))

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        """Stored: forget them. Unknown ids were acknowledged before."""
        for request_id in request_ids:
            self._kept.pop(request_id, None)

"""Shortest expected remaining work first, aged so that a request's wait stays bounded."""

import math
from bisect import bisect_left, insort
from collections import deque
from typing import ClassVar

from weft_scheduler.core.policy.queue.sorted_queue import Key
from weft_scheduler.core.policy.queue.waiting_queue import QueuedRequest, QueuePolicy

BACKLOGS = 3.0  # as much of its tenant's backlog at its arrival may pass a request
AGING_S = 600.0  # what holds whatever the backlog is, and where it is not known, as no runner was loaded yet
SAMPLE = 1_000  # requests whose work is the scale of "long"
LONG = 0.99  # the share of them that is at most as long


class Shortest(QueuePolicy):
    """By arrival plus the share of a long request's work that it has, times its ageing.

    Ageing is three times the backlog that the request finds (what fcfs would let it wait for), at most `AGING_S`: so
    the order follows a backlog that grows and shrinks, and long answers wait little where nothing much waits. A request
    is passed by none that arrived more than its ageing after it. All requests age at the same rate, so the order of two
    never changes while they wait, and the key is fixed. Work is relative to the 99th percentile of the latest 1,000
    requests, so that ageing means the same for short chats and long reports.
    """

    ages: ClassVar[bool] = True

    def __init__(self) -> None:
        self._sample: deque[float] = deque()
        self._sorted: list[float] = []

    def key(self, request: QueuedRequest, backlog_s: float) -> Key:
        (arrived_s, ticket), work = request.order, request.waiting.expected_work
        aging_s = min(AGING_S, BACKLOGS * backlog_s)
        return (arrived_s + aging_s * min(1.0, work / self._long(work)), ticket)

    def delay_s(self, request: QueuedRequest, key: Key) -> float:
        return key[0] - request.order[0]

    def _long(self, work: float) -> float:
        """The work of a long request, this one among the latest."""
        self._sample.append(work)
        insort(self._sorted, work)
        if len(self._sample) > SAMPLE:
            del self._sorted[bisect_left(self._sorted, self._sample.popleft())]
        return self._sorted[math.ceil(LONG * len(self._sorted)) - 1]

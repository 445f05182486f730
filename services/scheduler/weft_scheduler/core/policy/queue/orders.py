"""The queue policies: each is an order of waiting requests."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping
from typing import ClassVar

from weft_scheduler.core.policy.queue.sorted_queue import Key
from weft_scheduler.core.policy.queue.waiting_queue import MostFree, QueuedRequest, QueuePolicy

BACKLOGS = 3.0  # times its tenant's backlog at its arrival: what may pass a request
AGING_S = 600.0  # the maximum whatever the backlog is, and the ageing where no runner was loaded yet: it is not known
SAMPLE = 1_000  # requests whose work is the scale of "long"
LONG = 0.99  # the share of them that is at most as long


class Fcfs(QueuePolicy):
    """First come, first served (ORCA, section 4.2): by age. A small request may pass an older one without room."""

    by_age: ClassVar[bool] = True

    def key(self, request: QueuedRequest, backlog_s: float) -> Key:
        del backlog_s
        return request.order


class DecreasingFirstFit(QueuePolicy):
    """S3's packing (section 3): the largest fitting predicted KV first.

    Large items pack while bins are empty, small ones fill the gaps.

    A pass starts at the largest request that a runner has tokens for; those before it cannot be placed, and cost
    nothing, however many wait.
    """

    def key(self, request: QueuedRequest, backlog_s: float) -> Key:
        del backlog_s
        return (-request.waiting.tokens, *request.order)

    def first(self, placement: MostFree) -> Key:
        return (-placement.free_tokens(),)


class Shortest(QueuePolicy):
    """Order by arrival plus the share of a long request's work that a request has, times its ageing.

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
        """Return the work of a long request, including this request among the latest."""
        self._sample.append(work)
        insort(self._sorted, work)
        if len(self._sample) > SAMPLE:
            del self._sorted[bisect_left(self._sorted, self._sample.popleft())]
        return self._sorted[math.ceil(LONG * len(self._sorted)) - 1]


QUEUE_POLICIES: Mapping[str, Callable[[], QueuePolicy]] = {"fcfs": Fcfs, "s3": DecreasingFirstFit, "shortest": Shortest}

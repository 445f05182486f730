"""First come, first served (ORCA, section 4.2)."""

from typing import ClassVar

from weft_scheduler.core.policy.queue.sorted_queue import Key
from weft_scheduler.core.policy.queue.waiting_queue import QueuedRequest, QueuePolicy


class Fcfs(QueuePolicy):
    """By age. What fits where an older request does not may pass it, so many times."""

    by_age: ClassVar[bool] = True

    def key(self, request: QueuedRequest, backlog_s: float) -> Key:
        del backlog_s
        return request.order

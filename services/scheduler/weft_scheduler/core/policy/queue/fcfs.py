"""First come, first served (ORCA, section 4.2)."""

from weft_scheduler.core.policy.queue.sorted_queue import Key
from weft_scheduler.core.policy.queue.waiting_queue import R, WaitingQueue


class Fcfs(WaitingQueue[R]):
    """By age. What fits where an older request does not may pass it, so many times."""

    def key(self, request: R) -> Key:
        return request.order

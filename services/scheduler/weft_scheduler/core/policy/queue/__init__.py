"""The order in which waiting requests are offered to the placement. `POLICIES` names the queue policies."""

from weft_scheduler.core.policy.queue.fcfs import Admitted, Fcfs, Overtaking, QueuedRequest, QueuePolicy
from weft_scheduler.core.policy.queue.sorted_queue import SortedQueue

POLICIES = {"fcfs": Fcfs}

__all__ = ["POLICIES", "Admitted", "Fcfs", "Overtaking", "QueuePolicy", "QueuedRequest", "SortedQueue"]

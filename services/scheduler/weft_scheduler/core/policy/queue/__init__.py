"""The order in which waiting requests are offered to the placement. `POLICIES` names the queue policies."""

from weft_scheduler.core.policy.queue.fcfs import Fcfs

POLICIES = {"fcfs": Fcfs}

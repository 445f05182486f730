"""The order in which waiting requests are offered to the placement. `POLICIES` names the queue policies."""

from collections.abc import Callable, Mapping

from weft_scheduler.core.policy.queue.fcfs import Fcfs
from weft_scheduler.core.policy.queue.s3 import DecreasingFirstFit
from weft_scheduler.core.policy.queue.shortest import Shortest
from weft_scheduler.core.policy.queue.waiting_queue import QueuePolicy

# by name: the policy of a pool whose requests age in so many seconds
POLICIES: Mapping[str, Callable[[float], QueuePolicy]] = {
    "fcfs": lambda _: Fcfs(),
    "s3": lambda _: DecreasingFirstFit(),
    "shortest": Shortest,
}

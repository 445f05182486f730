"""The order in which waiting requests are offered to the placement. `POLICIES` names the queue policies."""

from collections.abc import Callable, Mapping
from typing import Any

from weft_scheduler.core.policy.queue.fcfs import Fcfs
from weft_scheduler.core.policy.queue.s3 import DecreasingFirstFit
from weft_scheduler.core.policy.queue.shortest import Shortest
from weft_scheduler.core.policy.queue.waiting_queue import WaitingQueue

# by name: the policy of a pool whose requests age in so many seconds
POLICIES: Mapping[str, Callable[[float], WaitingQueue[Any]]] = {
    "fcfs": lambda _: Fcfs(),
    "s3": lambda _: DecreasingFirstFit(),
    "shortest": Shortest,
}

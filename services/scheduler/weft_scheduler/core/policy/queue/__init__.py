"""The order in which waiting requests are offered to the placement. `POLICIES` names the queue policies."""

from collections.abc import Callable, Mapping

from weft_scheduler.core.policy.queue.fcfs import Fcfs
from weft_scheduler.core.policy.queue.s3 import DecreasingFirstFit
from weft_scheduler.core.policy.queue.shortest import Shortest
from weft_scheduler.core.policy.queue.waiting_queue import QueuePolicy

POLICIES: Mapping[str, Callable[[], QueuePolicy]] = {"fcfs": Fcfs, "s3": DecreasingFirstFit, "shortest": Shortest}

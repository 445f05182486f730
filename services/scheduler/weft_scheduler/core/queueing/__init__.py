"""Who is admitted next. A policy decides an order and who may pass whom; `POLICIES` names them."""

from weft_scheduler.core.queueing.fcfs import Fcfs, Policy
from weft_scheduler.core.queueing.queue import Queue

POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs}

__all__ = ["POLICIES", "Fcfs", "Policy", "Queue"]

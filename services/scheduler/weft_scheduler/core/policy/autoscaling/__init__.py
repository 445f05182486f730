"""How many runners a pool wants, and which ones should go."""

from weft_scheduler.core.policy.autoscaling.autoscaler import Autoscaler, Contribution, PoolCapacity, VictimCandidate
from weft_scheduler.core.policy.autoscaling.demand import PoolLoad, ReplicaBounds
from weft_scheduler.core.policy.autoscaling.throughput import DepartureRate, retry_after_ms

__all__ = [
    "Autoscaler",
    "Contribution",
    "DepartureRate",
    "PoolCapacity",
    "PoolLoad",
    "ReplicaBounds",
    "VictimCandidate",
    "retry_after_ms",
]

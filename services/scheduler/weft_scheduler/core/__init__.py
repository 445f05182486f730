# pyright: reportUnusedImport=false
"""The pure scheduler: events in, effects out. Clock values are arguments; nothing here blocks, sends or sleeps.

Tests, the simulator and benchmarks take these names from here: the modules behind them may change.
"""

from weft_scheduler.core.config import SchedulerConfig
from weft_scheduler.core.effects import (
    BatchPreempted,
    Consolidated,
    Effect,
    Event,
    Judged,
    KvHandOff,
    KvMigration,
    Queued,
    Requeued,
    Resumed,
    RoleChanged,
    RunnerLost,
    Stale,
)
from weft_scheduler.core.model.request import Phase, Request
from weft_scheduler.core.model.runner import RunnerAccount
from weft_scheduler.core.policy.placement.runner_index import RunnerShape
from weft_scheduler.core.policy.queue.waiting_queue import QueueEntry
from weft_scheduler.core.scheduler import Scheduler
from weft_scheduler.core.state import State

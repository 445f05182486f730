# pyright: reportUnusedImport=false
"""The pure scheduler: events in, effects out. Clock values are arguments; nothing here blocks, sends or sleeps.

Other packages import these names from here and nothing else: the modules of this package may change.
"""

from weft_scheduler.core.admission import estimate_retry_ms
from weft_scheduler.core.config import SchedulerConfig
from weft_scheduler.core.effects import Consolidated, Effect, Event, Requeued, SequencesParked, Stale
from weft_scheduler.core.model.request import Request
from weft_scheduler.core.model.runner import RunnerAccount
from weft_scheduler.core.policy.autoscaling.autoscaler import Autoscaler, PhaseBounds, PoolCapacity
from weft_scheduler.core.policy.autoscaling.demand import PoolLoad, ReplicaBounds
from weft_scheduler.core.policy.consolidation.consolidation import MAX_CONSOLIDATIONS
from weft_scheduler.core.policy.placement.runner_index import RunnerShape
from weft_scheduler.core.policy.queue.overtaking import QueuePass
from weft_scheduler.core.policy.queue.waiting_queue import QueueEntry
from weft_scheduler.core.pool.pool import POLICIES, Pool
from weft_scheduler.core.scaling import demand, load_of
from weft_scheduler.core.scheduler import Scheduler
from weft_scheduler.core.state import Numbers, State

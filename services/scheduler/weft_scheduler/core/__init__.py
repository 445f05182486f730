# pyright: reportUnusedImport=false
"""The pure scheduler: events in, effects out. Clock values are arguments; nothing here blocks, sends or sleeps.

Tests, the simulator and benchmarks take these names from here: the modules behind them may change.
"""

from weft_scheduler.core.admission import estimate_retry_ms
from weft_scheduler.core.check import check_accounts, check_placement_index
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
    SequencesParked,
    Stale,
)
from weft_scheduler.core.model.request import NEXT_PHASES, Phase, Placement, Request, remaining_tokens
from weft_scheduler.core.model.runner import Contact, RunnerAccount, StaleReport, UnackedAssign, pages_of
from weft_scheduler.core.outcome_buffer import OutcomeBuffer
from weft_scheduler.core.policy.autoscaling.autoscaler import Autoscaler, Contribution, PhaseBounds, PoolCapacity
from weft_scheduler.core.policy.autoscaling.demand import (
    MAX_WANTED_RUNNERS,
    PoolLoad,
    ReplicaBounds,
    RunnerCapacity,
    ScaleDownStabilization,
    demand_runners,
    desired_runners,
)
from weft_scheduler.core.policy.autoscaling.groups import VictimCandidate, allocate, divide, select_victims, surplus
from weft_scheduler.core.policy.consolidation.consolidation import (
    ConsolidationRunner,
    RunningSequence,
    select_leaving,
    select_sources,
)
from weft_scheduler.core.policy.length_distribution import LengthDistribution
from weft_scheduler.core.policy.phases.kv_cost import FREEZE_S, transfer_is_cheaper
from weft_scheduler.core.policy.phases.roles import (
    GROW_S,
    LOST_IN_A_ROW,
    LOST_TOGETHER_S,
    MAX_SUSPEND_S,
    PERIOD_S,
    REPLANNED,
    REVIEW_S,
    SHRINK_S,
    SUSPEND_S,
    PhaseRunner,
    RolePlan,
)
from weft_scheduler.core.policy.placement.capacity_treap import CapacityTreap, RunnerKey, priority_of
from weft_scheduler.core.policy.placement.policy import Choice, PlacementRequest, RunnerLoad
from weft_scheduler.core.policy.placement.punica import Punica, placement_score
from weft_scheduler.core.policy.placement.runner_index import RunnerShape
from weft_scheduler.core.policy.placement.splitwise import KvDomain, Splitwise, can_split, domain_of
from weft_scheduler.core.policy.priority.headroom import InteractiveArrivals
from weft_scheduler.core.policy.priority.victims import BatchSequence, Capacity, Need, select_preempted
from weft_scheduler.core.policy.queue.orders import AGING_S, QUEUE_POLICIES, Shortest
from weft_scheduler.core.policy.queue.overtaking import Overtaking, QueuePass
from weft_scheduler.core.policy.queue.sorted_queue import SortedQueue
from weft_scheduler.core.policy.queue.token_counters import TokenCounters
from weft_scheduler.core.policy.queue.waiting_queue import QueueEntry, WaitingQueue
from weft_scheduler.core.policy.reservation import RESERVATION_POLICIES
from weft_scheduler.core.policy.reservation.output_lengths import OutputLengthStats
from weft_scheduler.core.policy.reservation.policies import ExpectedOutput
from weft_scheduler.core.policy.reservation.pooled import (
    DEVIATIONS,
    HEAVY,
    HORIZONS,
    MAX_DEVIATIONS,
    OVERRUN_RATE,
    ExpectedUse,
    Margin,
    PooledUse,
    UseForecast,
)
from weft_scheduler.core.policy.slo.attainment import TAU_S, Attainment, ServiceLevel
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.pool.queue import BEYOND_SHARE_S
from weft_scheduler.core.scaling import demand, load_of
from weft_scheduler.core.scheduler import TIMERS, Scheduler
from weft_scheduler.core.state import Numbers, State
from weft_scheduler.core.timers import Timer, TimerKind

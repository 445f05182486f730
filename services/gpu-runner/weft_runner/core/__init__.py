# pyright: reportUnusedImport=false
"""Decisions of the runner on host integers: no clock, no thread, no tensor.

Tests, the simulator and benchmarks take these names from here: the modules behind them may change.
"""

from weft_runner.core.adapters.adapter import Adapter, HostCopy, LoadState
from weft_runner.core.adapters.known import MAX_ON_DEMAND, KnownAdapters
from weft_runner.core.adapters.manager import AdapterManager, check_adapters
from weft_runner.core.adapters.slots import AdapterSlots
from weft_runner.core.admission import HighestEpochs, PoolLimits
from weft_runner.core.batch import (
    MAX_LOGIT_ROWS,
    Batch,
    Batching,
    BatchLimits,
    Candidate,
    Row,
    adapter_segments,
    form_batch,
)
from weft_runner.core.batch_scheduler import BatchScheduler
from weft_runner.core.drafts.acceptance import ALL_PRIORS, MIN_GAIN, SUREST, Acceptance, Draft, weigh_alike
from weft_runner.core.drafts.caller_draft import CallerDraft
from weft_runner.core.drafts.drafter import DraftQuery, Search
from weft_runner.core.drafts.recent_answers import RecentAnswers, check_recent_answers
from weft_runner.core.drain import DRAIN_IDLE_S
from weft_runner.core.events import (
    REPORT,
    Action,
    AdapterBrought,
    AdapterPages,
    AdaptersChanged,
    AdapterUse,
    CompileGrammar,
    Drain,
    DropHost,
    DropKv,
    DropSwap,
    Fact,
    Fetch,
    Fetched,
    FetchFailed,
    GrammarCompiled,
    KvAction,
    Load,
    Loaded,
    LoadFailed,
    OpenKvStream,
    PromptComputed,
    ReceiveKv,
    Retain,
    RunnerStatus,
    RunStep,
    SendKv,
    SequenceEnded,
    StepDone,
    StepResults,
    StepSlot,
    SwapDone,
    SwapFailed,
    SwapIn,
    SwapOut,
    Unload,
)
from weft_runner.core.host_cache import PREFETCHES, CachedPage, HostCache, check_host_cache
from weft_runner.core.layer_cut import layer_cost
from weft_runner.core.page_table import PageTable, check_page_table
from weft_runner.core.preempt.parking import MAX_PARKED_S, SequenceParking
from weft_runner.core.preempt.preemption import select_victim
from weft_runner.core.prefix.cache import PageHashChain
from weft_runner.core.prefix.host import HostPrefixes
from weft_runner.core.prefix.reuse import PrefixReuse
from weft_runner.core.profile_model import DecodeTime, PrefillTime, Profile, make_profile
from weft_runner.core.reporter import Reporter
from weft_runner.core.request_pool import RequestPool, check_pool
from weft_runner.core.reserve.reservations import first_reservation_pages, next_growth
from weft_runner.core.runner import RETRY_S, Runner
from weft_runner.core.sampling import LogitAdjustments, SampledToken, logit_adjustments
from weft_runner.core.sequence import Sequence, SequencePhase
from weft_runner.core.step_time_model import GUESS, LATE_STEPS, MIN_CHUNK, Lateness, StepModel, StepTimeEstimator
from weft_runner.core.swap.swaps import MAX_SWAPS
from weft_runner.core.token_mask import token_mask
from weft_runner.core.transfer.hand_over import MIGRATE_S, HandOver
from weft_runner.core.transfer.shards import (
    KvShard,
    SendComplete,
    ShardComplete,
    ShardedTransfers,
    ShardLost,
    ShardOrder,
    shard_runner,
)
from weft_runner.core.transfer.transfers import MAX_OFFERS, KvIdentity, KvTransfers, OutgoingKv

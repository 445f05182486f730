# pyright: reportUnusedImport=false
"""Decisions of the runner on host integers: no clock, no thread, no tensor.

Tests, the simulator and benchmarks take these names from here: the modules behind them may change.
"""

from weft_runner.core.adapters.adapter import HostCopy, LoadState
from weft_runner.core.adapters.manager import AdapterManager, check_adapters
from weft_runner.core.admission import PoolLimits
from weft_runner.core.batch import Batch, Batching, BatchLimits, Candidate, Row, adapter_segments, form_batch
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
from weft_runner.core.page_table import PageTable
from weft_runner.core.preempt.preemption import select_victim
from weft_runner.core.profile_model import DecodeTime, PrefillTime, Profile, make_profile
from weft_runner.core.request_pool import RequestPool, check_pool
from weft_runner.core.runner import Runner
from weft_runner.core.sampling import LogitAdjustments, SampledToken, logit_adjustments
from weft_runner.core.sequence import Sequence, SequencePhase
from weft_runner.core.step_time_model import GUESS, StepModel
from weft_runner.core.swap.swaps import MAX_SWAPS
from weft_runner.core.token_mask import token_mask
from weft_runner.core.transfer.hand_over import MIGRATE_S
from weft_runner.core.transfer.shards import KvShard, ShardComplete, ShardedTransfers, ShardLost, ShardOrder
from weft_runner.core.transfer.transfers import KvIdentity

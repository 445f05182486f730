# pyright: reportUnusedImport=false
"""Decisions of the runner on host integers: no clock, no thread, no tensor.

Other packages import these names from here and nothing else: the modules of this package may change.
"""

from weft_runner.core.adapters.slots import MAX_SLOTS
from weft_runner.core.admission import PoolLimits
from weft_runner.core.batch import Batch, Batching, BatchLimits
from weft_runner.core.drafts.acceptance import SUREST, Draft, weigh_alike
from weft_runner.core.drafts.drafter import DraftQuery
from weft_runner.core.events import Action, Drain, Fetch, Fetched, OpenKvStream, ReceiveKv, SendKv, Unload
from weft_runner.core.runner import Runner
from weft_runner.core.sampling import SampledToken
from weft_runner.core.sequence import Sequence
from weft_runner.core.step_time_model import GuessTimes, StepModel
from weft_runner.core.transfer.hand_over import MIGRATE_S
from weft_runner.core.transfer.transfers import KvIdentity

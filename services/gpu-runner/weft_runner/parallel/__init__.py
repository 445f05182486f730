# pyright: reportUnusedImport=false
"""One model on several ranks: its parts, what ranks exchange, and the processes that hold them.

Others take these names from here; `process_group`, which needs torch, is left out.
"""

from weft_runner.parallel.adapters import ShardedAdapter, ShardedAdapterStore
from weft_runner.parallel.channel import Channel
from weft_runner.parallel.commands import COMMANDS, KINDS, BuiltShard, Layers, RankReady, RankStopping
from weft_runner.parallel.executor import MultiProcessExecutor, TensorParallelExecutor
from weft_runner.parallel.messages import ChannelLost, MessageRefused, pack_message, unpack_message
from weft_runner.parallel.pipeline import OffloadedPipeline, PipelineParallelExecutor
from weft_runner.parallel.pipeline_channel import PipelineChannel
from weft_runner.parallel.shared_tensors import FixedScales, RecordedScales, open_shared, share_tensors

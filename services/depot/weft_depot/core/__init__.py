# pyright: reportUnusedImport=false
"""The depot's decisions: values in, values out.

Tests, the simulator and benchmarks take these names from here: the modules behind them may change.
"""

from weft_depot.core.fair_queue import ConcurrencyLimits, FairQueue, QueueKey
from weft_depot.core.operations import Operations

# pyright: reportUnusedImport=false
"""The depot's decisions: values in, values out.

Tests, the simulator and benchmarks import names only from here: the submodules may change.
"""

from weft_depot.core.fair_queue import ConcurrencyLimits, FairQueue, QueueKey
from weft_depot.core.operations import Operations

# pyright: reportUnusedImport=false
"""The depot's decisions: values in, values out.

Other packages import these names from here and nothing else: the modules of this package may change.
"""

from weft_depot.core.fair_queue import ConcurrencyLimits, FairQueue, QueueKey
from weft_depot.core.operations import Operations

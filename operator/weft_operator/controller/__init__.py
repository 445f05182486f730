# pyright: reportUnusedImport=false
"""The loop around the planner: work queue, rate limit, and the clients of the depot and of the scheduler.

Tests import these names from here, because the submodules may change.
"""

from weft_operator.controller.clock import Clock, unix_clock
from weft_operator.controller.depot_client import DepotClient
from weft_operator.controller.keys import KeyController
from weft_operator.controller.loop import Controller
from weft_operator.controller.registry_client import RegistryClient
from weft_operator.controller.resolver import SourceResolver
from weft_operator.controller.workqueue import BURST, PER_S, TokenBucket, WorkQueue

# pyright: reportUnusedImport=false
"""Capacity planning: a cluster of machines with roles, simulated by iterations, fast enough to compare many designs.

Tests take these names from here: the modules behind them may change.
"""

from weft_sim.planning.batching import BATCHINGS
from weft_sim.planning.cluster import Cluster, KvLink, Rules, ServedModel, UnsupportedRules
from weft_sim.planning.decode_run import DecodeRun
from weft_sim.planning.designs import Combination, Design, PricedKind
from weft_sim.planning.machine import MachineKind, Stepping
from weft_sim.planning.objectives import Objective, Watch, counted_quantile
from weft_sim.planning.plan import families, plan
from weft_sim.planning.request import PlannedRequest
from weft_sim.planning.search import Frontier, PlanningProblem, bounds, search, simulate
from weft_sim.planning.splitwise import A100, BASELINE, BLOOM_176B, H100, SPLIT, HeapClock, machine_kind
from weft_sim.planning.workload import BadWorkload, Workload, distribution

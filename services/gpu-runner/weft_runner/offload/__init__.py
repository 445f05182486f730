# pyright: reportUnusedImport=false
"""Offloading: more model than memory, by a policy that a linear program finds (FlexGen, sections 4 and 5). Pure.

`policy` and `plan` are what an executor obeys; `machine` what it measured; `costs` what a policy takes of time and of
each tier; `rounding` which matrix lies where; `solver` the search, which alone needs scipy and runs as
`python -m weft_runner.offload`, a process of its own.

Others take these names from here; `page_places` and `solver` are taken as modules, as `weft plan` has no numpy.
"""

from weft_runner.offload.costs import BlockWork, Case, OffDeviceShares, prompt_streams, token_streams
from weft_runner.offload.device_placement import DevicePlacement, check_device_placement, place_on_device
from weft_runner.offload.figures import Accuracy, OffloadFigures, TierFigures
from weft_runner.offload.machine import MachineRates, check_machine, machine_of, product_s, rising
from weft_runner.offload.passes import PassWork, WeightPlacement, predict_pass
from weft_runner.offload.placement import check_placement, split_activations, split_kv
from weft_runner.offload.plan import MATRICES, BlockTime, OffloadPlan, PassTime, Usage, WeightTiers, check_plan, plan_of
from weft_runner.offload.policy import (
    MAX_TIER_BYTES,
    Budgets,
    Formats,
    MemoryTier,
    Policy,
    Shares,
    WeightsFormat,
    check_policy,
)
from weft_runner.offload.residency import least_bytes, place_weights
from weft_runner.offload.rounding import EVERYTHING, ON_GPU, Supports, plan_from, residents, round_case, spread
from weft_runner.offload.search import PASSES, PolicySearch, cases, find_plan, find_plans, least_budgets
from weft_runner.offload.serving import RunnerRequest, Sequences, serving_limits, stage_searches
from weft_runner.offload.sizes import ModelSizes, model_sizes
from weft_runner.offload.stages import PipelineTime, StageState, batches_in_flight, pipeline_time, state_of_all
from weft_runner.offload.wire import measured_gpu, request_json, request_of, solve_each, solve_ranks, spec_json

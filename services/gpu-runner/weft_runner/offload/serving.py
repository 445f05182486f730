"""Between a runner's settings and the search: what it asks for a pool, and what its limits are by the plans. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.domain.model.families import PROJECTIONS
from weft.domain.model.spec import ModelSpec
from weft_kernels.triton.entries import entry_bytes
from weft_runner.core.layer_cut import stage_layers
from weft_runner.offload.costs import BlockWork
from weft_runner.offload.machine import MachineRates
from weft_runner.offload.plan import MATRICES, OffloadPlan
from weft_runner.offload.policy import Budgets, Formats, MemoryTier
from weft_runner.offload.rounding import EVERYTHING, ON_GPU, Supports
from weft_runner.offload.search import BLOCKS, PolicySearch
from weft_runner.offload.sizes import model_sizes

MAX_BATCH_TOKENS, MAX_POOL_PAGES = 65_536, 1 << 20  # of a pool
# Of a budget, that the plan leaves: rows of the embedding on their way, and pages and workspaces rounded up.
MARGIN_BYTES, MARGIN_PAGES = 1 << 20, 4
GPU_MARGIN = 16  # one such part, for what torch's allocator rounds up and libraries work on
# Rows of a whole pass come to a stage and leave it as messages: a file would save one copy in memory of several.
STAGE = Supports(activations=(MemoryTier.DEVICE, MemoryTier.HOST))


@dataclass(frozen=True, slots=True)
class Sequences:
    """Tokens of a block's sequences, and the adapters among them; where nobody says: FlexGen's own, many tenants."""

    prompt: int = 512
    output: int = 32
    adapters: int = 16
    adapter_rank: int = 16


@dataclass(frozen=True, slots=True)
class RunnerRequest:
    """What a runner's policy depends on, beside its model and its machines. Limits that are 0 are free.

    `budgets`: of each rank. `formats`: of its executor. `stages`: of the pipeline, on `hosts` with as many each.
    `device_batch_tokens`: that a layer of the cpu executor computes at a time. `reserve`: a part of the budgets is left
    for what plans do not count.
    """

    budgets: Budgets
    formats: Formats
    sequences: Sequences = Sequences()
    stages: int = 1
    hosts: int = 1
    max_adapters: int = 0
    max_rank: int = 64
    max_sequences: int = 0
    max_batch_tokens: int = 0
    kv_pages: int = 0
    page_tokens: int = 16
    device_batch_tokens: int = 256
    reserve: bool = True

    @property
    def most_block(self) -> int:
        """Sequences of a block: each host has one in flight."""
        return max(1, self.max_sequences // self.hosts) if self.max_sequences else BLOCKS[-1]


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """A runner's: KV pages, sequences at a time, and tokens of a pass."""

    pages: int
    sequences: int
    batch_tokens: int


def stage_searches(
    spec: ModelSpec, machines: Mapping[int, MachineRates], asked: RunnerRequest
) -> dict[int, PolicySearch]:  # fmt: skip
    """One for each stage, with the rates of its host. Raises ExecutorUnavailable: the model has fewer layers."""
    make = _on_gpu if asked.formats.executor == "cuda" else _on_cpu
    return {
        stage: make(spec, machines[stage], asked, stage_layers(spec, stage, asked.stages))
        for stage in range(asked.stages)
    }


def _on_cpu(spec: ModelSpec, machine: MachineRates, asked: RunnerRequest, layers: range) -> PolicySearch:
    page = asked.page_tokens * model_sizes(spec, asked.formats, layers=layers).kv_token
    device = asked.budgets.device_bytes
    margin = min(device // 8, MARGIN_BYTES + int(MARGIN_PAGES * page)) if asked.reserve else 0
    return PolicySearch(
        spec, machine, replace(asked.budgets, device_bytes=device - margin), asked.formats, _work(spec, asked),
        STAGE if asked.stages > 1 else EVERYTHING, asked.most_block, layers,
        asked.max_batch_tokens or MAX_BATCH_TOKENS,
    )  # fmt: skip


def _on_gpu(spec: ModelSpec, machine: MachineRates, asked: RunnerRequest, layers: range) -> PolicySearch:
    """What the cuda executor has where; and what its allocator and libraries take."""
    search, context = _on_cpu(spec, machine, asked, layers), spec.max_positions
    entry = entry_bytes(len(layers), len(MATRICES), len(PROJECTIONS) * asked.max_rank)
    tables = 4 * -(-context // asked.page_tokens) + (0 if asked.max_adapters else entry)
    beside = asked.max_adapters * entry + 4 * context * spec.rotary_size
    budgets, host = search.budgets, asked.budgets.host_bytes
    if asked.reserve:
        beside += asked.budgets.device_bytes // GPU_MARGIN
        host -= min(host // 8, MARGIN_BYTES)
    return replace(
        search,
        budgets=replace(budgets, device_bytes=max(1, budgets.device_bytes - beside), host_bytes=host),
        work=replace(search.work, batch_tokens=search.most_tokens, table_bytes=tables),
        supports=_gpu_supports(asked),
    )


def _gpu_supports(asked: RunnerRequest) -> Supports:
    """A stage's rows come and leave as messages."""
    return replace(ON_GPU, activations=(MemoryTier.DEVICE,)) if asked.stages > 1 else ON_GPU


def _work(spec: ModelSpec, asked: RunnerRequest) -> BlockWork:
    """No more tokens than the model has positions, no more adapters or ranks than the limits allow."""
    most, wanted = spec.max_positions, asked.sequences
    output = max(2, min(wanted.output, most // 2))
    return BlockWork(
        max(1, min(wanted.prompt, most - output)),
        output,
        min(wanted.adapters, asked.max_adapters or asked.max_sequences or BLOCKS[-1]),
        min(wanted.adapter_rank, asked.max_rank),
        batch_tokens=asked.device_batch_tokens,
        page_tokens=asked.page_tokens,
        in_flight=asked.hosts,
        pages=asked.kv_pages,
    )


def serving_limits(plans: Mapping[int, tuple[PolicySearch, OffloadPlan]]) -> ServingLimits:
    """With which the ranks do what their plans say. Blocks are sequences, and adapters are in KV pages, too."""
    pages, sequences, tokens = 0, 0, MAX_BATCH_TOKENS
    for search, plan in plans.values():
        work, block = search.work, plan.policy.block
        page_bytes = work.page_tokens * search.sizes.kv_token
        of_adapters = math.ceil(plan.usage[MemoryTier.DEVICE].adapters / page_bytes)
        sequences = block * work.in_flight
        needed = sequences * math.ceil((work.prompt + work.output) / work.page_tokens) + of_adapters
        pages = max(pages, work.pages or needed)
        together = block // plan.prompt_passes  # each rank has chosen its own: the least fits all
        tokens = min(tokens, together * work.prompt + sequences, search.most_tokens)
    return ServingLimits(min(pages, MAX_POOL_PAGES), sequences, tokens)

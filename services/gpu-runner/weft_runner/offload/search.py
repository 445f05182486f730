"""The best policy: for each block and device batch a linear program, and what rounds best (FlexGen, section 4.3). Pure.

The paper picks the fastest relaxed policy and adjusts it by hand where it does not fit. Here the linear programs are
bounds: cases are rounded in the order of theirs, until no bound is below the best rounded policy. So the answer is the
best of everything that an executor can do on this grid under the cost model, found with a few roundings. `relax` is
the solver (`solver.relax`), passed in, because only the planner's process has one.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from weft.domain.model.spec import ModelSpec
from weft_runner.errors import NoPolicyFits
from weft_runner.offload.costs import BlockWork, Case, memory
from weft_runner.offload.machine import MachineRates
from weft_runner.offload.plan import BUFFERS, OffloadPlan, check_plan
from weft_runner.offload.policy import Budgets, Formats, MemoryTier, check_budgets
from weft_runner.offload.rounding import EVERYTHING, Rounded, Supports, plan_from, residents, round_case
from weft_runner.offload.sizes import ModelSizes, model_sizes
from weft_runner.offload.stages import pipeline_time

BLOCKS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # sequences
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)  # of a device batch, and the whole block
PASSES = (1, 2, 4, 8, 16, 32)


# Seconds of a case's block by its linear program, below which no rounded policy is; None: not even shares fit.
Relax = Callable[[Case, Budgets, Supports], float | None]


@dataclass(frozen=True, slots=True)
class PolicySearch:
    """What is asked. `layers`: of a pipeline's rank (None: all).

    `most_block`: sequences that may run at a time; `most_tokens`: of a pass, where longer prompts come in parts.
    """

    spec: ModelSpec
    machine: MachineRates
    budgets: Budgets
    formats: Formats
    work: BlockWork
    supports: Supports = EVERYTHING
    most_block: int = BLOCKS[-1]
    layers: range | None = None
    most_tokens: int = 65_536

    @property
    def sizes(self) -> ModelSizes:
        """Sizes of these layers."""
        return model_sizes(self.spec, self.formats, adapter_rank=self.work.adapter_rank, layers=self.layers)

    @property
    def paying(self) -> "PolicySearch":
        """Attention to the best keys alone only where that is faster."""
        sparse = self.formats.sparse_attention and self.machine.sparse_pays
        return replace(self, formats=replace(self.formats, sparse_attention=sparse))

    @property
    def tiers(self) -> Budgets:
        """In one memory what the host may have is the device's."""
        own = self.budgets
        if not self.machine.one_memory:
            return own
        return Budgets(own.device_bytes + own.host_bytes, 0, own.disk_bytes)


def find_plan(request: PolicySearch, relax: Relax) -> OffloadPlan:
    """The plan with the most tokens a second. Raises NoPolicyFits, PolicyInvalid."""
    check_budgets(request.budgets)
    request = request.paying
    found = ((relax(case, request.tiers, request.supports), case) for case in cases(request))
    bounds = [(block_s / case.block, case) for block_s, case in found if block_s is not None]
    best: tuple[float, Case, Rounded, float] | None = None
    for bound, case in sorted(
        bounds, key=lambda one: (one[0], one[1].block, -one[1].batch, one[1].passes, -one[1].buffers)
    ):
        if best is not None and bound >= best[0]:
            break
        least_s = math.inf if best is None else best[0] * case.block
        rounded = round_case(case, request.tiers, request.supports, least_s)
        if rounded is not None:
            best = rounded.prediction.block_s / case.block, case, rounded, bound * case.block
    if best is None:
        raise _why_none(request)
    plan = plan_from(best[1], request.tiers, best[2], best[3])
    check_plan(plan)
    return plan


def cases(request: PolicySearch) -> Iterator[Case]:
    """The grid: blocks of whole device batches, prompts in passes of whole sequences."""
    sizes = request.sizes
    for block in BLOCKS:
        if block > request.most_block:
            return
        for batch in sorted({batch for batch in (*BATCHES, block) if block % batch == 0}):
            for passes in PASSES:
                if block % passes == 0:
                    for buffers in BUFFERS:
                        case = Case(
                            sizes, request.machine, request.formats, request.work, block, batch, passes, buffers
                        )
                        # one prompt at a time may be longer than a pass: its parts are computed one after the other
                        within_tokens = case.most_rows <= request.most_tokens or passes == block
                        if case.within_pages and block <= request.most_tokens and within_tokens:
                            yield case


def find_plans(requests: Mapping[int, PolicySearch], relax: Relax) -> dict[int, OffloadPlan]:
    """Find plans for the ranks of a pipeline, each with its own layers and budgets: one block and batch for all.

    As many blocks are in flight as there are hosts, each with as many ranks as the others: those of a host take turns
    (`stages`), and the slowest host sets the pace. Raises NoPolicyFits, with the rank in its text.
    """
    best: dict[int, OffloadPlan] = {}
    pace, hosts = 0.0, next(iter(requests.values())).work.in_flight
    for block in (block for block in BLOCKS if block <= min(one.most_block for one in requests.values())):
        found: dict[int, OffloadPlan] = {}
        for rank, request in requests.items():
            try:
                found[rank] = _of_block(request, block, relax)
            except NoPolicyFits as error:
                if block == BLOCKS[0]:
                    raise NoPolicyFits(f"rank {rank}: {error}", error.tier, error.short_bytes) from error
                break
        if len(found) < len(requests):
            break
        if (tokens_per_s := pipeline_time([found[rank] for rank in sorted(found)], hosts).tokens_per_s) > pace:
            best, pace = found, tokens_per_s
    return best


def _of_block(request: PolicySearch, block: int, relax: Relax) -> OffloadPlan:
    request = request.paying
    best: tuple[Case, Rounded, float] | None = None
    for case in cases(request):
        if case.block != block or (bound_s := relax(case, request.tiers, request.supports)) is None:
            continue
        least_s = math.inf if best is None else best[1].prediction.block_s
        if bound_s < least_s and (rounded := round_case(case, request.tiers, request.supports, least_s)):
            best = case, rounded, bound_s
    if best is None:
        raise _why_none(request)
    return plan_from(best[0], request.tiers, best[1], best[2])


# ---- nothing fits


def _why_none(request: PolicySearch) -> NoPolicyFits:
    """One sequence at a time with every weight outside is the least; what that lacks is named, and what would do."""
    case = Case(request.sizes, request.machine, request.formats, request.work, 1, 1, buffers=1)
    needs = least_budgets(request)
    for tier in MemoryTier:
        if (short := needs.of(tier) - request.tiers.of(tier)) > 0:
            return NoPolicyFits(
                f"the {tier} has {request.tiers.of(tier)} bytes, {short} too few: one sequence of "
                f"{case.work.prompt + case.work.output} tokens needs {needs.of(tier)} there. What would fit: "
                f"deviceBytes {needs.device_bytes}, hostBytes {needs.host_bytes}, diskBytes {needs.disk_bytes}"
                f"{_smaller(request)}",
                tier,
                short,
            )
    return NoPolicyFits("no policy fits, though each tier alone would do: give the device more", MemoryTier.DEVICE, 1)


def least_budgets(request: PolicySearch) -> Budgets:
    """What one sequence at a time takes with as little as possible on the device. On the host: what passes through it
    from the disk.
    """
    case = Case(request.sizes, request.machine, request.formats, request.work, 1, 1, buffers=1)
    parts = memory(case)[MemoryTier.DEVICE]
    off_device = MemoryTier.DEVICE not in request.supports.kv
    beside = sum(math.ceil(part.constant) for name, part in parts.items() if name not in ("weights", "ring"))
    beside -= math.ceil(parts["kv"].constant) if off_device else 0
    least = residents(case.sizes, case.buffers)[0]
    host = 0 if request.machine.one_memory else least.ring
    return Budgets(beside + least.device_bytes, host, case.sizes.file)


def _smaller(request: PolicySearch) -> str:
    if request.formats.weights == "int4":
        return ""
    smaller = replace(request, formats=replace(request.formats, weights="int4"))
    return f"; with weights int4 deviceBytes {least_budgets(smaller).device_bytes}"

"""The stages of a pipeline that offload: how many batches they have in flight, and what they are together. Pure.

Each stage reads its weights once for every batch that passes it. One batch of all rows leaves every stage but one
without work, whose rings fill meanwhile; parts of it, which follow each other, are read for several times. On N hosts
of one stage each a token of all rows takes

    N max(read, compute of all rows)     one batch at a time
    N max(read, compute of 1/N of them)  N parts in flight

so that parts gain nothing while a stage reads for longer than it computes. Stages of one host, which share its cores
and its disk, never gain by them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from weft.domain.runner import OffloadState
from weft_runner.offload.figures import OffloadFigures
from weft_runner.offload.plan import OffloadPlan, PassTime


@dataclass(frozen=True, slots=True)
class StageState:
    """State of one stage. `frames`: KV pages that it has in memory; `layers_done`: of all its steps."""

    state: OffloadState
    figures: OffloadFigures
    frames: int
    layers_done: int = 0


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """Seconds from one block's end to the next, with as many blocks in flight as there are hosts.

    The blocks of a host take turns, and the slowest host sets the pace of each: `block_s`, `relaxed_s` by its stages'
    linear programs, `bound_s` by its disk bytes or its FLOPs alone. `token_1_s`: a token of one request alone passes
    all.
    """

    block_s: float
    relaxed_s: float
    bound_s: float
    tokens_per_s: float
    token_1_s: float


def pipeline_time(plans: Sequence[OffloadPlan], hosts: int) -> PipelineTime:
    """`plans`: of the stages in their order, as many on each of the hosts."""
    each = len(plans) // hosts
    of_hosts = [plans[first : first + each] for first in range(0, len(plans), each)]
    return PipelineTime(
        max(sum(plan.predicted.block_s for plan in own) for own in of_hosts),
        max(sum(plan.relaxed_s for plan in own) for own in of_hosts),
        max(sum(plan.predicted.bound_s for plan in own) for own in of_hosts),
        min(1 / sum(1 / plan.predicted.tokens_per_s for plan in own) for own in of_hosts),
        sum(plan.predicted.token_1_s for plan in plans),
    )


def batches_in_flight(hosts: int, stage: PassTime | None) -> int:
    """`hosts`: with cores and disks of their own. `stage`: one stage's pass of all rows; None: it is not known."""
    return hosts if stage is not None and stage.compute_s > stage.disk_read_s else 1


def unreceived(hosts: int) -> int:
    """Results of a stage that may wait for the next one: with the one that it computes, as many as are in flight."""
    return hosts - 1


def state_of_all(stages: Sequence[StageState]) -> OffloadState:
    """Add up a token's times, which passes all stages. The disk is that of the stage where one request waits most."""
    states = [stage.state for stage in stages]
    if len(states) == 1:
        return states[0]
    slowest = max(states, key=lambda state: (state.alone_ms, state.measured_ms))
    resident = sum(stage.state.resident_share * stage.figures.weight_bytes for stage in stages)
    return OffloadState(
        resident / max(1, sum(stage.figures.weight_bytes for stage in stages)),
        slowest.disk_bytes_per_s,
        *(_sum([getattr(state, name) for state in states]) for name in ("predicted_ms", "measured_ms", "alone_ms")),
        disk_bound=slowest.disk_bound,
    )


def _sum(parts: Sequence[float]) -> float:
    """Return the sum, 0 as long as one of the parts is not known."""
    return sum(parts) if all(parts) else 0.0

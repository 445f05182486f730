"""The model that an executor is made of, and the parts of it that ranks have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft.domain.ids import RunnerId
from weft.domain.model.config import ModelSpec
from weft_runner.model.checkpoint import Files, LoadProgress
from weft_runner.model.partition import Partition, RankGrid, check_divisible
from weft_runner.offload.machine import MachineRates
from weft_runner.offload.plan import OffloadPlan
from weft_runner.parallel.worker_group import GatherRanks
from weft_runner.settings import RunnerSettings


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """What a runner found at its start: each rank's machine and plan; no plans: as many weights stay as fit."""

    machines: Mapping[int, MachineRates]
    plans: Mapping[int, OffloadPlan]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The model to compute, and how many threads may (of each rank). `stopping`: asked while weights load.

    `gather`: where the ranks of a split model are on other hosts. `runner`: who it is, for others. `policy`: by which
    it offloads (None: as many weights stay as fit, or as a plan by hand says). `progress`: of this process's weights.
    """

    spec: ModelSpec
    files: Files
    threads: int
    stopping: Callable[[], bool] = lambda: False
    gather: GatherRanks | None = None
    runner: RunnerId | None = None
    policy: OffloadPolicy | None = None
    progress: LoadProgress | None = None


def parts_of(settings: RunnerSettings, spec: ModelSpec, *, even_heads: bool = False) -> list[Partition]:
    """Split a model over the runner's ranks, in their order. Raises ExecutorUnavailable."""
    grid = RankGrid(settings.pipeline_parallel, settings.tensor_parallel)
    check_divisible(spec, grid.tensor, even_heads=even_heads)
    return [grid.part_of(spec, rank) for rank in range(grid.size)]

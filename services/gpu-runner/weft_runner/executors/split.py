"""Models that are split over ranks, whatever computes: the ranks meet, and exchange tensors, through torch's groups."""

import logging
from collections.abc import Callable

from weft.telemetry.logs import kv
from weft_runner.executors.source import ModelSource
from weft_runner.model.cuda.device import find_gpu
from weft_runner.model.executor import Executor
from weft_runner.model.operator_threads import MAX_OPERATOR_THREADS, set_operator_threads
from weft_runner.model.partition import RankGrid
from weft_runner.parallel.commands import RankStart
from weft_runner.parallel.executor import TensorParallelExecutor
from weft_runner.parallel.pipeline import OffloadedPipeline, PipelineParallelExecutor
from weft_runner.parallel.process_group import TorchRanks
from weft_runner.parallel.worker_group import OFFLOADED_PATIENCE_S, PATIENCE_S, launch_ranks
from weft_runner.settings import RunnerSettings

log = logging.getLogger(__name__)


def split_executor(settings: RunnerSettings, base: ModelSource, make_own: Callable[[TorchRanks], Executor]) -> Executor:
    """Start the other ranks, and make rank 0 beside them. Raises ExecutorLost, StoppedAtStart, what a rank raises."""
    set_operator_threads(min(base.threads, MAX_OPERATOR_THREADS))
    spec, grid = base.spec, RankGrid(settings.pipeline_parallel, settings.tensor_parallel)
    files = {name: path.absolute() for name, path in base.files.items()}
    device = find_gpu().device.type if settings.executor == "cuda" else "cpu"
    gather = base.gather if settings.hosts > 1 else None
    patience_s = OFFLOADED_PATIENCE_S if settings.offload.device_bytes else PATIENCE_S
    start = RankStart(
        settings=settings, spec=spec, files=files, threads=base.threads, device=device, runner=base.runner,
        policy=base.policy, grid=grid, patience_s=patience_s,
    )  # fmt: skip
    ranks = launch_ranks(start, make_own, base.stopping, gather=gather)
    if settings.offload.device_bytes:
        executor = OffloadedPipeline(spec, ranks, settings.hosts)
    else:
        executor = PipelineParallelExecutor(spec, ranks) if grid.stages > 1 else TensorParallelExecutor(spec, ranks)
    layers = [len(grid.part_of(spec, rank).layers) for rank in range(grid.size)]
    log.info("the model is split", extra=kv(layers=layers, others=executor.others.pids))
    return executor

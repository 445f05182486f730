"""The engine on the device, without wire and gateway: the runner's own objects round a model made at random."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from weft_bench.cpu_shapes import RANK
from weft_runner.core import BatchLimits, PoolLimits, Runner
from weft_runner.model import Executor, Partition
from weft_runner.model.cuda.adapters import layout_of
from weft_runner.model.cuda.cuda_graphs import MAX_GRAPH_TOKENS
from weft_runner.model.cuda.executor import CudaExecutor
from weft_runner.model.cuda.executor import Sizes as ExecutorSizes
from weft_runner.shell.adapter_pool import AdapterPool
from weft_runner.shell.engine import Engine, Output, Posted
from weft_stage.cpu_models import adapter
from weft_stage.gpu_device import Gpu
from weft_stage.gpu_models import Numbers, random_weights, spec_of
from weft_stage.gpu_placed import pages_needed
from weft_stage.playing import Folders, Player
from weft_stage.shapes import Shape

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an engine is built for. `context`: tokens of the longest sequence; `batch_tokens`: of an iteration.

    `waiting`: how many adapters at most wait for a slot at a time; None: one for each row.
    """

    rows: int
    slots: int
    context: int
    batch_tokens: int
    prefills: int = 1
    waiting: int | None = None


class DeviceSubject(Player):
    """One engine under measurement, from enter to exit; adapters come from `adapters`, files of `folder`."""

    def __init__(self, gpu: Gpu, name: str, shape: Shape, sizes: Sizes, folder: Path) -> None:
        self.adapters, self.shape = Folders(), shape
        self._gpu, self._name, self._folder = gpu, name, folder
        executor = executor_of(gpu, shape, sizes)
        limits = _limits(shape, sizes, executor.page_bytes)
        torch.set_num_threads(executor.torch_threads)  # as the engine's own thread does
        super().__init__(lambda told: engine_of(executor, limits, self.adapters, told))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close()
        self._gpu.sync()

    def file(self, number: int) -> Path:
        """Return the folder of one of the adapters on disk, written if need be."""
        return adapter(self._folder, self._name, self.shape, number, RANK)

    def alias(self, digest: str, number: int) -> str:
        """Add one more adapter, with the files of that number. Returns its digest."""
        self.adapters.paths[digest] = self.file(number)
        return digest


def engine_of(
    executor: Executor, limits: PoolLimits, source: Folders, told: Callable[[Output], None], max_rank: int = RANK
) -> Engine:
    """Make an engine as `engine_factory.build_engine` does, of parts that are there."""

    def make_adapters(post: Callable[[Posted], None]) -> AdapterPool:
        return AdapterPool(executor.adapters, max_rank, source, post)

    return Engine(Runner(limits), executor, make_adapters, told)


def executor_of(gpu: Gpu, shape: Shape, sizes: Sizes) -> CudaExecutor:
    """Make an executor with graphs, and a model made at random on the device."""
    spec = spec_of(shape, sizes.context)
    weights = random_weights(spec, Numbers(gpu.device, gpu.dtype))
    gpu.sync()
    made = CudaExecutor(
        spec, weights,
        ExecutorSizes(
            _pages(shape, sizes), PAGE_TOKENS, sizes.slots, RANK, sizes.rows, sizes.context, graphs=True,
            tokens=min(sizes.batch_tokens, MAX_GRAPH_TOKENS),  # of larger ones kernels are compiled as they come
        ),
    )  # fmt: skip
    gpu.sync()
    return made


def _limits(shape: Shape, sizes: Sizes, page_bytes: int) -> PoolLimits:
    return PoolLimits(
        total_pages=_pages(shape, sizes), page_tokens=PAGE_TOKENS, max_sequences=sizes.rows, max_adapters=sizes.slots,
        max_context_tokens=sizes.context, vocab_size=shape.vocab,
        batch=BatchLimits(sizes.prefills, sizes.batch_tokens), page_bytes=page_bytes, keep_copies=True,
    )  # fmt: skip


def _pages(shape: Shape, sizes: Sizes) -> int:
    """Return the KV pages for every row at its longest, every slot's adapter, and those that wait for one."""
    page_numbers = shape.layers * 2 * shape.kv * PAGE_TOKENS
    each = pages_needed(layout_of(Partition(spec_of(shape, sizes.context)), RANK), RANK, page_numbers)
    waiting = sizes.rows if sizes.waiting is None else sizes.waiting
    return sizes.rows * (-(-sizes.context // PAGE_TOKENS) + 1) + (sizes.slots + waiting) * each

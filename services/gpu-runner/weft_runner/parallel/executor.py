"""One executor of several ranks: rank 0 in the runner's process, the others in its children (S-LoRA, section 6).

Every command goes to all ranks in one order, so that they meet in the same operations of their group; rank 0 alone
samples. Nothing is tried again: after a step that failed on one rank the others may wait somewhere else in the model.
"""

from collections.abc import Callable, Sequence

from weft.domain.model.spec import ModelSpec
from weft_runner.core.sampling import SampledToken
from weft_runner.errors import ExecutorLost
from weft_runner.model.executor import Capabilities, LayerDone, Rows
from weft_runner.model.sampling import SamplingArgs
from weft_runner.model.step import StepInput
from weft_runner.parallel.adapters import ShardedAdapterStore
from weft_runner.parallel.commands import Layers
from weft_runner.parallel.worker_group import LaunchedRanks


class MultiProcessExecutor:
    """What executors of several ranks have in common: all but how a step runs. Any failure of a rank ends them all."""

    def __init__(self, model: ModelSpec, ranks: LaunchedRanks, adapters: ShardedAdapterStore) -> None:
        self._local, self._ending = ranks.local, ranks.ending
        self.spec, self.adapters = model, adapters
        self.numerics_class, self.torch_threads = ranks.local.numerics_class, ranks.local.torch_threads
        self.page_bytes = ranks.local.page_bytes  # on rank 0
        self.kv_memory = None  # pages are not copied to host memory and back
        # Of rank 0, for streams to other runners; the other ranks have their own.
        self.kv_shard, self.kv_addresses = ranks.local.kv_memory, ranks.kv_addresses
        self.kv_grid = f"{ranks.ranks.grid.stages}x{ranks.ranks.grid.tensor}"
        self.others = ranks.workers

    @property
    def can(self) -> Capabilities:
        return Capabilities(ranks=self, packs=self._local.can.packs, close=self.close)

    def watch(self, on_lost: Callable[[ExecutorLost], None]) -> None:
        """Call `on_lost`, from any thread, for a rank that is lost between steps."""
        self.others.watch(on_lost)

    def sample(self, logits: Rows, draws: Sequence[SamplingArgs]) -> list[SampledToken | None]:
        return self._local.sample(logits, draws)

    def clear_pages(self, pages: list[int]) -> None:
        if pages:
            self.others.broadcast("clear_pages", pages)
            self._local.clear_pages(pages)

    def allocate_adapter_pages(self, pages: list[int]) -> None:
        if pages:
            self.others.broadcast("allocate_pages", pages)
            self._local.allocate_adapter_pages(pages)
            self.adapters.on_pages_allocated()

    def close(self) -> None:
        """End the other ranks' processes, and wait for that. Not while a step runs."""
        self._ending.close()


class TensorParallelExecutor(MultiProcessExecutor):
    """An Executor where every rank has a part of each layer (`model.tensor_parallel`)."""

    def __init__(self, model: ModelSpec, ranks: LaunchedRanks) -> None:
        super().__init__(model, ranks, ShardedAdapterStore(ranks.local.adapters, ranks.workers, model))
        self._group = ranks.ranks.tensor
        self._sent: StepInput | None = None  # the workers have it too

    @property
    def sent_bytes(self) -> int:
        """The bytes sent by rank 0 to the other ranks for arithmetic (`model.tensor_parallel`)."""
        return self._group.sent_bytes

    def run(
        self, step: StepInput, *, first: int = 0, last: int | None = None, hidden: Rows | None = None,
        layer_done: LayerDone | None = None,
    ) -> Rows:  # fmt: skip
        """Run layers of a step on all ranks; `layer_done` speaks for rank 0. Raises ExecutorLost."""
        last = self.spec.layers if last is None else last
        self._broadcast_step(step, Layers(first, last, hidden is not None))
        try:
            hidden = None if hidden is None else self._group.broadcast(hidden)
            return self._local.run(step, first=first, last=last, hidden=hidden, layer_done=layer_done)
        except Exception as error:
            raise ExecutorLost(f"a step of {self._group.size} ranks failed on rank 0: {error}") from error

    def _broadcast_step(self, step: StepInput, layers: Layers) -> None:
        """Send a step. A step known to the workers is sent as its tokens and positions."""
        if step is self._sent:
            self.others.broadcast("again", step.tokens, [row.position for row in step.rows], layers)
        else:
            self.others.broadcast("run", step, layers)
            self._sent = step

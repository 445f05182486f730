"""One executor of several ranks: rank 0 in the runner's process, the others in its children (S-LoRA, section 6).

Every command goes to all ranks in one order, so that they meet in the same operations of their group; rank 0 alone
samples. Nothing is tried again: after a step that failed on one rank the others may wait somewhere else in the model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weft.domain.model.config import ModelSpec
from weft_runner.core.choice import Choice
from weft_runner.errors import ExecutorLost
from weft_runner.model.executor import Executor, LayerDone
from weft_runner.model.sampling import Draw
from weft_runner.model.step import Step
from weft_runner.model.tensor_parallel import Group
from weft_runner.parallel.adapters import ShardedStore
from weft_runner.parallel.commands import Kind, Layers, write_again, write_ints, write_run
from weft_runner.parallel.worker_group import PATIENCE_S, Ranks, start_ranks


class SplitExecutor:
    """What executors of several ranks have in common: all but how a step runs. Any failure of a rank ends them all."""

    def __init__(self, whole: ModelSpec, ranks: Ranks, adapters: ShardedStore) -> None:
        self._whole, self._own, self._followers = whole, ranks.own, ranks.followers
        self._ending = ranks.ending
        self._adapters = adapters

    @property
    def spec(self) -> ModelSpec:
        return self._whole

    @property
    def numerics_class(self) -> str:
        return self._own.numerics_class

    @property
    def torch_threads(self) -> int:
        return self._own.torch_threads

    @property
    def adapters(self) -> ShardedStore:
        return self._adapters

    @property
    def page_bytes(self) -> int:
        """On rank 0."""
        return self._own.page_bytes

    @property
    def followers(self) -> tuple[int, ...]:
        """Their processes."""
        return self._followers.pids

    def watch(self, on_lost: Callable[[ExecutorLost], None]) -> None:
        """`on_lost` hears of a rank that is lost between steps, from any thread."""
        self._followers.watch(on_lost)

    def choose(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[Choice | None]:
        return self._own.choose(logits, draws)

    def clear_pages(self, pages: list[int]) -> None:
        if pages:
            self._followers.tell(Kind.CLEAR_PAGES, write_ints(pages))
            self._own.clear_pages(pages)

    def lend_pages(self, pages: list[int]) -> None:
        if pages:
            self._followers.tell(Kind.LEND_PAGES, write_ints(pages))
            self._own.lend_pages(pages)
            self._adapters.lent()

    def close(self) -> None:
        """The other ranks' processes have ended when this returns. Not while a step runs."""
        self._ending.close()


class ShardedExecutor(SplitExecutor):
    """See `model.executor.Executor`: every rank has a part of each layer (`model.tensor_parallel`)."""

    def __init__(self, whole: ModelSpec, ranks: Ranks) -> None:
        super().__init__(whole, ranks, ShardedStore(ranks.own.adapters, ranks.followers))
        self._group: Group = ranks.group
        self._told: Step | None = None  # the followers have it too

    @property
    def sent_bytes(self) -> int:
        """By rank 0 to the others, for the arithmetic alone (`model.tensor_parallel`)."""
        return self._group.sent_bytes

    def run(
        self,
        step: Step,
        *,
        first: int = 0,
        last: int | None = None,
        hidden: torch.Tensor | None = None,
        layer_done: LayerDone | None = None,
    ) -> torch.Tensor:
        """See `model.executor.Executor.run`; `layer_done` speaks for rank 0. Raises ExecutorLost."""
        last = self._whole.layers if last is None else last
        self._tell_step(step, Layers(first, last, hidden is not None))
        try:
            hidden = None if hidden is None else self._group.broadcast(hidden)
            return self._own.run(step, first=first, last=last, hidden=hidden, layer_done=layer_done)
        except Exception as error:
            raise ExecutorLost(f"a step of {self._group.size} ranks failed on rank 0: {error}") from error

    def _tell_step(self, step: Step, layers: Layers) -> None:
        """One that they have is told by its tokens and positions alone."""
        if step is self._told:
            self._followers.tell(Kind.AGAIN, write_again(step, layers))
        else:
            self._followers.tell(Kind.RUN, write_run(step, layers))
            self._told = step


def start_sharded(
    whole: ModelSpec,
    size: int,
    settings: Mapping[str, Any],
    make_own: Callable[[Group], Executor],
    stopping: Callable[[], bool],
    patience_s: float = PATIENCE_S,
) -> ShardedExecutor:
    """See `start_ranks`."""
    return ShardedExecutor(whole, start_ranks(size, settings, make_own, stopping, patience_s))

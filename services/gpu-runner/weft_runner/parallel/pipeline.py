"""One executor of several stages: the first in the runner's process, the others in its children (ORCA, section 4.1).

A step is told to all stages at once, before any of them has computed anything of it; tensors follow from stage to stage
(`parallel.pipeline_channel`). While a stage works on one step the one before it works on the next: `depth` of them are in flight.
Each stage does what it is told in one order, steps and pages and adapters alike. So a page that changes hands, or a
slot that is emptied, while steps are in flight is changed on every stage after those steps and before the next.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.domain.model.config import ModelSpec
from weft_runner.core.choice import Choice
from weft_runner.errors import ExecutorLost
from weft_runner.model.executor import Executor, LayerDone
from weft_runner.model.sampling import Draw
from weft_runner.model.step import Step
from weft_runner.model.tensor_parallel import Group
from weft_runner.parallel.adapters import StagedStore
from weft_runner.parallel.commands import Kind, Layers, write_run
from weft_runner.parallel.executor import SplitExecutor
from weft_runner.parallel.pipeline_channel import Arrival, Line
from weft_runner.parallel.worker_group import PATIENCE_S, Ranks, start_ranks

Choose = Callable[[torch.Tensor, Sequence[Draw]], list[Choice | None]]


@dataclass(frozen=True, slots=True, eq=False)
class StagedFlight:
    """A step on its way through the stages. `logits`: None where no row samples, and nothing comes back."""

    logits: Arrival | None
    draws: Sequence[Draw]
    choose: Choose

    def choices(self) -> list[Choice | None]:
        """See `model.executor.Flight`. Raises ExecutorLost."""
        return [] if self.logits is None else self.choose(_landed(self.logits), self.draws)


class PipelinedExecutor(SplitExecutor):
    """See `model.executor.Pipelined`."""

    def __init__(self, whole: ModelSpec, ranks: Ranks) -> None:
        super().__init__(whole, ranks, StagedStore(ranks.own.adapters, ranks.followers, ranks.own.page_bytes))
        self._line = Line(ranks.group, whole)

    @property
    def depth(self) -> int:
        return self._line.stages

    @property
    def sent_bytes(self) -> int:
        """Of tensors by stage 0 (`model.partition`)."""
        return self._line.sent_bytes

    def launch(self, step: Step, draws: Sequence[Draw]) -> StagedFlight:
        """Returns once this stage's part is done, or launched. Raises ExecutorLost."""
        return StagedFlight(self._begin(step), draws, self._own.choose)

    def run(
        self,
        step: Step,
        *,
        first: int = 0,
        last: int | None = None,
        hidden: torch.Tensor | None = None,
        layer_done: LayerDone | None = None,
    ) -> torch.Tensor:
        """See `model.executor.Executor.run`; whole steps only, one at a time. Raises ExecutorLost."""
        assert (first, last or self._whole.layers, hidden) == (0, self._whole.layers, None), (
            "a stage runs its own layers"
        )
        assert layer_done is None, "no stage hears of the others' layers"
        logits = self._begin(step)
        return torch.empty(0, self._whole.vocab_size) if logits is None else _landed(logits)

    def close(self) -> None:
        super().close()
        self._line.close()

    def _begin(self, step: Step) -> Arrival | None:
        self._followers.tell(Kind.RUN, write_run(step, Layers(0, self._whole.layers, hidden=False)))
        try:
            self._line.on(self._own.run(step))
            rows = sum(row.samples for row in step.rows)
            return self._line.logits(rows) if rows else None
        except Exception as error:
            raise ExecutorLost(f"a step of {self.depth} stages failed on stage 0: {error}") from error


def _landed(logits: Arrival) -> torch.Tensor:
    try:
        return logits.wait()
    except RuntimeError as error:
        raise ExecutorLost(f"the last stage's logits did not come: {error}") from error


def start_pipelined(
    whole: ModelSpec,
    stages: int,
    settings: Mapping[str, Any],
    make_own: Callable[[Group], Executor],
    stopping: Callable[[], bool],
    patience_s: float = PATIENCE_S,
) -> PipelinedExecutor:
    """See `start_ranks`."""
    return PipelinedExecutor(whole, start_ranks(stages, settings, make_own, stopping, patience_s, in_line=True))

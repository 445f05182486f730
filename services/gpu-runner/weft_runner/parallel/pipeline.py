"""One executor of several stages, each of one rank or several: rank 0 in the runner's process (ORCA, section 4.1).

Rank 0 sends a step's command to all stages at once, before any stage has computed anything of it; tensors follow from
stage to stage (`parallel.pipeline_channel`). While one stage computes a step, the stage before it computes the next:
`depth` steps are in flight. Each stage executes its commands in one order: steps, pages, adapters. So a page
that changes its owner, or a slot that is emptied, while steps are in flight is changed on every stage after those steps
and before the next.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from weft.domain.model.spec import ModelSpec
from weft_runner.core.sampling import SampledToken
from weft_runner.errors import ExecutorLost
from weft_runner.model.executor import Capabilities, LayerDone, Rows
from weft_runner.model.pooling import row_width
from weft_runner.model.sampling import SamplingArgs
from weft_runner.model.step import StepInput
from weft_runner.offload.stages import StageState, batches_in_flight, unreceived
from weft_runner.parallel.adapters import PipelineAdapterStore
from weft_runner.parallel.commands import Layers
from weft_runner.parallel.executor import MultiProcessExecutor
from weft_runner.parallel.pipeline_channel import PendingTensor, PipelineChannel
from weft_runner.parallel.worker_group import LaunchedRanks

Sample = Callable[[Rows, Sequence[SamplingArgs]], list[SampledToken | None]]


@dataclass(frozen=True, slots=True, eq=False)
class PipelineStepHandle:
    """A step on its way through the stages. `logits`: None if no row samples, and nothing comes back."""

    logits: PendingTensor | None
    draws: Sequence[SamplingArgs]
    sample: Sample

    def result(self) -> list[SampledToken | None]:
        """Wait for the step's tokens. Raises ExecutorLost."""
        return [] if self.logits is None else self.sample(_landed(self.logits), self.draws)


class PipelineParallelExecutor(MultiProcessExecutor):
    """A Pipelined executor whose stages are ranks or groups of them."""

    def __init__(self, model: ModelSpec, ranks: LaunchedRanks, n_kept: int | None = None) -> None:
        """`n_kept`: see `PipelineChannel`."""
        super().__init__(
            model, ranks, PipelineAdapterStore(ranks.local.adapters, ranks.workers, model, ranks.local.page_bytes)
        )
        self._ranks = ranks.ranks
        self._channel = PipelineChannel(ranks.ranks.stages, model, n_kept)

    @property
    def can(self) -> Capabilities:
        return super().can._replace(pipelined=self)

    @property
    def depth(self) -> int:
        return self._channel.stages

    def depth_for(self, tokens: Callable[[], int]) -> int:
        del tokens  # weights in memory are read again for nothing
        return self.depth

    @property
    def sent_bytes(self) -> int:
        """The bytes of tensors that rank 0 sent (`model.partition`, and `model.tensor_parallel` inside its stage)."""
        return self._ranks.sent_bytes

    def launch(self, step: StepInput, draws: Sequence[SamplingArgs]) -> PipelineStepHandle:
        """Launch a step; returns once this stage's part is done, or launched. Raises ExecutorLost."""
        return PipelineStepHandle(self._begin(step), draws, self._local.sample)

    def run(
        self, step: StepInput, *, first: int = 0, last: int | None = None, hidden: Rows | None = None,
        layer_done: LayerDone | None = None,
    ) -> Rows:  # fmt: skip
        """Run a whole step, one at a time. Raises ExecutorLost."""
        assert (first, last or self.spec.layers, hidden) == (0, self.spec.layers, None), "a stage runs its own layers"
        assert layer_done is None, "no stage hears of the others' layers"
        logits = self._begin(step)
        return np.empty((0, self.spec.vocab_size), np.float32) if logits is None else _landed(logits)

    def close(self) -> None:
        super().close()
        self._channel.close()

    def _begin(self, step: StepInput) -> PendingTensor | None:
        self.others.broadcast("run", step, Layers(0, self.spec.layers, hidden=False))
        try:
            self._channel.send_next(self._local.run(step))
            rows = sum(len(row.wanted) for row in step.rows)
            return self._channel.logits(rows, row_width(step, self.spec)) if rows else None
        except Exception as error:
            raise ExecutorLost(f"a step of {self._channel.stages} stages failed on stage 0: {error}") from error


class OffloadedPipeline(PipelineParallelExecutor):
    """Stages of a pipeline with weights streamed from disk."""

    def __init__(self, model: ModelSpec, ranks: LaunchedRanks, hosts: int) -> None:
        super().__init__(model, ranks, unreceived(hosts))
        stage = ranks.local.can.stage
        assert stage is not None, ranks.local
        self._stage, self._hosts = stage, hosts

    @property
    def can(self) -> Capabilities:
        return super().can._replace(stages=self.stages)

    @property
    def depth(self) -> int:
        return self._hosts

    def depth_for(self, tokens: Callable[[], int]) -> int:
        """Choose the depth by this stage's predicted pass, for all stages cost nearly the same (`offload.stages`)."""
        return 1 if self._hosts == 1 else batches_in_flight(self._hosts, self._stage.predicted(tokens()))

    def stages(self) -> list[StageState]:
        """Give the state of each stage, in their order; of the others as it was lately."""
        return [self._stage.stage_state, *(state for _, state in sorted(self.others.stages.items()))]


def _landed(logits: PendingTensor) -> Rows:
    try:
        return logits.wait()
    except RuntimeError as error:
        raise ExecutorLost(f"the last stage's logits did not come: {error}") from error

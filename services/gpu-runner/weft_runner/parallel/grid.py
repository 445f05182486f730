"""Places of ranks: stages of a pipeline, each of several tensor ranks (ORCA, section 4.1: inter- and intra-layer).

Ranks are numbered stage by stage. Those of a stage have parts of the same layers and meet in every one of them. A rank
passes its hidden rows to the rank of its place in the next stage: hidden rows are whole, and the same, on all ranks of
a stage. Logits come from tensor rank 0 of the last stage and go to rank 0.
"""

from dataclasses import dataclass, replace

from weft.domain.model.config import ModelSpec
from weft_runner.model.partition import Partition, stage_of


@dataclass(frozen=True, slots=True)
class RankGrid:
    """`stages` x `tensor` ranks."""

    stages: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.stages * self.tensor

    def rank_of(self, stage: int, tensor_rank: int) -> int:
        return stage * self.tensor + tensor_rank

    def stage_of(self, rank: int) -> int:
        return rank // self.tensor

    def tensor_rank_of(self, rank: int) -> int:
        return rank % self.tensor

    def ranks_of_stage(self, stage: int) -> list[int]:
        return [self.rank_of(stage, tensor_rank) for tensor_rank in range(self.tensor)]

    def part_of(self, spec: ModelSpec, rank: int) -> Partition:
        """Give a rank its part of a model. Raises ExecutorUnavailable."""
        stage = stage_of(spec, self.stage_of(rank), self.stages)
        return replace(stage, rank=self.tensor_rank_of(rank), size=self.tensor)

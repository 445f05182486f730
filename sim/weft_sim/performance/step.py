"""An iteration as performance models see it, and what such a model is."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StepShape:
    """The batch of an iteration, in the amounts that decide its time.

    `prompt_tokens` are computed in this iteration, `prompt_pairs` is the sum over them of the tokens that each attends
    to, `context_tokens` the sum over decode rows of the tokens that each attends to, `adapters` the distinct adapters,
    `loads` those of them that are brought to a slot first, `passed_over` the waiting requests that find none.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    prompt_pairs: int = 0
    decode_rows: int = 0
    context_tokens: int = 0
    adapters: int = 0
    loads: int = 0
    passed_over: int = 0


class PerformanceModel(Protocol):
    def seconds(self, step: StepShape) -> float:
        """Return the seconds of an iteration on an instance of a model (all its tensor and pipeline ranks)."""
        ...

"""One iteration as an executor sees it: host integers, built once, read by every layer."""

from dataclasses import dataclass

from weft_kernels.plan import SegmentPlan


@dataclass(frozen=True, slots=True)
class StepRow:
    """Tokens [start, end) of the step belong to one sequence, at positions [position, position + end - start).

    `pages` hold the sequence's keys and values in token order, the new ones included; `samples`: logits of the last
    token are wanted.
    """

    start: int
    end: int
    position: int
    pages: tuple[int, ...]
    samples: bool

    @property
    def context(self) -> int:
        """Tokens in KV after this step."""
        return self.position + self.end - self.start


@dataclass(frozen=True, slots=True)
class Step:
    """Flattened tokens (ORCA, section 4.3: all but attention runs on [sum L, H]) and the rows they belong to."""

    tokens: tuple[int, ...]
    rows: tuple[StepRow, ...]
    plan: SegmentPlan


def check_step(step: Step, page_tokens: int) -> None:
    """Rows cover the tokens without a hole and have the pages that their context needs."""
    start = 0
    for row in step.rows:
        assert row.start == start < row.end, row
        assert len(row.pages) * page_tokens >= row.context, row
        start = row.end
    assert start == len(step.tokens) == step.plan.rows

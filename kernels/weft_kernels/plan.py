"""The plan of which rows of a step use which adapter: built once a step from host integers, read by every LoRA site of
every layer.

Punica (arXiv 2310.18547, section 4): rows of one adapter are consecutive, and `s` holds the segment boundaries of
`Y[s[i]:s[i+1]] += X[s[i]:s[i+1]] @ W[i]`. Rows without an adapter belong to no segment, so segments may leave holes.
Pure Python: building a plan needs no tensor library.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, end) use the adapter in `slot`. `rank` is the largest true rank of that adapter at any site.

    A site's own rank and scale travel with its weights (`lora.LoraSite`), because PEFT's `rank_pattern` and
    `alpha_pattern` may differ from module to module; `rank` bounds the width that a launch has to provide for.
    """

    start: int
    end: int
    slot: int
    rank: int


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """The segments of one step, ordered by row, disjoint, none empty. `rows` is the step's number of tokens."""

    rows: int
    segments: tuple[Segment, ...]
    max_rank: int = field(init=False)

    def __post_init__(self) -> None:
        check_plan(self)
        object.__setattr__(self, "max_rank", max((s.rank for s in self.segments), default=0))


def plan_rows(row_slots: Iterable[int | None], ranks: dict[int, int]) -> SegmentPlan:
    """Plan from one slot per row (None: no adapter). Adjacent rows of one slot share a segment.

    A slot that comes back after another one gets a second segment: correct, but the caller's order was not Punica's.
    """
    segments: list[Segment] = []
    rows = 0
    for row, slot in enumerate(row_slots):
        rows = row + 1
        if slot is None:
            continue
        if segments and segments[-1].slot == slot and segments[-1].end == row:
            segments[-1] = Segment(segments[-1].start, row + 1, slot, ranks[slot])
        else:
            segments.append(Segment(row, row + 1, slot, ranks[slot]))
    return SegmentPlan(rows, tuple(segments))


def check_plan(plan: SegmentPlan) -> None:
    """Check that segments are ordered, disjoint, non-empty and inside the step."""
    row = 0
    for segment in plan.segments:
        assert row <= segment.start < segment.end <= plan.rows, (segment, plan.rows)
        assert segment.slot >= 0, segment
        assert segment.rank > 0, segment
        row = segment.end

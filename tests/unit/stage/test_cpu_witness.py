"""Rows that run with another adapter than they ask for are found out."""

import pytest

from weft_kernels.plan import Segment, SegmentPlan
from weft_stage.cpu_witness import slots_of
from weft_stage.errors import WrongAdapter


def test_each_row_has_the_slot_of_its_tokens() -> None:
    plan = SegmentPlan(7, (Segment(0, 4, 2, 16), Segment(5, 7, 0, 16)))
    assert slots_of(plan, [3, 1, 1, 2]) == [2, 2, -1, 0]


@pytest.mark.parametrize("end", [1, 3])
def test_a_row_whose_tokens_use_two_slots_is_found_out(end: int) -> None:
    plan = SegmentPlan(4, (Segment(0, end, 0, 16), Segment(end, 4, 1, 16)))
    with pytest.raises(WrongAdapter, match="uses the slots"):
        slots_of(plan, [2, 2])

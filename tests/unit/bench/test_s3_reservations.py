"""`weft bench s3 --part reservations`: what a policy costs, and what is compared."""

import pytest

from weft.domain.prediction import Prediction
from weft_bench.s3_lengths import Answered
from weft_bench.s3_reservations import Cell, cells_of, outcome_of

DRAWN = [Answered(16, 20 + 10 * (i % 9), Prediction("", 60, 80, "", 20, 120)) for i in range(60)]


@pytest.mark.slow
def test_a_cell_shows_what_its_policy_costs() -> None:
    arrivals = dict(cells_of("LMSYS", DRAWN))["paged"].arrivals
    found = {policy: outcome_of(Cell(policy, 0, 40, arrivals)) for policy in ("max", "calibrated", "paged", "pooled")}
    assert found["max"].sequences < found["calibrated"].sequences < found["pooled"].sequences
    assert found["max"].overran == found["max"].preempted == 0.0
    assert found["calibrated"].overran > 0.0, "two of nine answers are longer than the p90 that they have"
    assert found["paged"].preempted > found["pooled"].preempted
    assert found["paged"].recomputed > found["max"].recomputed == pytest.approx(0.0, abs=0.02)

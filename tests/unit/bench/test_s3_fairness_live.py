"""`weft bench s3 --part fairness-live`: who sends what when, and what it is compared with."""

from itertools import pairwise

import pytest

from weft.domain.prediction import Prediction
from weft_bench.fidelity_costs import Model
from weft_bench.fidelity_engine import EngineCosts
from weft_bench.s3_fairness_live import FLOOD, LATER_S, LOAD, VICTIM, Cell, cells_of, requests_of, simulated
from weft_bench.s3_lengths import Answered
from weft_sim.executor_model import StepTimes
from weft_sim.simulate import PoolDescription

SERVED = [Answered(8, tokens, Prediction("", tokens, tokens, "", tokens, tokens)) for tokens in (4, 12, 20)]
RATE, SEED = 20.0, 0


def test_every_flooded_cell_comes_after_the_one_it_is_compared_with() -> None:
    cells = list(cells_of(60, 16))
    assert all(cell.alone in cells[: cells.index(cell)] for cell in cells if cell.flooded)
    assert [cell.rows for cell in cells if not cell.flooded] == [8, 4, 8]
    assert len({cell.name for cell in cells}) == len(cells)
    assert len(list(cells_of(5, 16))) == 5, "the unfair cell is compared with the same one as the fair one"


def test_a_victim_sends_the_same_alone_and_beside_a_flood_of_ten_times_its_share() -> None:
    flooded = Cell(4, 50, flooded=True, fair=True, all_rows=16)
    alone, beside = (list(requests_of(cell, SERVED, RATE, SEED)) for cell in (flooded.alone, flooded))
    assert [one for one in beside if one.tenant == VICTIM] == alone
    assert all(before.at_s <= after.at_s for before, after in pairwise(beside))
    tenants = [one.tenant for one in beside]
    assert {name: tenants.count(name) for name in set(tenants) - {"flood"}} == dict.fromkeys(
        ("victim-1", "victim-2", "victim-3"), 50
    )
    span_s = alone[-1].at_s
    assert 0.5 < (len(alone) / (span_s - LATER_S)) / (RATE / 4 * LOAD) < 2.0
    assert 0.8 < (tenants.count("flood") / beside[-1].at_s) / (RATE / 4 * FLOOD) < 1.2


@pytest.mark.slow
def test_the_simulated_flood_does_not_reach_a_victim_where_the_pool_is_fair() -> None:
    engine = EngineCosts(StepTimes(10.0, 0.5, 0.2), 1e-3, 1e-5, 1e-3, 2, "cpu")
    model = Model(PoolDescription(adapters=8, cores=2, threads=2, one_host=True), engine)
    found = dict[bool, float]()
    for fair in (True, False):
        cell = Cell(2, 8, flooded=True, fair=fair, all_rows=4)
        seen = simulated(model, cell, list(requests_of(cell, SERVED, RATE, SEED)))
        assert len(seen) == 8
        found[fair] = max(one.ttft_ms for one in seen)
    assert found[True] * 5 < found[False]

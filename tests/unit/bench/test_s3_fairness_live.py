"""`weft bench s3 --part fairness-live`: what is simulated beside it."""

from dataclasses import replace

import pytest

from weft.domain.prediction import Prediction
from weft_bench.fidelity_costs import Model
from weft_bench.fidelity_engine import EngineCosts
from weft_bench.s3_fairness_live import VICTIM, Cell, requests_of, simulated
from weft_bench.s3_lengths import Answered
from weft_sim.executor_model import StepTimes
from weft_sim.simulate import PoolDescription

SERVED = [Answered(8, tokens, Prediction("", tokens, tokens, "", tokens, tokens)) for tokens in (4, 12, 20)]
RATE, SEED = 20.0, 0


@pytest.mark.slow
def test_the_simulated_flood_does_not_reach_a_victim_that_is_another_tenant() -> None:
    engine = EngineCosts(StepTimes(10.0, 0.5, 0.2), 1e-3, 1e-5, 1e-3, 2, "cpu")
    model = Model(PoolDescription(adapters=8, cores=2, threads=2, one_host=True), engine)
    cell = Cell(2, 8, flooded=True, all_rows=4)
    sent = list(requests_of(cell, SERVED, RATE, SEED))
    seen = simulated(model, cell, sent)
    assert len(seen) == 8
    its_own = simulated(model, cell, [replace(one, tenant=VICTIM) for one in sent])
    assert max(one.ttft_ms for one in seen) * 5 < max(one.ttft_ms for one in its_own)

"""`weft bench s3 --part penalty`: the simulator swaps as well."""

import random

from weft.domain.prediction import Prediction
from weft_bench.fidelity_costs import Model
from weft_bench.fidelity_engine import EngineCosts
from weft_bench.s3_lengths import Answered
from weft_bench.s3_penalty import Memory, described, streamed_s
from weft_bench.s3_queue import arrival
from weft_sim.executor_model import StepTimes
from weft_sim.simulate import PoolDescription


def test_the_simulated_runner_swaps_where_memory_is_short() -> None:
    engine = EngineCosts(StepTimes(10.0, 0.5, 0.2), 1e-3, 1e-5, 1e-3, 2, "cpu")
    model = Model(PoolDescription(max_sequences=16, adapters=1, cores=2, threads=2, one_host=True), engine)
    chance = random.Random(0)
    drawn = [
        Answered(32, tokens, Prediction("", tokens, tokens, "", tokens, tokens))
        for tokens in (chance.randint(100, 300) for _ in range(20))
    ]
    short = described(model, Memory(160, 360 * 1024, 0.2), "paged")
    replayed = short.replay([arrival(0.0, one, 0) for one in drawn])
    memory = replayed.counted.memory
    assert len(replayed.served) == 20
    assert 0.0 < memory["copy"] < memory["stalled"] < streamed_s(replayed.served)
    roomy = described(model, Memory(1_000, 360 * 1024, 0.2), "paged").replay([arrival(0.0, one, 0) for one in drawn])
    assert roomy.counted.memory["copy"] == roomy.counted.memory["stalled"] == 0.0

"""Step times and costs are found again in what they made."""

import random

import pytest

from weft.domain.machine import Kind
from weft_bench.fidelity_costs import Model, calibrated
from weft_bench.fidelity_engine import EngineCosts, StepSample, fit, least_errors
from weft_bench.fidelity_live import LiveRun
from weft_sim.executor_model import StepTimes
from weft_sim.hosts import Costs
from weft_sim.simulate import PoolDescription
from weft_sim.traces import TraceArrival
from weft_stage import sse


def test_coefficients_are_found_again_and_none_is_negative() -> None:
    rng = random.Random(1)
    features = [(1.0, rng.randint(1, 9), rng.random()) for _ in range(60)]
    seconds = [2.0 + 3.0 * rows for _, rows, _ in features]
    seconds[7] *= 5  # somebody else ran
    assert least_errors(features, seconds) == pytest.approx([2.0, 3.0, 0.0], abs=1e-3)
    assert min(least_errors([(1, i) for i in range(1, 9)], [1 / i for i in range(1, 9)])) == 0.0


def test_steps_are_fitted_by_a_curve_of_tokens_keys_and_adapters() -> None:
    curve = StepTimes(0.0, 0.0, 0.0, 0.001, 0.5, ((1, 10.0), (2, 10.0), (4, 10.0), (8, 14.0), (16, 20.0)))
    samples = [
        StepSample(rows, prompt, 30 * rows, adapters, curve.seconds(rows, prompt, 30 * rows, adapters), 0.001 * rows)
        for rows in range(1, 9)
        for prompt in (0, 5, 8)
        for adapters in (0, rows)
    ]
    found = fit(samples, threads=2)
    for one in samples:
        times = found.times.seconds(one.rows, one.prompt_tokens, one.keys, one.adapters)
        assert times == pytest.approx(one.model_s, rel=0.02)
    assert found.row_s == pytest.approx(0.001, rel=0.02)


def live_of(model: Model, arrivals: list[TraceArrival], *, alone: bool = False) -> LiveRun:
    """A live run as it would be if the model were the machine."""
    simulated = model.replay(arrivals)
    answers = tuple(
        sse.Streamed(
            one.at_s, one.at_s + told.ttft_ms / 1e3, one.at_s + told.e2e_ms / 1e3, told.tokens, one.prompt_tokens
        )
        for one, told in zip(arrivals, simulated.served, strict=True)
    )
    used = {**dict.fromkeys(("client", "runner", "depot", "controller"), 1e-4), **simulated.counted.cpu}
    used["engine"] = used["runner"]
    steps = float(sum(one.output_tokens for one in arrivals))
    wall_s = max(answer.end for answer in answers)
    after = dict.fromkeys(used, 0.0) if alone else None
    return LiveRun(answers, tuple(one.adapter for one in arrivals), used, steps, wall_s, after)


@pytest.mark.slow
def test_costs_that_explain_the_runs_give_their_times_again() -> None:
    engine = EngineCosts(StepTimes(4.0, 0.5, 0.05), 0.0002, 0.0, 0.0, threads=2, executor="")
    told = Costs(
        events={(Kind.GATEWAY, "RequestArrived"): 0.004, (Kind.SCHEDULER, "Submit"): 0.003},
        wake={Kind.PREDICTOR: 0.002},
        commit=0.001,
    )
    machine = Model(PoolDescription(cores=2, one_host=True, threads=2, adapters=2), engine, told, 0.001)
    single = live_of(machine, [TraceArrival(0.4 * i, 20, 1, i % 2) for i in range(6)], alone=True)
    answers = live_of(machine, [TraceArrival(1.0 * i, 20, 20, i % 2) for i in range(4)])
    busy = [live_of(machine, [TraceArrival(gap * i, 20, 20, i % 2) for i in range(30)]) for gap in (0.05, 0.03)]
    found = calibrated(Model(machine.pool, engine), single, answers, busy)
    for run in (single, answers, *busy):
        again = found.replay(run.trace()).served
        for one, seen in zip(again, run.answers, strict=True):
            assert one.e2e_ms == pytest.approx((seen.end - seen.start) * 1e3, rel=0.15)
    assert found.costs.events[Kind.GATEWAY, "OutcomeAck"] == 0.0  # nothing was used after the answers

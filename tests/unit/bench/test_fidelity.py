"""Step times and costs are found again in what they made."""

import random

import pytest

from weft.domain.machine import Kind
from weft_bench.fidelity_engine import EngineCosts, StepSample, fit, least_errors
from weft_bench.figures import fidelity
from weft_sim.executor_model import StepTimes
from weft_sim.hosts import MEASURED
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


def live_of(model: fidelity.Model, arrivals: list[TraceArrival]) -> fidelity.LiveRun:
    """A live run as it would be if the model were the machine."""
    simulated = model.replay(arrivals)
    answers = tuple(
        sse.Streamed(
            one.at_s, one.at_s + told.ttft_ms / 1e3, one.at_s + told.e2e_ms / 1e3, told.tokens, one.prompt_tokens
        )
        for one, told in zip(arrivals, simulated.served, strict=True)
    )
    cpu_s = {"client": 1e-4, **{kind.value: used_s for kind, used_s in simulated.cpu_s.items()}}
    return fidelity.LiveRun(
        answers, tuple(one.adapter for one in arrivals), cpu_s, max(answer.end for answer in answers)
    )


@pytest.mark.slow
def test_costs_that_explain_the_runs_give_their_times_again() -> None:
    engine = EngineCosts(StepTimes(4.0, 0.5, 0.05), 0.0002, 0.0, threads=2, executor="")
    told = fidelity.scaled(fidelity.scaled(MEASURED, Kind.GATEWAY, 2.0), Kind.SUPERVISOR, 0.5)
    machine = fidelity.Model(PoolDescription(cores=2, one_host=True, threads=2, adapters=2), engine, told, 0.001)
    runs = [
        live_of(machine, [TraceArrival(gap * i, 20, 20, i % 2) for i in range(count)])
        for count, gap in ((6, 0.5), (30, 0.05), (30, 0.03))
    ]
    found = fidelity.calibrated(fidelity.Model(machine.pool, engine), runs)
    for run in runs:
        again = found.replay(run.trace()).served
        for one, seen in zip(again, run.answers, strict=True):
            assert one.e2e_ms == pytest.approx((seen.end - seen.start) * 1e3, rel=0.15)
    arrived = Kind.GATEWAY, "RequestArrived"
    assert found.costs.events[arrived] == pytest.approx(told.events[arrived], rel=0.2)
    assert found.costs.commit == pytest.approx(told.commit, rel=0.2)

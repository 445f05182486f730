"""Step times and costs are found again in what they made; simulated beside live."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from harness.waiting import soon
from weft.domain.machine import Kind
from weft_bench import sse
from weft_bench.fidelity import SIZES, Case, calibration_lines, calibration_of, compared
from weft_bench.fidelity_costs import Model, calibrated
from weft_bench.fidelity_engine import EngineCosts, StepSample, fit, least_errors
from weft_bench.fidelity_live import LiveRun
from weft_bench.lines import Origin
from weft_sim.executor_model import StepTimes
from weft_sim.hosts import Costs
from weft_sim.report import Served
from weft_sim.simulate import PoolDescription
from weft_sim.traces import TraceArrival

from .test_path_shape import DONE, EVENTS, HEAD, answering, chunked

ORIGIN = Origin("c", "m", "v")


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


def test_the_same_quantiles_are_held_against_each_other() -> None:
    live = [[Served(10.0 * (1 + 0.1 * run), 2.0, 100.0, 9) for _ in range(4)] for run in range(3)]
    told = [[replace(one, ttft_ms=11.0, e2e_ms=150.0) for one in run] for run in live]
    found = {line.metric: line for line in compared(ORIGIN, "m, 50 %", live, told)}
    assert found["TTFT p50"].baseline == pytest.approx(11.0)
    assert found["TTFT p50, live spread"].value == pytest.approx(0.2 / 1.1)
    assert (found["TTFT p50, off by"].value, found["TTFT p50, off by"].met) == (pytest.approx(0.0), True)
    assert found["end to end p90"].ratio == pytest.approx(1.5)
    assert (found["end to end p90, off by"].target, found["end to end p90, off by"].met) == ("<= 0.1", False)


def test_a_calibration_is_found_again_in_its_lines() -> None:
    times = StepTimes(0.0, 0.0, 0.0, 0.001, 0.5, ((1, 10.0), (16, 20.0)))
    costs = Costs(
        events={(Kind.RUNNER, "Start"): 0.004},
        per_item={(Kind.GATEWAY, "Step"): 0.001},
        wake={Kind.PREDICTOR: 0.002},
        sends={"Step": 0.003},
        switch=0.005,
    )
    model = Model(PoolDescription(threads=1), EngineCosts(times, 0.0, 0.0, 0.0, 1, "", 1.5), costs, 0.0005)
    case = Case("m", Path(), {}, (), SIZES, 100, model.pool, lambda *_: [])
    found, rate = calibration_of(case, list(calibration_lines(ORIGIN, "m", model, 7.0)))
    assert rate == 7.0
    assert found.costs.events == pytest.approx(costs.events)
    assert found == model


async def test_requests_go_out_at_their_times_over_connections_that_are_used_again() -> None:
    asked: list[object] = []
    async with answering(HEAD + chunked(*EVENTS, DONE), asked) as port:
        bodies = [{"prompt": [i]} for i in range(4)]
        done = await soon(sse.run_at("127.0.0.1", port, bodies, [0.0, 0.0, 0.15, 0.3]))
    assert [answer.tokens for answer in done] == [17] * 4
    assert [answer.prompt_tokens for answer in done] == [3] * 4
    starts = [answer.start - done[0].start for answer in done]
    assert starts == pytest.approx([0.0, 0.0, 0.15, 0.3])
    assert all(answer.first >= answer.start for answer in done)

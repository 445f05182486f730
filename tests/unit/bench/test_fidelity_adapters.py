"""Runs with many adapters: what their rows say, what a fit finds, what too few slots cost."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from weft_bench.fidelity_adapters import AdapterRun, Constants, Outcome, Predicted, Sample, beginning, finished, fit
from weft_bench.lines import Origin

MODEL = "llama-3.1-8b-instruct"
CONSTANTS = beginning(load_us=5_000.0)
ROW = {
    "model": MODEL, "family": "varied_1h", "adapters": "6", "slots": "4", "max_rank": "16", "ranks": "8 16",
    "rate_counts": "0.05x4 0.2x2", "rates_req_s": "0.05 0.2", "offered_req_s": "0.6", "req_s": "0.6",
    "completed": "2100", "in_tokens": "420000", "out_tokens": "210000", "running_mean": "3", "waiting_mean": "0",
    "itl_mean_ms": "20", "tpot_mean_ms": "20", "kv_use_mean": "0.005", "preempted": "0", "kv_tokens": "200000",
    "twin_finished": "2000",
}  # fmt: skip


def run(**changed: str) -> AdapterRun:
    return AdapterRun({**ROW, **changed})


def test_a_row_gives_each_adapter_its_rate() -> None:
    assert run().rates == [0.05] * 4 + [0.2] * 2
    arrivals = list(run().arrivals(0))
    assert len(arrivals) == round(0.6 * 3_600)
    assert {one.adapter for one in arrivals} == set(range(6))
    assert sum(one.adapter in (4, 5) for one in arrivals) / len(arrivals) == pytest.approx(2 / 3, abs=0.05)


def test_a_mean_iteration_has_the_adapters_that_run() -> None:
    """Three rows of 5 s each: an adapter of 0.05 requests a second is among them in a fifth of the time."""
    sample = run().sample()
    assert sample.prompts == pytest.approx(0.6 * sample.seconds)
    assert sample.context == pytest.approx(200_000 * 0.005 - 3 * 8)  # half a page a row is waste
    assert sample.adapters == pytest.approx(4 * 0.221 + 2 * 0.632, rel=0.01)
    assert run(waiting_mean="50").sample().adapters == 3  # no more than rows
    assert run(waiting_mean="50", running_mean="90").sample().adapters == 4  # nor than slots


def test_an_iteration_takes_as_long_as_its_rows_last_beside_their_tokens() -> None:
    """Whatever clients see: three rows that made 210,000 tokens in an hour, and begun answers of three."""
    assert run(itl_mean_ms="90").sample().seconds == pytest.approx(3 * 3_600 / 210_000, rel=0.01)


def test_preempted_requests_are_computed_again() -> None:
    again = run(preempted="216").sample()
    assert again.prompts == pytest.approx(1.1 * run().sample().prompts)
    assert again.prompt_tokens == pytest.approx((200 + 0.1 * 250) * 0.6 * again.seconds)


def test_requests_that_wait_for_a_slot_are_passed_over() -> None:
    assert run(waiting_mean="5000").sample().passed_over == 5_000
    assert run(waiting_mean="5000", slots="6").sample().passed_over == 0


def test_only_iterations_of_steady_rows_are_fitted() -> None:
    """A slot for each adapter, or so many that wait that memory or the batch is full all the time."""
    assert [run(slots=slots).steady for slots in ("4", "6")] == [False, True]
    waits = {"waiting_mean": "5000"}
    full = {"running_mean": "900", "completed": "80000", "req_s": "22", "in_tokens": "16e6", "out_tokens": "13e6"}
    assert [run(**waits).steady, run(**waits, kv_use_mean="0.95").steady, run(**waits, **full).steady] == [
        False, True, True,
    ]  # fmt: skip


def test_a_fit_finds_the_constants_that_made_its_samples() -> None:
    true = Constants(
        replace(CONSTANTS.base, row_us=CONSTANTS.base.row_us * 0.5),
        {**CONSTANTS.costs, "adapter_us": 10.0, "block_ns": 1.5},
        CONSTANTS.penalty_us,
    )

    def sample(slots: int, adapters: float, rows: float) -> Sample:
        amounts = (0.1, 20.0, 2_000.0, rows, rows * 250, adapters)
        seconds = true.model(MODEL, slots, 16, slots).seconds_of(*amounts)
        return Sample(MODEL, slots, 16, slots, *amounts, 0.0, seconds, 1.0)

    samples = [sample(slots, min(slots, rows) / 2, rows) for slots in (0, 8, 64, 256) for rows in (1, 16, 128, 512)]
    found = fit(samples, CONSTANTS)
    for one in samples:
        amounts = (one.prompts, one.prompt_tokens, one.pairs, one.decode_rows, one.context, one.adapters)
        assert found.model(MODEL, one.slots, 16, one.slots).seconds_of(*amounts) == pytest.approx(one.seconds, rel=0.03)


@pytest.mark.slow
def test_too_few_slots_make_requests_wait_for_minutes() -> None:
    """64 adapters of one request in three seconds: with a slot each all but the last ones finish."""
    load = {"adapters": "64", "rate_counts": "0.3x64", "offered_req_s": "19.2"}
    enough, few = (finished(run(**load, slots=slots), CONSTANTS) for slots in ("64", "4"))
    assert enough.finished > 0.99 * 19.2 * 3_600
    assert few.finished < enough.finished
    assert few.ttft_s > 100 * enough.ttft_s


def test_lines_count_runs_within_five_percent() -> None:
    outcomes = [Outcome(count, 1.0, 0.02, 0) for count in (2_100, 2_200, 1_000)]
    lines = {line.metric: line for line in Predicted([run()] * 3, outcomes).lines(Origin("", "", ""), "a", ">= 0.85")}
    within = lines["finished within 5 %"]
    assert within.value == pytest.approx(2 / 3)
    assert within.baseline == 1.0
    assert within.met is False


def test_the_best_number_of_slots_is_judged_by_what_was_measured() -> None:
    def setting(slots: str, completed: str) -> Mapping[str, str]:
        return {**ROW, "slots": slots, "completed": completed}

    runs = [AdapterRun(setting(*one)) for one in (("8", "900"), ("16", "1000"), ("32", "950"))]
    outcomes = [Outcome(count, 1.0, 0.02, 0) for count in (800, 900, 1_200)]
    lines = {line.metric: line.value for line in Predicted(runs, outcomes).cliffs(Origin("", "", ""), "a")}
    assert lines["finished at the slots simulated best, of the best, mean"] == pytest.approx(0.95)


def test_without_several_numbers_of_slots_nothing_is_said_of_the_best() -> None:
    (line,) = Predicted([run()], [Outcome(900, 1.0, 0.02, 0)]).cliffs(Origin("", "", ""), "a")
    assert (line.metric, line.value) == ("loads with several numbers of slots", 0)


def test_of_a_model_without_runs_nothing_is_said() -> None:
    assert (
        list(Predicted([run()], [Outcome(900, 1.0, 0.02, 0)]).of("model", "other").lines(Origin("", "", ""), "a")) == []
    )

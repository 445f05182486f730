"""Runs with many adapters: what a mean iteration has, what a fit finds, what too few slots cost."""

from dataclasses import replace

import pytest

from weft_bench.fidelity_adapters import AdapterRun, Constants, Sample, beginning, finished, fit

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

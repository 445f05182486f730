"""A fit of a run that the engine simulation made goes towards that run's times."""

from dataclasses import replace

from weft_bench.fidelity_vllm import VllmRun, compared, fit
from weft_sim.performance import models
from weft_stage.lines import Origin

COLUMNS: tuple[str, ...] = (
    "queued_s",
    "input_toks",
    "output_toks",
    "shared_prefix_toks",
    "first_token_s",
    "last_token_s",
)


def run_of(constants_of: str = "vllm", weights: float = 1.0) -> VllmRun:
    """30 requests, as the simulation with these constants serves them."""
    rows = [
        dict(zip(COLUMNS, (str(i / 5), str(100 + 37 * i), str(20 + i), "0", "0", "1"), strict=True)) for i in range(30)
    ]
    constants = models.efficiency(constants_of)
    constants = replace(constants, weights_bandwidth=constants.weights_bandwidth * weights)
    times = VllmRun("rtxpro6000", "llama31_8b", 1, rows).simulated(constants)
    for row, (ttft, tpot) in zip(rows, times.tolist(), strict=True):
        row["first_token_s"] = str(float(row["queued_s"]) + ttft)
        row["last_token_s"] = str(float(row["first_token_s"]) + tpot * (int(row["output_toks"]) - 1))
    return VllmRun("rtxpro6000", "llama31_8b", 1, rows)


def test_a_fit_goes_towards_another_engine_s_times() -> None:
    run = run_of(weights=0.8)
    off = [
        line.value
        for constants in (models.efficiency("vllm"), fit(run))
        for line in compared(Origin("", "", ""), run, run.simulated(constants), "fitted on the same run")
        if line.metric == "mean TPOT off by"
    ]
    before, after = (value or 0.0 for value in off)
    assert before > 0.03
    assert after < before / 2

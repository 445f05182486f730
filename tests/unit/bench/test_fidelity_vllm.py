"""Runs of real vLLM: which files are runs, and what a fit of a run that the engine simulation made gives."""

import csv
import gzip
from dataclasses import replace
from pathlib import Path

from weft_bench.fidelity_vllm import VllmRun, compared, fit, runs
from weft_bench.lines import Origin
from weft_sim.performance.models import efficiency

COLUMNS = ("queued_s", "input_toks", "output_toks", "shared_prefix_toks", "first_token_s", "last_token_s")


def run_of(constants_of: str = "vllm", weights: float = 1.0) -> VllmRun:
    """30 requests, as the simulation with these constants serves them."""
    rows = [
        dict(zip(COLUMNS, (str(i / 5), str(100 + 37 * i), str(20 + i), "0", "0", "1"), strict=True)) for i in range(30)
    ]
    constants = efficiency(constants_of)
    constants = replace(constants, weights_bandwidth=constants.weights_bandwidth * weights)
    times = VllmRun("rtxpro6000", "llama31_8b", 1, rows).simulated(constants)
    for row, (ttft, tpot) in zip(rows, times.tolist(), strict=True):
        row["first_token_s"] = str(float(row["queued_s"]) + ttft)
        row["last_token_s"] = str(float(row["first_token_s"]) + tpot * (int(row["output_toks"]) - 1))
    return VllmRun("rtxpro6000", "llama31_8b", 1, rows)


def test_a_file_s_name_says_what_ran(tmp_path: Path) -> None:
    for name in ("rtx4090_llama31_8b", "rtxpro6000_qwen3_32b_tp2", "rtxpro6000_qwen3_30b_a3b", "v100_llama31_8b"):
        with gzip.open(tmp_path / f"llmservingsim_vllm_{name}.csv.gz", "wt", encoding="utf-8") as out:
            writer = csv.DictWriter(out, COLUMNS)
            writer.writeheader()
            writer.writerow(dict(run_of().requests[0]))
    found = [(run.device, run.model, run.tensor_parallel, run.dense) for run in runs(tmp_path)]
    assert found == [
        ("rtx4090", "llama31_8b", 1, True),
        ("rtxpro6000", "qwen3_32b", 2, True),
        ("rtxpro6000", "qwen3_30b_a3b", 1, False),
    ]


def test_a_fit_goes_towards_another_engine_s_times() -> None:
    run = run_of(weights=0.8)
    off = [
        line.value
        for constants in (efficiency("vllm"), fit(run))
        for line in compared(Origin("", "", ""), run, run.simulated(constants), "fitted on the same run")
        if line.metric == "mean TPOT off by"
    ]
    before, after = (value or 0.0 for value in off)
    assert before > 0.03
    assert after < before / 2

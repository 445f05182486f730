"""splitwise-sim's own example and its runs on public traces, request by request."""

import argparse
import csv
import gzip
from collections.abc import Sequence
from pathlib import Path

import pytest

from weft.domain.runner import RunnerRole
from weft_sim import splitwise_run
from weft_sim.planning import (
    A100,
    BASELINE,
    BLOOM_176B,
    H100,
    SPLIT,
    Cluster,
    MachineKind,
    PlannedRequest,
    Rules,
    machine_kind,
)
from weft_sim.report import quantile
from weft_sim.traces import TraceArrival, read

ROOT = Path(__file__).parents[3]
DATA = [folder for folder in (ROOT / "data", ROOT.parent / "shared" / "data") if folder.is_dir()]
H, A = machine_kind(H100), machine_kind(A100)
PROMPT, TOKEN, MIXED = RunnerRole.PROMPT, RunnerRole.TOKEN, RunnerRole.MIXED
Machines = Sequence[tuple[MachineKind, RunnerRole]]
EXAMPLE = [TraceArrival(1, 4_096, 32), TraceArrival(3, 2_048, 8), TraceArrival(4, 2_048, 16)]
RUNS: dict[str, tuple[str, Machines, Rules]] = {
    "base_h100x4_conv8": ("conv_8", [(H, MIXED)] * 4, BASELINE),
    "hh_2p2t_conv8": ("conv_8", [(H, PROMPT)] * 2 + [(H, TOKEN)] * 2, SPLIT),
    "ha_2h3a_conv8": ("conv_8", [(H, PROMPT)] * 2 + [(A, TOKEN)] * 3, SPLIT),
    "base_h100x4_code8": ("code_8", [(H, MIXED)] * 4, BASELINE),
    "hh_2p2t_code8": ("code_8", [(H, PROMPT)] * 2 + [(H, TOKEN)] * 2, SPLIT),
    "ha_2h3a_code8": ("code_8", [(H, PROMPT)] * 2 + [(A, TOKEN)] * 3, SPLIT),
    "base_h100x40_conv80": ("conv_80", [(H, MIXED)] * 40, BASELINE),
    "ha_25h26a_conv80": ("conv_80", [(H, PROMPT)] * 25 + [(A, TOKEN)] * 26, SPLIT),
}


def served(machines: Machines, rules: Rules, arrivals: Sequence[TraceArrival]) -> list[PlannedRequest]:
    cluster = Cluster(machines, BLOOM_176B, rules)
    cluster.serve(arrivals)
    cluster.check()
    return cluster.requests


def test_the_published_example_on_one_h100() -> None:
    found = served([(H, MIXED)], BASELINE, EXAMPLE)
    assert [request.e2e_s for request in found] == pytest.approx([1.744743, 0.499255, 0.781873], abs=1e-6)
    assert [request.ttft_s for request in found] == pytest.approx([0.649598, 0.251964, 0.251964], abs=1e-6)


def test_the_published_example_on_an_h100_for_prompts_and_an_a100_for_tokens() -> None:
    found = served([(H, PROMPT), (A, TOKEN)], SPLIT, EXAMPLE)
    assert [request.e2e_s for request in found] == pytest.approx([2.199226, 0.622873, 1.003019], abs=1e-6)
    transfers = [(request.resumed or 0) - (request.first_at or 0) for request in found]
    assert transfers == pytest.approx([0.076563, 0.038281, 0.038281], abs=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(not DATA, reason="no data sets")
@pytest.mark.parametrize("run", RUNS)
def test_reference_runs(run: str) -> None:
    """Every request to 1e-6 of a second; quantiles follow."""
    trace, machines, rules = RUNS[run]
    path = DATA[0] / f"splitwise_ref_trace_{trace}.csv.gz"
    with gzip.open(DATA[0] / "splitwise_ref_requests.csv.gz", "rt") as rows:
        expected = {int(float(row["request_ids"])): row for row in csv.DictReader(rows) if row["run"] == run}
    found = served(machines, rules, read(path))
    assert len(found) == len(expected)
    for name, value in {
        "response_times": lambda request: request.e2e_s,
        "ttft_times": lambda request: request.ttft_s,
        "tbt_times": lambda request: (request.e2e_s - request.ttft_s) / request.output_tokens,
    }.items():
        ours = [value(request) for request in found]
        theirs = [float(expected[request.number][name]) for request in found]
        assert ours == pytest.approx(theirs, abs=1e-6)
        assert quantile(ours, 0.9) == pytest.approx(quantile(theirs, 0.9), rel=1e-6)


def test_the_command_writes_every_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "trace.csv", tmp_path / "requests.csv"
    lines = [f"{one.at_s},{one.prompt_tokens},{one.output_tokens}" for one in EXAMPLE]
    trace.write_text("\n".join(["arrival_timestamp,prompt_size,token_size", *lines]) + "\n")
    parser = argparse.ArgumentParser()
    splitwise_run.add_arguments(parser)
    machines = ["--prompt", "h100-80gb:1", "--token", "a100-80gb:1"]
    assert splitwise_run.main(parser.parse_args([str(trace), *machines, "--out", str(out)])) == 0
    with out.open() as rows:
        found = [float(row["response_times"]) for row in csv.DictReader(rows)]
    assert found == pytest.approx([2.199226, 0.622873, 1.003019], abs=1e-6)
    assert "3 of 3 requests completed" in capsys.readouterr().out

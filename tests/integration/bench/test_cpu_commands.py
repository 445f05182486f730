"""`weft bench cpu` from its command line, on a model as small as can be; what it writes, and what it refuses.

Times are those of whatever else this machine does meanwhile: held against nothing but each other's arithmetic.
"""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft_bench.command import run
from weft_bench.cpu_shapes import RANK
from weft_bench.figures import cpu, cpu_adapters
from weft_bench.main import app
from weft_bench.roofline import lora_bytes
from weft_stage.lines import Line, read

from .conftest import SMALLEST

pytestmark = pytest.mark.usefixtures("smallest")
WHO = "tiny (reference) (quick), "


def lines_of(tmp_path: Path, cases: str, *arguments: str) -> dict[tuple[str, str], Line]:
    """Run cases, and return their lines by case and metric."""
    command = ["--quick", "--shapes", "tiny", "--executor", "reference", "--cases", cases, *arguments]
    folders = ["--models", str(tmp_path / "models"), "--docs", str(tmp_path / "docs")]
    assert run("cpu", [*command, *folders]) == 0
    assert (tmp_path / "docs" / "engine-cpu.md").exists()
    lines = read(tmp_path / "docs" / "raw" / "cpu.jsonl")
    assert all(line.target is None for line in lines)
    return {(line.case.removeprefix(WHO), line.metric): line for line in lines}


def test_decode_retention_and_one_row(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, "decode,retention,batch1", "--seed", "7")
    assert {"read bandwidth", "bf16 peak", "share of the read bandwidth"} <= {metric for _, metric in lines}
    kept = [case for case, metric in lines if metric == "kept of what the bound allows"]
    assert kept == [f"batch 4, {popularity}" for popularity in cpu.RETAINED]
    steps = [line for (_, metric), line in lines.items() if metric == "decode step"]
    assert all("seed 7" in line.versions for line in steps)
    assert all(line.bound_fraction == pytest.approx((line.baseline or 0) / (line.value or 1)) for line in steps)


def test_prompts_whole_runs_and_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(tmp_path, "prefill,whole,int8,int4,loading")
    told = capsys.readouterr().err
    for dtype in ("int8", "int4"):
        assert f"skipped: tiny, {dtype}: the reference executor computes in fp32" in told
    for length in (32, 128):
        adapted = lines[f"prompt of {length}, one adapter", "prefill"]
        plain = lines[f"prompt of {length}, base", "prefill"]
        ratio = lines[f"prompt of {length}", "one adapter / base"].value
        assert ratio == pytest.approx((adapted.value or 0) / (plain.value or 1))  # of one round
        assert (adapted.baseline or 0) > (plain.baseline or 0) > 0
    whole = {case: line for (case, metric), line in lines.items() if metric == "whole run"}
    assert list(whole) == [f"batch 4, {kind}" for kind in ("base", *cpu.RETAINED)]
    assert {line.baseline for case, line in whole.items() if case != "batch 4, base"} == {whole["batch 4, base"].value}
    loading = {metric: line.value or 0 for (case, metric), line in lines.items() if case == "batch 8, base"}
    slower = loading["decode step p50, adapters load"] / loading["decode step p50, nothing loads"]
    assert loading["decode step p50, adapters load / nothing loads"] == pytest.approx(slower)


def test_many_adapters_over_few_slots(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, "slots")
    for kind in ("popularity 1/i", "alike"):
        crowd = f"16 adapters over 8 slots, {kind}"
        assert 0 <= (lines[crowd, "hit rate"].value or 0) <= 1
        each_at_least_once = 16 * lora_bytes(SMALLEST, RANK) / cpu_adapters.MIB
        assert (lines[crowd, "adapters loaded"].value or 0) >= each_at_least_once
        assert (crowd, cpu_adapters.OVER) in lines
    assert ("8 adapters over 8 slots, beside 16", "TTFT p99") in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cpu", "--shapes", "tiny,huge"], "huge"),
        (["cpu", "--cases", ","], "expected at least one value"),
        (["path", "--model-shape", "huge"], "expected one of"),
    ],
)
def test_wrong_choices_are_refused_before_anything_runs(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 2
    assert message in ended.output + capsys.readouterr().err

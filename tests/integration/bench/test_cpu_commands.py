"""`weft bench cpu` from its command line, on a model as small as can be; what it writes, and what it refuses.

Times are those of whatever else this machine does meanwhile: held against nothing but each other's arithmetic.
"""

import gzip
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from weft_bench.cpu_cases import RETAINED
from weft_bench.cpu_masks import SCHEMAS
from weft_bench.cpu_shapes import POPULARITIES, RANK, SHAPES
from weft_bench.cpu_slots import MIB, OVER
from weft_bench.cpu_textgen import LENGTHS
from weft_bench.main import app
from weft_bench.roofline import lora_bytes
from weft_stage.lines import Line, read

from .conftest import SMALLEST

pytestmark = pytest.mark.usefixtures("smallest")
RUNNER = CliRunner()


def lines_of(tmp_path: Path, cases: str, *arguments: str) -> tuple[list[Line], str]:
    command = ["cpu", "--quick", "--shapes", "tiny", "--executor", "reference", "--cases", cases]
    folders = ["--models", str(tmp_path / "models"), "--docs", str(tmp_path / "docs")]
    ended = RUNNER.invoke(app, [*command, *folders, *arguments])
    assert ended.exit_code == 0, ended.output
    assert (tmp_path / "docs" / "cpu.md").exists()
    return read(tmp_path / "docs" / "raw" / "cpu.jsonl"), ended.stderr


def test_decode_retention_and_one_row(tmp_path: Path) -> None:
    lines, said = lines_of(tmp_path, "decode,retention,batch1", "--seed", "7")
    assert "seed 7" in said
    measured = {line.metric for line in lines}
    assert {"read bandwidth", "bf16 peak", "decode step", "kept of the base's rate"} <= measured
    kept = [line for line in lines if line.metric == "kept of what the bound allows"]
    assert [line.case for line in kept] == [
        f"tiny (reference) (quick), batch 4, {popularity}" for popularity in RETAINED
    ]
    steps = [line for line in lines if line.metric == "decode step"]
    assert all(line.value and line.baseline and line.bound_fraction for line in steps)
    assert all("seed 7" in line.versions for line in steps)
    assert all(line.bound_fraction == pytest.approx((line.baseline or 0) / (line.value or 1)) for line in steps)


def test_prefill_whole_runs_and_loading(tmp_path: Path) -> None:
    lines, said = lines_of(tmp_path, "prefill,whole,int8,int4,loading", "--threads", "1")
    for dtype in ("int8", "int4"):
        assert f"skipped: tiny, {dtype}: the reference executor computes in fp32" in said
    measured = {(line.case.removeprefix("tiny (reference) (1 threads) (quick), "), line.metric): line for line in lines}
    for length in (32, 128):
        adapted = measured[f"prompt of {length}, one adapter", "prefill"]
        plain = measured[f"prompt of {length}, base", "prefill"]
        ratio = measured[f"prompt of {length}", "one adapter / base"].value
        assert ratio == pytest.approx((adapted.value or 0) / (plain.value or 1))  # of one round
        assert (adapted.baseline or 0) > (plain.baseline or 0) > 0
    whole = {case: line for (case, metric), line in measured.items() if metric == "whole run"}
    assert list(whole) == [f"batch 4, {kind}" for kind in ("base", *RETAINED)]
    assert {line.baseline for case, line in whole.items() if case != "batch 4, base"} == {whole["batch 4, base"].value}
    loading = {metric: line.value for (case, metric), line in measured.items() if case == "batch 8, base"}
    dearer = loading["decode step p50, adapters load / nothing loads"]
    assert dearer == pytest.approx(
        (loading["decode step p50, adapters load"] or 0) / (loading["decode step p50, nothing loads"] or 1)
    )
    assert loading["adapters loaded beside the steps"] is not None  # none may have come in so few steps


def test_masks_of_structured_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", replace(SMALLEST, vocab=512))  # every byte is a token
    lines, _ = lines_of(tmp_path, "masks")
    measured = {(line.case.rpartition(", ")[2], line.metric): line for line in lines}
    for schema in SCHEMAS:
        step = measured[schema, "decode step"]
        assert step.value
        assert step.baseline
        assert measured[schema, "masks, of a step without"].value is not None


def test_slots_and_text_generation(tmp_path: Path) -> None:
    with gzip.open(tmp_path / LENGTHS, "wt") as out:
        out.write("num_prefill_tokens,num_decode_tokens\n" + "9,3\n20,5\n" * 20)
    lines, _ = lines_of(tmp_path, "slots,textgen", "--data", str(tmp_path))
    crowds = [f"tiny (reference) (quick), 16 adapters over 8 slots, {kind}" for kind in ("popularity 1/i", "alike")]
    measured = {(line.case, line.metric): line.value for line in lines}
    for crowd in crowds:
        assert 0 <= (measured[crowd, "hit rate"] or 0) <= 1
        assert (measured[crowd, "adapters loaded"] or 0) >= 16 * lora_bytes(SMALLEST, RANK) / MIB  # each at least once
        assert (crowd, OVER) in measured
    warm = [line for line in lines if line.case.endswith("8 adapters over 8 slots, beside 16")]
    assert [line.metric for line in warm] == ["TTFT p50", "TTFT p99"]
    assert all(line.target is None for line in lines)  # quick figures are held against nothing
    loaded = {
        line.case.split(", ")[3]: line.value
        for line in lines
        if "text generation" in line.case and line.metric == "adapters loaded"
    }
    assert loaded == {"base": 0, "Identical": 1, "Uniform": 5, "Skewed": loaded["Skewed"], "Distinct": 24}


@pytest.mark.slow
def test_the_operator_and_a_layer_beside_those_of_torch(tmp_path: Path) -> None:
    lines, _ = lines_of(tmp_path, "operator,layer", "--executor", "cpu", "--threads", "1")
    cases = {line.case: line for line in lines if line.metric == "Gather-BMM's time / ours"}
    assert {f"LoRA 64 -> 64, rank 8, batch 4, {kind} (1 threads) (quick)" for kind in POPULARITIES} <= set(cases)
    assert {f"tiny (1 threads) (quick), layer, context 32, batch 4, {kind}" for kind in POPULARITIES} <= set(cases)
    assert all((line.value or 0) > 0 and line.target is None for line in cases.values())
    picture = ElementTree.fromstring((tmp_path / "docs/pictures/cpu-operator-1.svg").read_text())
    points = picture.findall("{http://www.w3.org/2000/svg}circle")
    assert len(points) == 3 * sum(line.metric == "FLOPs a byte" for line in lines)
    assert "pictures/cpu-operator-1.svg" in (tmp_path / "docs" / "cpu.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cpu", "--shapes", "tiny,huge"], "huge"),
        (["cpu", "--cases", ","], "choose among decode, retention"),
        (["peers"], "nobody to compare with"),
        (["peers", "--vllm", "/nope", "--vllm-env", "A=1 B"], "'B' is not NAME=VALUE"),
        (["path", "--model-shape", "huge"], "choose among tiny"),
    ],
)
def test_wrong_choices_are_refused_before_anything_runs(arguments: list[str], message: str) -> None:
    ended = RUNNER.invoke(app, arguments)
    assert ended.exit_code == 2
    assert message in ended.output

"""`weft bench accuracy`: the quickstart's model answers as well with int8 and int4 weights."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft_bench.main import app
from weft_kernels.cpu import NativeUnavailable, load
from weft_stage.lines import read

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"


@pytest.mark.slow
@pytest.mark.usefixtures("smallest")
def test_fewer_bits_cost_little(tmp_path: Path) -> None:
    try:
        load()
    except NativeUnavailable as error:
        pytest.skip(f"no CPU kernels here: {error.reason}")
    folders = ["--models", str(tmp_path / "models"), "--docs", str(tmp_path / "docs"), "--quickstart", str(QUICKSTART)]
    ended = CliRunner().invoke(app, ["accuracy", "--only", "quickstart,tiny", "--texts", "18", *folders])
    assert ended.exit_code == 0, ended.output
    lines = read(tmp_path / "docs" / "raw" / "accuracy.jsonl")
    figure = {(*line.case.split(" ")[:2], line.metric): line.value or 0.0 for line in lines}
    assert figure["tiny", "(bf16),", "exact"] == figure["tiny", "(bf16),", "tokens"] == 1
    for dtype in ("bf16", "int8", "int4"):
        assert figure["quickstart", f"({dtype}),", "exact"] >= 0.9
        assert 0 < figure["quickstart", f"({dtype}),", "cross entropy"] < 0.05
    assert figure["tiny", "(int4),", "cross entropy"] != figure["tiny", "(bf16),", "cross entropy"]

"""`weft bench offload` from its command line, on a model as small as can be."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft_bench.main import app
from weft_stage.lines import read

pytestmark = pytest.mark.usefixtures("smallest")


def test_cells_by_budget_rows_and_popularity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_bench.figures.offload.READ_S", 0.01)
    monkeypatch.setattr("weft_runner.model.tiers.disk_rates.BLOCK", 4096)  # the smallest model's file is shorter
    folders = ["--models", str(tmp_path / "models"), "--docs", str(tmp_path / "docs")]
    command = ["offload", "--quick", "--shapes", "tiny", "--shares", "90,100", "--rows", "1,3", "--threads", "1"]
    ended = CliRunner().invoke(app, [*command, *folders])
    assert ended.exit_code == 0, ended.output
    lines = read(tmp_path / "docs" / "raw" / "offload.jsonl")
    cells = {line.case for line in lines if line.metric == "output tokens"}
    assert cells == {
        f"tiny bf16, {share} of the weights, {rows} rows, {popularity}, 32 + 4 tokens"
        for share in ("90%", "100%") for rows in (1, 3) for popularity in ("base", "Distinct")
    }  # fmt: skip
    read_bytes = {line.case: line.value for line in lines if line.metric == "read from disk a pass"}
    assert all((value == 0) == ("100%" in case) for case, value in read_bytes.items())
    assert not any(line.target for line in lines)

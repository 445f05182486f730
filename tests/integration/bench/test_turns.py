"""`weft bench turns` with this checkout on both sides."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft_bench import turns
from weft_bench.main import app

ROOT = Path(__file__).parents[3]


def test_a_checkout_against_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "UNIT_S", 0.001)
    sides = ["--old", str(ROOT), "--new", str(ROOT), "--models", str(tmp_path)]
    cases = ["--shapes", "tiny", "--rows", "1", "--adapters", "base,Distinct"]
    cases += ["--cases", "decode,prefill,reports,decisions,path,request,refused", "--rounds", "2"]
    ended = CliRunner().invoke(app, ["turns", *sides, *cases])
    assert ended.exit_code == 0, ended.output
    rows = [line.split("  ")[0] for line in ended.stdout.splitlines()]
    engines = [f"tiny {case}, 1 row, {adapters}" for adapters in ("base", "Distinct") for case in ("decode", "prefill")]
    assert rows[: 1 + len(engines)] == ["case", *engines]
    assert rows[5:10] == ["reports", "decisions", "path", "request", "refused"]
    assert ended.stdout.count("at least 4 rounds, got 2") == 9
    assert "old: " in ended.stderr

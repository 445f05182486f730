"""How a benchmark that cannot go on ends for the person who started it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft_bench.command import single
from weft_bench.main import app, failures_told
from weft_stage.errors import BenchFailed, NotInTime, StackFailed


def test_a_kubeconfig_that_is_none_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("{}")
    ended = CliRunner().invoke(app, ["operator", "--kubeconfig", str(tmp_path / "config")])
    assert ended.exit_code == 1
    assert ended.stderr.startswith("error: no credentials for an API server")
    assert ended.stderr.count("\n") == 1


def test_failures_in_groups_are_told_one_by_one() -> None:
    group = ExceptionGroup("a", [NotInTime("b"), ExceptionGroup("c", [StackFailed("d")])])
    assert [str(error) for error in single(group)] == ["b", "d"]


def test_our_own_mistakes_keep_their_trace() -> None:
    with pytest.raises(ExceptionGroup) as caught, failures_told():
        raise ExceptionGroup("both", [BenchFailed("told"), KeyError("ours")])
    assert caught.group_contains(KeyError)

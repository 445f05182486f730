"""How a benchmark that cannot go on ends for the person who started it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft_bench import command
from weft_bench.command import single
from weft_bench.main import app
from weft_bench.run import Run
from weft_stage.errors import BenchFailed, NotInTime, StackFailed
from weft_stage.lines import Line, Origin, append, read


def test_a_kubeconfig_that_is_none_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("{}")
    ended = CliRunner().invoke(app, ["operator", "--kubeconfig", str(tmp_path / "config")])
    assert ended.exit_code == 1
    assert ended.stderr.startswith("error: no credentials for an API server")
    assert ended.stderr.count("\n") == 1


def test_failures_in_groups_are_told_one_by_one() -> None:
    group = ExceptionGroup("a", [NotInTime("b"), ExceptionGroup("c", [StackFailed("d")])])
    assert [str(error) for error in single(group)] == ["b", "d"]


def test_our_own_mistakes_keep_their_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(options: object, run: Run) -> Iterator[Line]:
        raise ExceptionGroup("both", [BenchFailed("told"), KeyError("ours")])

    monkeypatch.setattr("weft_bench.figures.push.figures", figures)
    with pytest.raises(ExceptionGroup) as caught:
        command.run("push", ["--docs", str(tmp_path)])
    assert caught.group_contains(KeyError)


def test_lines_of_a_run_that_fails_are_kept_with_their_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def figures(options: object, run: Run) -> Iterator[Line]:
        yield run.origin().line("m135", "upload p50", 3.0, "ms")
        raise BenchFailed("the stack ended")

    monkeypatch.setattr("weft_bench.figures.push.figures", figures)
    assert command.run("push", ["--docs", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("error: the stack ended\n")
    assert [line.value for line in read(tmp_path / "raw" / "push.jsonl")] == [3.0]
    assert "| m135 | 3 ms | 1 |" in (tmp_path / "stack.md").read_text()


def test_a_run_without_figures_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run("predict", ["--docs", str(tmp_path), "--data", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith(
        "error: nothing was measured: every case was skipped, for the reasons above\n"
    )


def test_check_names_missed_targets(tmp_path: Path) -> None:
    line = Origin("c", "box", "v").line("m135", "upload p50", 3.0, "ms", target="<= 2")
    append(tmp_path / "raw" / "push.jsonl", [line])
    ended = CliRunner().invoke(app, ["check", "--docs", str(tmp_path)])
    assert ended.exit_code == 1
    assert "push: m135: upload p50: 3 ms, target <= 2: missed (box, " in ended.stdout


def test_check_refuses_a_folder_without_figures(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["check", "--docs", str(tmp_path)])
    assert ended.exit_code == 2
    assert "expected a folder with raw lines" in ended.stderr

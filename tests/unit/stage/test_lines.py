"""Raw lines, the newest of each key, missed targets."""

from pathlib import Path

import pytest

from weft_stage.lines import BadTarget, Origin, append, is_met, missed, newest, read, write

HERE = Origin(command="weft bench x", machine="box", versions="Python 3.11")


def test_lines_survive_a_round_trip_through_the_file(tmp_path: Path) -> None:
    lines = [HERE.line("a", "tokens", 10.0, "tok/s", baseline=4.0, target=">= 8"), HERE.line("b", "ttft", None, "ms")]
    append(tmp_path / "raw" / "x.jsonl", lines[:1])
    append(tmp_path / "raw" / "x.jsonl", lines[1:])
    assert read(tmp_path / "raw" / "x.jsonl") == lines
    assert (lines[0].ratio, lines[0].met, lines[1].met) == (2.5, True, None)


def test_the_newest_line_of_a_case_and_metric_counts_on_whichever_machine(tmp_path: Path) -> None:
    elsewhere = Origin(command="c", machine="other", versions="v")
    lines = [elsewhere.line("a", "m", 1.0, "s", target="<= 2")]
    lines += [HERE.line(case, "m", 3.0, "s", target="<= 2") for case in ("a", "b")]
    assert newest(lines) == lines[1:]
    assert missed(lines) == lines[1:]
    append(tmp_path / "x.jsonl", lines)
    write(tmp_path / "x.jsonl", newest(lines))
    assert read(tmp_path / "x.jsonl") == lines[1:]


def test_an_unmeasured_target_is_missed() -> None:
    assert [line.metric for line in missed([HERE.line("a", "m", None, "s", target="<= 2")])] == ["m"]


@pytest.mark.parametrize(
    ("value", "target", "met"),
    [(2, ">= 2", True), (1.9, ">= 2", False), (2, "<= 2", True), (None, ">= 1", None), (1, None, None)],
)
def test_targets(value: float | None, target: str | None, met: bool | None) -> None:
    assert is_met(value, target) is met


@pytest.mark.parametrize("target", ["2", "> 2", ">= x", ""])
def test_a_bad_target_is_named(target: str) -> None:
    with pytest.raises(BadTarget):
        is_met(1.0, target)

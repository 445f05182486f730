"""Raw lines, the newest of each key, missed targets, the rendered page."""

from dataclasses import replace
from pathlib import Path

import pytest

from weft_bench.lines import BadLine, BadTarget, Line, Origin, append, is_met, missed, newest, read
from weft_bench.render import page

HERE = Origin(command="weft bench x", machine="box", versions="Python 3.11")


def test_lines_survive_a_round_trip_through_the_file(tmp_path: Path) -> None:
    lines = [HERE.line("a", "tokens", 10.0, "tok/s", baseline=4.0, target=">= 8"), HERE.line("b", "ttft", None, "ms")]
    append(tmp_path / "raw" / "x.jsonl", lines[:1])
    append(tmp_path / "raw" / "x.jsonl", lines[1:])
    assert read(tmp_path / "raw" / "x.jsonl") == lines
    assert (lines[0].ratio, lines[0].met, lines[1].met) == (2.5, True, None)


def test_the_newest_line_of_a_case_metric_and_machine_counts() -> None:
    elsewhere = Origin(command="c", machine="other", versions="v")
    lines = [HERE.line("a", "m", v, "s", target="<= 2") for v in (1.0, 3.0)]
    lines.append(elsewhere.line("a", "m", 1.0, "s", target="<= 2"))
    assert [line.value for line in newest(lines)] == [3.0, 1.0]
    assert [line.machine for line in missed(lines)] == ["box"]


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


def test_a_bad_raw_line_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('\n{"case": 1}\n')
    with pytest.raises(BadLine, match=r"x\.jsonl:2"):
        read(tmp_path / "x.jsonl")


def test_the_page_shows_misses_and_what_was_not_measured() -> None:
    lines = [HERE.line("a", "m", 1234.5, "tok/s", target=">= 2000"), HERE.line("b", "m", None, "ms", target="<= 1")]
    text = page("x", "What it is.", lines)
    assert "| a | m | 1,234 | tok/s |  |  |  | >= 2000 | **no** | 1 |" in text
    assert "| b | m | not measured | ms |  |  |  | <= 1 | not measured | 1 |" in text
    assert Line(**{f: getattr(lines[0], f) for f in Line.__slots__}) == lines[0]


def test_a_figure_tells_which_run_it_comes_from() -> None:
    other = replace(HERE, command="weft bench x --other", versions="Python 3.12")
    text = page("x", "What it is.", [HERE.line("a", "m", 1, "ms"), other.line("b", "m", 2, "ms")])
    runs = [line for line in text.splitlines() if line.startswith(("1. ", "2. "))]
    assert runs[0].endswith(f"`{HERE.command}`, Python 3.11")
    assert runs[1].endswith(f"`{other.command}`, Python 3.12")
    assert "| a | m | 1 | ms |  |  |  |  |  | 1 |" in text
    assert "| b | m | 2 | ms |  |  |  |  |  | 2 |" in text


def test_each_run_has_the_machine_as_it_found_it() -> None:
    other = replace(HERE, command="weft bench x --other")
    lines = [
        line
        for origin, bandwidth in ((HERE, 10), (other, 20), (HERE, 11))
        for line in (
            origin.line("machine, by hand", "read bandwidth", bandwidth, "GB/s"),
            origin.line(f"a {origin.command}", "m", 1, "ms"),
        )
    ]
    text = page("x", "What it is.", lines)
    assert "| machine, by hand | read bandwidth | 11 | GB/s |  |  |  |  |  | 1 |" in text
    assert "| machine, by hand | read bandwidth | 20 | GB/s |  |  |  |  |  | 2 |" in text
    assert text.count("read bandwidth") == 2


def test_of_a_run_that_no_figure_is_left_from_the_machine_is_not_told() -> None:
    other = replace(HERE, command="weft bench x --other")
    lines = [other.line("machine, by hand", "read bandwidth", 20, "GB/s"), other.line("a", "m", 1, "ms")]
    text = page("x", "What it is.", [*lines, HERE.line("a", "m", 2, "ms")])
    assert "read bandwidth" not in text
    assert other.command not in text

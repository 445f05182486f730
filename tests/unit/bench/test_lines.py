"""Raw lines, the newest of each key, missed targets, the rendered page."""

from dataclasses import replace
from pathlib import Path

import pytest

from weft_bench.lines import BadLine, BadTarget, Line, Origin, append, is_met, missed, newest, read
from weft_bench.render import PICTURES, page

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


def test_cases_of_the_same_metrics_share_a_table_with_a_row_for_each() -> None:
    def case(name: str, tokens: float, *, late: float | None = 7.0, target: str | None = None) -> list[Line]:
        return [
            HERE.line(f"queue, A, {name}", "tokens", tokens, "1/s", baseline=1_000, target=target),
            HERE.line(f"queue, A, {name}", "late", late, "%"),
            HERE.line(f"queue, A, {name}", "of it", 5, "", bound_fraction=0.5),
        ]

    one = [*case("x", 1_000), *case("y, z", 500, late=None, target=">= 900"), *case("w", 2_000, target=">= 900")[::2]]
    text = page("x", "What it is.", [*one, HERE.line("alone", "m", 3, "s")])
    table = text[text.index("| queue, A |") :].splitlines()
    assert table[:5] == [
        "| queue, A | tokens [1/s] | late [%] | of it | run |",
        "|---|---:|---:|---:|---:|",
        "| x | 1,000 | 7 | 5 (50%) | 1 |",
        "| y, z | 500 (0.5x, **>= 900: no**) | not measured | 5 (50%) | 1 |",
        "| w | 2,000 (2x, >= 900: yes) |  | 5 (50%) | 1 |",
    ]
    assert "| alone | m | 3 | s |" in text


def test_a_figure_tells_which_run_it_comes_from() -> None:
    other = replace(HERE, command="weft bench x --other", versions="Python 3.12")
    text = page("x", "What it is.", [HERE.line("a", "m", 1, "ms"), other.line("b", "m", 2, "ms")])
    runs = [line for line in text.splitlines() if line.startswith(("1. ", "2. "))]
    assert runs[0].endswith(f"`{HERE.command}`, Python 3.11")
    assert runs[1].endswith(f"`{other.command}`, Python 3.12")
    assert "| a | m | 1 | ms |  |  |  |  |  | 1 |" in text
    assert "| b | m | 2 | ms |  |  |  |  |  | 2 |" in text


def test_a_run_tells_all_of_its_versions_and_what_they_share_once() -> None:
    found = ["Python 3.11, ours 1", "Python 3.11, ours 1, peer 2 (A=1)", "Python 3.11, ours 1, peer 2 (A=2)"]
    lines = [replace(HERE, versions=each).line(each, "m", 1, "ms") for each in [*found, found[1]]]
    text = page("x", "What it is.", lines)
    told = text[text.index("`, ") :].splitlines()[:4]
    assert told == ["`, Python 3.11, ours 1", "   - peer 2 (A=1)", "   - peer 2 (A=2)", ""]


def test_versions_that_share_nothing_are_all_told() -> None:
    lines = [replace(HERE, versions=each).line(each, "m", 1, "ms") for each in ("one 1", "two 2")]
    assert f"`{HERE.command}`\n   - one 1\n   - two 2\n" in page("x", "What it is.", lines)


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


def test_bars_begin_at_zero_and_leave_out_what_was_not_measured() -> None:
    lines = [HERE.line("a", PICTURES[0], 0.5, "share"), HERE.line('the "b"', PICTURES[0], 0.25, "share")]
    text = page("x", "What it is.", [*lines, HERE.line("c", PICTURES[0], None, "share")])
    chart = text[text.index("```mermaid") :].split("```")[1]
    assert """x-axis ["a", "the 'b'"]""" in chart
    assert "y-axis 0 --> 0.55" in chart
    assert "bar [0.5, 0.25]" in chart
    assert "mermaid" not in page("x", "What it is.", lines[:1])

"""What is reported of lines beside interactive rows."""

from weft_bench.lines import Origin
from weft_bench.row_caps import RuleRun, caps, figures


def test_lines_by_priority_stand_beside_the_best_cap_that_keeps_the_token_time() -> None:
    runs = {0: RuleRun([0.01], 0.0), 4: RuleRun([0.02], 300.0), 8: RuleRun([0.024], 500.0), 16: RuleRun([0.05], 900.0)}
    lines = figures(Origin("c", "m", "v").line, "m135, ", runs | {None: RuleRun([0.021] * 9, 475.0)}, 25.0)
    found = {line.metric: (line.value, line.met) for line in lines if line.case.endswith("by priority")}
    assert found["interactive p99 / token time"] == (0.84, True)
    assert found["batch tokens/s / best cap that keeps it (8 rows)"] == (0.95, True)
    assert found["batch tokens/s / best cap that is no later (4 rows)"] == (475 / 300, None)


def test_without_a_cap_that_keeps_the_token_time_there_is_no_share_of_it() -> None:
    lines = figures(Origin("c", "m", "v").line, "", {1: RuleRun([0.1], 9.0), None: RuleRun([0.1], 9.0)}, 25.0)
    assert [line.value for line in lines if "keeps it" in line.metric] == [None]


def test_caps_leave_the_interactive_rows_their_places() -> None:
    assert caps(32) == (0, 1, 2, 4, 8, 12, 16, 24, 30)
    assert caps(8) == (0, 1, 2, 4, 6)

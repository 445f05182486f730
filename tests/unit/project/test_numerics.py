import json
import math

import pytest

from harness.numerics import VARIABLE, Measured, near, table, within


def test_a_value_above_its_bound_and_nan_fail_and_all_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "records"))
    near("sums", [1.0, 2.0], [1.0, 2.5], 0.5)
    for value in (0.6, math.nan):
        with pytest.raises(AssertionError, match=r"sums: expected at most 0\.5, got"):
            within("sums", value, 0.5)
    with pytest.raises(AssertionError):
        near("sums", [1.0, math.nan], [1.0, 2.0], 0.5)
    lines = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    assert [line[1:] for line in lines[:2]] == [["sums", 0.5, 0.5], ["sums", 0.6, 0.5]]
    assert len(lines) == 4
    assert lines[0][0].endswith("test_a_value_above_its_bound_and_nan_fail_and_all_are_recorded")


def test_the_table_has_the_worst_setting_of_each_bound_and_the_smallest_margin_first():
    measured = {
        "as it is": [Measured("t", "sums", 0.1, 1.0), Measured("t", "means", 2.0, 4.0)],
        "two threads": [Measured("t", "sums", 0.25, 1.0), Measured("t", "means", 1.0, 4.0)],
    }
    rows, smallest = table(measured)
    assert rows[2:] == ["| means | 4 | 2 | 2.00 | as it is |", "| sums | 1 | 0.25 | 4.00 | two threads |"]
    assert smallest == 2.0
    assert table({"as it is": [Measured("t", "sums", math.nan, 1.0)]})[1] == 0.0

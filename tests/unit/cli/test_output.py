"""Tables and ages as kubectl prints them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_cli.output import age, table

CREATED = "2026-01-01T00:00:00.500000Z"
CREATED_S = 1_767_225_600.5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (0, "0s"), (119, "119s"), (120, "2m"), (3599, "59m"), (3600, "1h"), (86_400, "1d"), (900_000, "10d")],
)
def test_an_age_is_one_number_and_one_unit(seconds: int, text: str) -> None:
    assert age(CREATED, CREATED_S + seconds) == text


CELLS = st.text("abc-/ ", min_size=1, max_size=8).map(str.strip).filter(bool)


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=6))
def test_columns_line_up_and_nothing_trails(rows: list[tuple[str, str, str]]) -> None:
    lines = table(("ONE", "TWO", "THREE"), rows)
    second, third = lines[0].index("TWO"), lines[0].index("THREE")
    for line, row in zip(lines[1:], rows, strict=True):
        assert line == line.rstrip()
        assert line[:second].strip() == row[0]
        assert line[second:third].strip() == row[1]
        assert line[third:] == row[2]

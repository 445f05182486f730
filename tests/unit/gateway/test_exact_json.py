"""JSON with exact integers."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_gateway import exact_json

INTEGERS = st.integers() | st.integers(-(2**1000), 2**1000) | st.sampled_from([2**63, 2**64, -(2**63) - 1])
TEXTS = st.text("0123456789 eé.-", max_size=30)
VALUES = st.recursive(
    INTEGERS | TEXTS | st.floats(allow_nan=False, allow_infinity=False) | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
)


@given(VALUES, st.sampled_from([None, 1]), st.text(" ", max_size=9))
def test_every_value_is_read_and_written_with_its_digits(value: Any, indent: int | None, before: str) -> None:
    text = before + json.dumps(value, indent=indent)
    for read in (exact_json.loads(text), exact_json.loads(text.encode()), exact_json.loads(exact_json.dumps(value))):
        assert json.dumps(read) == json.dumps(value), "3.0 and 3 are equal, and two kinds of numbers"


def test_a_long_integer_is_found_at_any_place() -> None:
    for place in range(40):
        assert exact_json.loads(" " * place + str(-(2**63) - 1)) == -(2**63) - 1, place


@pytest.mark.parametrize(
    "text", ["1e400", "9" * 400, '{"a": 10000000000000000000, "b": NaN}', "[10000000000000000000", '"\\ud800"']
)
def test_what_is_no_json_or_beyond_floats_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        exact_json.loads(text)


def test_depth_is_bounded_beside_a_long_integer() -> None:
    with pytest.raises(ValueError, match="recursion limit"):
        exact_json.loads("[" * 1000 + "1" * 20 + "]" * 1000)


def test_what_json_cannot_hold_is_refused() -> None:
    for value in (object(), {"a": [2**70, object()]}):
        with pytest.raises((TypeError, ValueError)):
            exact_json.dumps(value)

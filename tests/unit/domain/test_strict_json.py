"""JSON from strangers: what it may cost."""

import pytest

from weft.domain import strict_json
from weft.domain.strict_json import JsonError, parse_object


@pytest.mark.parametrize("value", ["[]", "{}", "0"])
def test_many_small_values_are_refused_before_they_take_memory(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr(strict_json, "MAX_VALUES", 100)
    text = f'{{"a": [{", ".join([value] * 100)}]}}'.encode()
    with pytest.raises(JsonError, match="more than 100 values"):
        parse_object(text, max_bytes=1 << 20)


def test_as_many_values_as_allowed_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "MAX_VALUES", 100)
    assert parse_object(f'{{"a": [{", ".join(["0"] * 99)}]}}'.encode(), max_bytes=1 << 20) == {"a": [0] * 99}

"""JSON with exact integers. orjson reads integers beyond 64 bits as floats, and cannot write them."""

from typing import Any

import orjson
from pydantic_core import from_json, to_json

LONG_DIGITS = 19  # 2^63, the first integer beyond 64 bits with a sign, has 19 digits
_STRIDE = LONG_DIGITS // 2  # among 19 digits in a row, at least two are at neighbouring multiples of it
_ZEROS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else ord(" ") for byte in range(256))
_BEYOND_FLOATS = 1 << 1024
_LONG = b"0" * LONG_DIGITS


def loads(text: str | bytes) -> Any:
    """Read JSON with exact integers. Raises ValueError, also for numbers beyond the largest float (309 digits)."""
    value = orjson.loads(text)
    if not _has_long_number(text.encode() if isinstance(text, str) else text):
        return value
    del value
    return from_json(text)


def place_beyond_floats(text: bytes) -> tuple[int | str, ...]:
    """Return the path to the first number beyond the largest float, as names and indices; (): none."""
    try:
        return _place(from_json(text, allow_inf_nan=False))
    except ValueError:
        return ()


def _place(value: Any) -> tuple[int | str, ...]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        if isinstance(item, int | float) and not -_BEYOND_FLOATS < item < _BEYOND_FLOATS:
            return (name,)
        if place := _place(item):
            return name, *place
    return ()


def dumps(value: Any) -> bytes:
    """Write JSON with exact integers. Raises TypeError or ValueError for a value outside JSON."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return to_json(value)


def _has_long_number(text: bytes) -> bool:
    """Whether `LONG_DIGITS` digits stand in a row. A look at every ninth byte decides most texts at once."""
    return b"00" in text[::_STRIDE].translate(_ZEROS) and _LONG in text.translate(_ZEROS)

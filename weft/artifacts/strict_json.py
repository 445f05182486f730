"""JSON from strangers: bounded, no name twice, no NaN, no Infinity, one object at the top."""

import json
from typing import Any, NoReturn

JsonObject = dict[str, Any]


class JsonError(ValueError):
    """The text is not the JSON that was asked for; the message says where."""


def parse_object(raw: bytes, *, max_bytes: int) -> JsonObject:
    """UTF-8 JSON text -> its object. Raises JsonError, never anything else."""
    if len(raw) > max_bytes:
        raise JsonError(f"{len(raw)} bytes, the limit is {max_bytes}")
    try:
        value: object = json.loads(raw.decode(), object_pairs_hook=_no_name_twice, parse_constant=_no_constant)
    except RecursionError as error:
        raise JsonError("nested too deeply") from error
    except ValueError as error:  # also JSONDecodeError, UnicodeDecodeError and integers of thousands of digits
        raise JsonError(str(error)[:300]) from error
    if not isinstance(value, dict):
        raise JsonError("the top level is not an object")
    return value  # pyright: ignore[reportUnknownVariableType]


def is_int(value: object) -> bool:
    """A JSON integer; `true` is not one."""
    return isinstance(value, int) and not isinstance(value, bool)


def _no_name_twice(pairs: list[tuple[str, Any]]) -> JsonObject:
    value: JsonObject = {}
    for name, item in pairs:
        if name in value:
            raise JsonError(f"the name {name[:100]!r} appears twice in one object")
        value[name] = item
    return value


def _no_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not JSON")

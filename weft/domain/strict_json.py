"""JSON from outside: bounded, no name twice, no NaN, no Infinity, no half character, one object at the top."""

import json
import re
from typing import Any, NoReturn

MAX_VALUES = 4_000_000  # a tokenizer of 256,000 tokens has 2 million; each takes up to 100 bytes of memory
MAX_CONTAINERS = 1 << 17  # arrays and objects of a request: parsing them holds the interpreter for up to 60 ms

JsonObject = dict[str, Any]
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """The text is not the expected JSON; the message names the place."""


def parse_object(raw: bytes, *, max_bytes: int) -> JsonObject:
    """Parse UTF-8 JSON text to its object. Raises JsonError, never anything else."""
    if len(raw) > max_bytes:
        raise JsonError(f"{len(raw)} bytes, the limit is {max_bytes}")
    if sum(map(raw.count, b"[{,")) > MAX_VALUES:  # a value is begun by one of these, or is the only one
        raise JsonError(f"more than {MAX_VALUES} values")
    try:
        value: object = json.loads(raw.decode(), object_pairs_hook=_no_name_twice, parse_constant=_no_constant)
        _check_characters(raw, value)
    except RecursionError as error:
        raise JsonError("nested too deeply") from error
    except ValueError as error:  # also JSONDecodeError, UnicodeDecodeError and integers of thousands of digits
        raise JsonError(str(error)[:300]) from error
    if not isinstance(value, dict):
        raise JsonError("the top level is not an object")
    return value  # pyright: ignore[reportUnknownVariableType]


def too_many_containers(raw: bytes) -> bool:
    """Whether a request may hold more than `MAX_CONTAINERS` arrays and objects; [ and { inside of texts count, too."""
    return raw.count(b"[") + raw.count(b"{") > MAX_CONTAINERS


def is_int(value: object) -> bool:
    """Whether a value is a JSON integer; `true` is not one."""
    return isinstance(value, int) and not isinstance(value, bool)


def _no_name_twice(pairs: list[tuple[str, Any]]) -> JsonObject:
    value: JsonObject = {}
    for name, item in pairs:
        if name in value:
            raise JsonError(f"the name {name[:100]!r} appears twice in one object")
        value[name] = item
    return value


def _check_characters(raw: bytes, value: object) -> None:
    """Refuse half a surrogate pair: it is in no UTF-8 text, so no text that holds one could be sent.

    Only an escape can bring one in; files without such escapes (tokenizers of many MB) are not gone through again.
    """
    if not _SURROGATE_ESCAPE.search(raw):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise JsonError(f"a text holds {half}, half of a surrogate pair; write the whole character") from error


def _no_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not JSON")

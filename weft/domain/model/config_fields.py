"""Fields of config.json, each checked as it is read: the errors name the field, what it holds and what it may hold."""

import sys

from weft.domain.model.errors import Reason, Refused
from weft.domain.strict_json import JsonObject, is_int
from weft.domain.text import quoted


def positive(fields: JsonObject, name: str) -> float:
    """Read a number above 0. Raises Refused(ConfigInvalid)."""
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise invalid(f"{name} is {quoted(value)}, not a number above 0")
    return float(value)


def real(fields: JsonObject, name: str) -> float:
    """Read a number above 0 that transformers takes with a point alone: 1.0, not 1. Raises Refused(ConfigInvalid)."""
    if is_int(fields.get(name)):
        raise invalid(f"{name} is the integer {fields[name]}, which transformers refuses; write {fields[name]}.0")
    return positive(fields, name)


def integer(config: JsonObject, name: str, least: int, most: int) -> int:
    """Read an integer in bounds. Raises Refused(ConfigInvalid)."""
    value = config.get(name)
    if not isinstance(value, int) or not is_int(value) or not least <= value <= most:
        raise invalid(f"{name} is {quoted(value)}, not an integer from {least} to {most}")
    return value


def size(config: JsonObject, name: str, most: int) -> int:
    """Read an integer from 1 on. Raises Refused(ConfigInvalid)."""
    return integer(config, name, 1, most)


def flag(config: JsonObject, name: str, *, absent: bool = False) -> bool:
    """Read true or false. Raises Refused(ConfigInvalid)."""
    value = config.get(name, absent)
    if not isinstance(value, bool):
        raise invalid(f"{name} is {quoted(value)}, not true or false")
    return value


def invalid(what: str) -> Refused:
    """Make the error of a configuration that says nothing that could be computed."""
    return Refused(Reason.CONFIG_INVALID, f"config.json: {what}")


def unsupported(what: str) -> Refused:
    """Make the error of a configuration that says what is not computed here."""
    return Refused(Reason.UNSUPPORTED_MODEL, f"config.json: {what}")

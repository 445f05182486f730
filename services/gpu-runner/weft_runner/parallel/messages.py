"""Messages between ranks as bytes: a line of JSON, `[name, values]`, and behind it the numbers of a step.

`parallel.commands` names every message. The type of each value is that of its field, and no value of another type is
taken. What a library calls its classes does not matter: a path is sent as its text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from weft_runner import errors
from weft_runner.errors import RunnerError
from weft_runner.model.step import StepInput
from weft_runner.parallel.commands import COMMANDS, KINDS

_PLAIN: Mapping[Any, Any] = {int: {int}, float: {float, int}, str: {str}, bool: {bool}, NoneType: {NoneType}}
_LISTS: Mapping[Any, Any] = {tuple: tuple, Sequence: tuple, list: list, frozenset: frozenset}
_FORMS: Sequence[tuple[Any, Callable[[Any], Any]]] = ((PurePath, str), (frozenset, sorted), (Mapping, dict))
_WRONG = ValueError, TypeError, LookupError, AssertionError, RecursionError  # raised for what is no value of a type


class ChannelLost(Exception):
    """The other end is gone, or does not take or send anything in time."""


class MessageRefused(ChannelLost):
    """A message of unknown form, at its sender or its receiver: the ranks are out of step."""


_ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RunnerError)]
_NAMED = {kind.__name__: kind for kind in (*KINDS, *_ERRORS, MessageRefused)}


def pack_message(message: Any) -> bytes:
    """Raises MessageRefused."""
    step = message[1].packed() if isinstance(message, tuple) and message[0] == "run" else b""
    try:
        return _ENCODER.encode(message).encode() + b"\n" + step
    except (TypeError, ValueError) as error:
        raise MessageRefused(f"a message that cannot be sent: {error}") from error


def unpack_message(body: bytes, answer: Callable[[MessageRefused], None]) -> Any:
    """Raises MessageRefused: `answer` has told the other end then, or it comes from there."""
    try:
        message = _unpacked(body)
    except MessageRefused as error:
        with suppress(ChannelLost):
            answer(error)
        raise
    if isinstance(message, MessageRefused):
        raise message
    return message


def _unpacked(body: bytes) -> Any:
    line, _, step = body.partition(b"\n")
    try:
        name, *values = message = json.loads(line)
        if name in _NAMED:
            return _read(_NAMED[name], message)
        if name not in COMMANDS:
            raise MessageRefused(f"a message with the name {str(name)[:100]!r}, which no rank sends")
        if name == "run":
            return name, StepInput.unpacked(step), _read(COMMANDS[name][1], values[1])
        return name, *(_read(hint, value) for hint, value in zip(COMMANDS[name], values, strict=True))
    except _WRONG as error:
        raise MessageRefused(f"a message that cannot be read: {type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    """Return the parts of a value that JSON does not know."""
    kind = type(value)
    for library_kind, form in _FORMS:
        if isinstance(value, library_kind):
            return form(value)
    if kind.__module__.partition(".")[0] in ("weft", "weft_runner"):
        if is_dataclass(value):
            return None if kind is StepInput else [kind.__name__, *(getattr(value, name) for name in _hints(kind))]
        if isinstance(value, Enum):
            return value.value
        if isinstance(value, (RunnerError, MessageRefused)):
            return [kind.__name__, *value.args]
    named = value if hasattr(value, "__qualname__") else kind
    raise MessageRefused(f"a message with a {named.__module__}.{named.__qualname__}, which no rank sends")


_ENCODER = json.JSONEncoder(default=_plain, check_circular=False, separators=(",", ":"))


def _read(hint: Any, value: Any) -> Any:
    """Read a value of this type from JSON's. Raises _WRONG."""
    kind, parts = _form(hint)
    if kind in _PLAIN:
        if type(value) not in _PLAIN[kind]:
            raise TypeError(f"expected {kind.__name__}, got {str(value)[:100]!r}")
        return value
    if kind is Path:
        return Path(_read(str, value))
    if kind is Literal:
        return parts[parts.index(value)]
    if kind is Union:
        for part in parts:
            with suppress(*_WRONG):
                return _read(part, value)
        raise TypeError(f"expected {hint}, got {str(value)[:100]!r}")
    if kind is dict:
        key_of = int if parts[0] is int else partial(_read, parts[0])
        return {key_of(key): _read(parts[1], item) for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if not isinstance(value, list):
        raise TypeError(f"expected a list for {kind.__name__}, got {str(value)[:100]!r}")
    if kind is tuple and parts[1:] != (...,):
        return tuple(_read(part, item) for part, item in zip(parts, value, strict=True))
    if kind in _LISTS:
        plain = {*map(type, value)} <= _PLAIN.get(parts[0], set())
        return _LISTS[kind](value if plain else [_read(parts[0], item) for item in value])
    if is_dataclass(kind) or issubclass(kind, Exception):
        name, *value = value
        if name != kind.__name__:
            raise TypeError(f"expected {kind.__name__}, got {str(name)[:100]!r}")
        if not is_dataclass(kind):
            return kind(*_read(tuple[str | int, ...], value))
    hints = _hints(kind)
    return kind(**{name: _read(hints[name], item) for name, item in zip(hints, value, strict=True)})


@cache
def _form(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    kind = get_origin(hint) or hint
    return {UnionType: Union, Mapping: dict}.get(kind, kind), get_args(hint)


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    """Return the types of what a class is made of, by name."""
    names = [field.name for field in fields(kind) if field.init] if is_dataclass(kind) else kind._fields
    hints = get_type_hints(kind)
    return {name: hints[name] for name in names}

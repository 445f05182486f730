"""The form of what is printed: kubectl's tables, JSON and YAML on standard output, messages on standard error."""

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from weft.api.columns import Column, columns_of
from weft.domain.text import sanitize

Object = Mapping[str, Any]
SHORT_DIGEST = 12
NONE = "<none>"


def say(text: str, end: str = "\n") -> None:
    """Print lines on standard output."""
    sys.stdout.write(_safe(text) + end)
    sys.stdout.flush()


def note(text: str, mark: str = "") -> None:
    """Print lines on standard error: for people, not for pipes. `mark` goes before them as it is, with its colours."""
    sys.stderr.write(mark + _safe(text) + "\n")
    sys.stderr.flush()


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int] = ()) -> list[str]:
    """Set columns as kubectl does: three spaces apart, nothing after the last."""
    lines = [tuple(headers), *(tuple(map(sanitize, row)) for row in rows)]
    wide = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    wide = [max(pair) for pair in zip(wide, widths, strict=True)] if widths else wide
    return ["   ".join(cell.ljust(width) for cell, width in zip(line, wide, strict=True)).rstrip() for line in lines]


def dump(value: Any, form: str) -> str:
    """Write a value as JSON or YAML. What no terminal should get is escaped as the form does it: the value stays."""
    text = _dumped(value, form, as_it_is=True)
    return text if _safe(text) == text else _dumped(value, form, as_it_is=False)


def _dumped(value: Any, form: str, *, as_it_is: bool) -> str:
    if form == "json":
        return json.dumps(value, indent=2, ensure_ascii=not as_it_is)
    import yaml

    return yaml.safe_dump(value, sort_keys=False, allow_unicode=as_it_is).rstrip()


def _safe(text: str) -> str:
    """Escape text of tenants, because escape codes are commands in an operator's terminal."""
    return "\n".join("\t".join(map(sanitize, line.split("\t"))) for line in text.split("\n"))


def headers(kind: str, *, wide: bool) -> tuple[str, ...]:
    """The columns of `kubectl get` for this kind."""
    return ("NAME", *(column.name.upper() for column in columns_of(kind, wide=wide)))


def row(obj: Object, now: float, *, wide: bool) -> tuple[str, ...]:
    """Make an object's cells for these headers."""
    return (obj["metadata"]["name"], *(_cell(obj, column, now) for column in columns_of(obj["kind"], wide=wide)))


def _cell(obj: Object, column: Column, now: float) -> str:
    value = column.value(obj)
    if value is None:
        return NONE
    if column.kind == "date":
        return age(value, now)
    return str(value).lower() if column.kind == "boolean" else str(value)


def short(digest: str | None) -> str:
    """Shorten a digest to its first twelve hex digits."""
    return digest.partition(":")[2][:SHORT_DIGEST] if digest else NONE


def age(created: str, now: float) -> str:
    """Write how long ago a time was, as kubectl does: 12s, 5m, 3h, 4d."""
    seconds = max(int(now - datetime.fromisoformat(created).timestamp()), 0)
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size or (unit != "m" and seconds >= size):
            return f"{seconds // size}{unit}"
    return f"{seconds}s"

"""Two replays side by side: what is equal, what a table of names and reasons explains, and what differs."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import Any

from harness.differential.values import Json

MAX_CHARS = 160  # of a value that is shown
NOTHING = {"=": "nothing"}
Streams = Mapping[tuple[str, str], Sequence[tuple[Json, Json]]]


class Names:
    """What a change has renamed, added, removed and meant to change: `renames.toml` says how to write it."""

    def __init__(self, table: Mapping[str, Mapping[str, str]]) -> None:
        self.names, self.fields = table.get("names", {}), table.get("fields", {})
        self.added, self.removed = table.get("added", {}), table.get("removed", {})
        self.explained = {"files: *": "for information", **table.get("explained", {})}

    def __bool__(self) -> bool:
        return bool(self.names or self.fields or self.removed)

    def name(self, old: str) -> str:
        """A class, a member, a function, or a kind of answers that begins with one."""
        first, space, rest = old.partition(" ")
        of, dot, member = first.partition(".")
        return (self.names.get(first) or self.names.get(of, of) + dot + member) + space + rest

    def new(self, data: Json) -> Json:
        """What the old tree has written, in the words of the new one."""
        match data:
            case {"=": str(old), **fields}:
                made: dict[str, Any] = {"=": (name := self.name(old))}
                for field, value in fields.items():
                    if f"{name}.{field}" not in self.removed:
                        _put(made, self.fields.get(f"{name}.{field}", field), self.new(value))
                return made
            case {"=enum": str(old)}:
                return {"=enum": self.name(old)}
            case dict():
                return {name: self.new(value) for name, value in data.items()}
            case list():
                return [self.new(value) for value in data]
            case _:
                return data

    def common(self, data: Json) -> Json:
        """What the new tree has written, without the fields that the old one does not have."""
        if isinstance(data, list):
            return [self.common(value) for value in data]
        if not isinstance(data, dict):
            return data
        of = data.get("=")
        return {name: self.common(value) for name, value in data.items() if f"{of}.{name}" not in self.added}

    def record(self, record: Json) -> Json:
        """A recording of the old tree as the new one replays it."""
        made = self.new(record)
        return made | {key: self.name(made[key]) for key in ("of", "call") if key in made}

    def reason(self, what: str) -> str:
        """Why this difference is meant; empty: nothing says so."""
        return next((why for pattern, why in self.explained.items() if fnmatchcase(what, pattern)), "")


def _put(into: dict[str, Any], path: str, value: Json) -> None:
    """A value at "name", or at "part:Class.name": in the field `part`, which is of that class."""
    part, _, rest = path.partition(".")
    if rest:
        name, _, of = part.partition(":")
        _put(into.setdefault(name, {"=": of}), rest, value)
    else:
        into[part] = value


@dataclass
class Difference:
    """Differences in one place. `first`: the record of the first one, when, and both values."""

    first: tuple[str, Json, Json, Json]
    reason: str
    count: int = 0


@dataclass(frozen=True)
class Report:
    """What a comparison has found. `answers`: how many there are of each kind."""

    answers: Counter[str] = field(default_factory=Counter[str])
    differences: dict[str, Difference] = field(default_factory=dict[str, Difference])

    @property
    def unexplained(self) -> dict[str, Difference]:
        return {what: one for what, one in self.differences.items() if not one.reason}

    def text(self) -> str:
        areas = Counter[str]()
        for kind, count in self.answers.items():
            areas[kind.partition(":")[0]] += count
        lines = [f"{count} answers of {area}" for area, count in areas.items()]
        lines.append(f"{self.answers['machine: Assign']} of them decisions of the scheduler")
        for what, one in sorted(self.differences.items(), key=lambda item: not item[1].reason):
            (name, at, old, new), state = one.first, f"explained ({one.reason})" if one.reason else "DIFFERS"
            lines.append(f"{state}: {what}, {one.count} times; first in {name} at {_short(at)}:")
            lines += [f"    old {_short(old)}", f"    new {_short(new)}"]
        return "\n".join([*lines, f"differences that nothing explains: {len(self.unexplained)}"])


def compare(old: Iterable[Json], new: Iterable[Json], names: Names) -> Report:
    """The lines of two replays."""
    before, after, report = _streams(old, names.new, names.name), _streams(new, names.common, str), Report()
    for name, kind in dict.fromkeys([*before, *after]):
        lines, others = before.get((name, kind), ()), after.get((name, kind), ())
        key = f"{name.partition(' ')[0]}: {kind}"
        report.answers[key] += len(lines)
        for at, path, first, second in _of_stream(lines, others, kind):
            what = f"{key}: {path}"
            new_one = Difference((name, at, first, second), names.reason(what))
            report.differences.setdefault(what, new_one).count += 1
    return report


def _streams(lines: Iterable[Json], mapped: Callable[[Json], Json], named: Callable[[str], str]) -> Streams:
    found: dict[tuple[str, str], list[tuple[Json, Json]]] = defaultdict(list)
    for name, kind, at, value in lines:
        found[name, named(kind)].append((mapped(at), mapped(value)))
    return found


def _of_stream(
    old: Sequence[tuple[Json, Json]], new: Sequence[tuple[Json, Json]], kind: str
) -> Iterator[tuple[Json, str, Json, Json]]:
    """Say when and where the answers of one kind to one record differ; no more after one too many or too few."""
    for before, after in zip_longest(old, new):
        if before is None or after is None or before[0] != after[0]:
            at, _ = before or after or (None, None)
            yield at, "when, or how many", before or NOTHING, after or NOTHING
            return
        if before[1] != after[1]:
            for path, first, second in _paths(before[1], after[1], kind):
                yield before[0], path, first, second


def _paths(old: Json, new: Json, path: str) -> Iterator[tuple[str, Json, Json]]:
    """Each place where two values differ: its class and field, or the way below the field."""
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict) and old.get("=") == new.get("="):
        here = old.get("=", path)
        for name in dict.fromkeys([*old, *new]):
            yield from _paths(old.get(name, NOTHING), new.get(name, NOTHING), f"{here}.{name}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for before, after in zip(old, new, strict=True):
            yield from _paths(before, after, f"{path}[]")
    else:
        yield path, old, new


def _short(value: Json) -> str:
    text = "nothing" if value == NOTHING else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."

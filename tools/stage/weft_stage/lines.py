"""The raw lines of benchmarks: one JSON object a line, the newest line of each figure.

A line tells one figure: what was measured (`case`, `metric`, `value`, `unit`), against what (`baseline`, same unit,
`ratio` = value / baseline; `bound_fraction` = share of the machine's bound reached), what was aimed at (`target`, e.g.
">= 10", "<= 0.5", and `met`), and where it came from (`command`, `machine`, `versions`, `date`). A figure that could
not be measured has `value` and `met` None: it is shown as such, it never counts as met. In a file a line leaves out
fields with their defaults, and an origin that is that of the line before it.
"""

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MACHINE = "machine, by "  # how the case of a line about the machine itself begins
COMPARISONS = {">=": operator.ge, "<=": operator.le}


class BadTarget(ValueError):
    """A target that is not ">= NUMBER" or "<= NUMBER"."""


class BadLine(ValueError):
    """A raw line that is not one of ours; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Line:
    """One figure. `met` follows from value and target; `ratio` from value and baseline."""

    case: str
    metric: str
    value: float | None
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    bound_fraction: float | None = None
    target: str | None = None
    met: bool | None = None
    command: str = ""
    machine: str = ""
    versions: str = ""
    date: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Return what a figure is recognised by: the newest line of a key counts, on whichever machine."""
        return self.case, self.metric

    @property
    def is_missed(self) -> bool:
        """Return whether the line has a target that it does not meet. An unmeasured figure misses its target."""
        return self.target is not None and self.met is not True


ORIGIN = ("command", "machine", "versions")  # fields that are alike in all lines of a run
DEFAULTS = {each.name: each.default for each in fields(Line) if each.name not in ORIGIN}


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a run's figures, the same for each of its lines."""

    command: str
    machine: str
    versions: str

    def line(
        self,
        case: str,
        metric: str,
        value: float | None,
        unit: str,
        *,
        baseline: float | None = None,
        bound_fraction: float | None = None,
        target: str | None = None,
    ) -> Line:
        """Make a line of this run, dated now (UTC, to the second)."""
        ratio = value / baseline if value is not None and baseline else None
        return Line(
            case=case, metric=metric, value=value, unit=unit, baseline=baseline, ratio=ratio,
            bound_fraction=bound_fraction, target=target, met=is_met(value, target),
            command=self.command, machine=self.machine, versions=self.versions,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )  # fmt: skip


def is_met(value: float | None, target: str | None) -> bool | None:
    """Does the value meet the target? None without a value or a target. Raises BadTarget."""
    if target is None:
        return None
    sign, _, number = target.partition(" ")
    try:
        bound = float(number)
        compare = COMPARISONS[sign]
    except (KeyError, ValueError) as error:
        raise BadTarget(f"target {target!r}: write '>= NUMBER' or '<= NUMBER'") from error
    return None if value is None else bool(compare(value, bound))


def append(path: Path, lines: Iterable[Line]) -> None:
    """Add lines to a raw file, making it if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as out:
        out.writelines(_text(line) for line in lines)


def write(path: Path, lines: Iterable[Line]) -> None:
    """Replace a raw file. A line leaves out the origin of the line before it. An interruption leaves the old file."""
    new, before = path.with_suffix(".new"), dict[str, Any]()
    with new.open("w", encoding="utf-8") as out:
        for line in lines:
            out.write(_text(line, before))
            before = {name: getattr(line, name) for name in ORIGIN}
    new.replace(path)


def _text(line: Line, before: Mapping[str, Any] = {}) -> str:
    """Return a line as JSON, without the fields that have their defaults or are as in `before`."""
    values = asdict(line)
    return json.dumps({k: v for k, v in values.items() if v != DEFAULTS.get(k, ...) and v != before.get(k, ...)}) + "\n"


def read(path: Path) -> list[Line]:
    """Read all lines, oldest first. Lines without an origin have that of the line before. Raises BadLine."""
    lines = list[Line]()
    for place, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if text:
            lines.append(_parse(path, place, text, lines[-1] if lines else None))
    return lines


def newest(lines: Iterable[Line]) -> list[Line]:
    """Return the last line of each key, in the order in which the keys first appeared."""
    kept: dict[tuple[str, ...], Line] = {}
    for line in lines:
        kept[line.key] = line
    return list(kept.values())


def missed(lines: Iterable[Line]) -> list[Line]:
    """Return the newest lines that miss a target."""
    return [line for line in newest(lines) if line.is_missed]


def told(line: Line) -> str:
    """Return a figure as one line of text: case, metric, value with unit, and what it is compared with."""
    value = "not measured" if line.value is None else f"{number(line.value)} {line.unit}".rstrip()
    parts = [f"{line.case}: {line.metric}: {value}"]
    parts += [f"{number(line.ratio)} times {number(line.baseline)}"] if line.ratio is not None else []
    parts += [f"{line.bound_fraction:.0%} of the bound"] if line.bound_fraction is not None else []
    parts += [f"target {line.target}: {'met' if line.met else 'missed'}"] if line.target is not None else []
    return ", ".join(parts)


def number(value: float | None) -> str:
    """Return three significant digits; no decimals from 100 on. Empty without a value."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the nearest-rank percentile of a non-empty sequence."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * percent // 100) - 1))]


def _parse(path: Path, place: int, text: str, before: Line | None) -> Line:
    try:
        values: dict[str, Any] = json.loads(text)
        if before is not None:
            values = {name: getattr(before, name) for name in ORIGIN} | values
        return Line(**values)
    except (json.JSONDecodeError, TypeError) as error:
        raise BadLine(f"{path}:{place}: not a benchmark line: {error}") from error

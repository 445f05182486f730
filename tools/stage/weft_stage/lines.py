"""The raw lines of benchmarks: one JSON object a line, appended, never rewritten.

A line tells one figure: what was measured (`case`, `metric`, `value`, `unit`), against what (`baseline`, same unit,
`ratio` = value / baseline; `bound_fraction` = share of the machine's bound reached), what was aimed at (`target`, e.g.
">= 10", "<= 0.5", and `met`), and where it came from (`command`, `machine`, `versions`, `date`). A figure that could
not be measured has `value` and `met` None: it is shown as such, it never counts as met.
"""

import json
import operator
from collections.abc import Iterable, Sequence
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
    def run(self) -> tuple[str, str]:
        """The run that a line is of: day and command."""
        return self.date[:10], self.command

    @property
    def of_machine(self) -> bool:
        """True where a line tells of the machine, not of us or a peer."""
        return self.case.startswith(MACHINE)


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
    """Replace a raw file. An interruption leaves the old file."""
    new = path.with_suffix(".new")
    new.write_text("".join(map(_text, lines)), encoding="utf-8")
    new.replace(path)


def _text(line: Line) -> str:
    """Return a line as JSON, without the fields that have their defaults."""
    values = asdict(line)
    kept = {each.name: values[each.name] for each in fields(line) if values[each.name] != each.default}
    return json.dumps(kept) + "\n"


def read(path: Path) -> list[Line]:
    """Read all lines of a raw file, oldest first. Raises BadLine."""
    return [_parse(path, n, text) for n, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if text]


def newest(lines: Iterable[Line]) -> list[Line]:
    """Return the last line of each key, in the order in which the keys first appeared."""
    kept: dict[tuple[str, ...], Line] = {}
    for line in lines:
        kept[line.key] = line
    return list(kept.values())


def missed(lines: Iterable[Line]) -> list[Line]:
    """Return the newest lines that have a target and do not meet it; unmeasured ones are among them."""
    return [line for line in newest(lines) if line.target is not None and line.met is not True]


def told(line: Line) -> str:
    """Return a figure as one line of text: case, metric, value with unit, and what it is compared with."""
    value = "not measured" if line.value is None else f"{number(line.value)} {line.unit}".rstrip()
    parts = [f"{line.case}: {line.metric}: {value}"]
    parts += [f"{number(line.ratio)} of {number(line.baseline)}"] if line.ratio is not None else []
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


def _parse(path: Path, number: int, text: str) -> Line:
    try:
        fields: dict[str, Any] = json.loads(text)
        return Line(**fields)
    except (json.JSONDecodeError, TypeError) as error:
        raise BadLine(f"{path}:{number}: not a benchmark line: {error}") from error

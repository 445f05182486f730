"""Raw lines -> a Markdown page that people read: newest figures, grouped by machine, targets beside them."""

from collections.abc import Iterable, Sequence
from itertools import groupby, takewhile

from weft_bench.charts import charts
from weft_bench.lines import Line, newest

HEAD = (
    "| case | metric | value | unit | baseline | ratio | of bound | target | met | run |\n"
    "|---|---|---:|---|---:|---:|---:|---|---|---:|"
)
PICTURES = ("kept of what the bound allows", "decode, times as fast", "prefill, times as fast")


def page(name: str, about: str, lines: Iterable[Line]) -> str:
    """The page of benchmark `name`; `about` says what is measured and how to read it."""
    current = sorted(_of_numbered_runs(newest(lines)), key=lambda line: line.machine)
    parts = [f"# Benchmark: {name}", about.strip()]
    parts += [_section(machine, list(group)) for machine, group in groupby(current, key=lambda line: line.machine)]
    parts += [] if current else ["Nothing has been measured yet."]
    parts.append(f"Raw lines: `docs/benchmarks/raw/{name}.jsonl`. This page is written by `weft bench {name}`.")
    return "\n\n".join(parts) + "\n"


def _of_numbered_runs(lines: Sequence[Line]) -> list[Line]:
    """Without what the machine was in runs from which no other figure is left."""
    runs = {(line.machine, line.run) for line in lines if not line.of_machine}
    return [line for line in lines if (line.machine, line.run) in runs]


def _section(machine: str, lines: Sequence[Line]) -> str:
    """The runs that the figures come from, numbered; pictures; the table."""
    versions: dict[tuple[str, str], dict[str, None]] = {}  # of each run, each once, in their order
    for line in lines:
        versions.setdefault(line.run, {})[line.versions] = None
    runs = {run: number for number, run in enumerate(versions, 1)}
    told = [_told(runs[run], *run, list(found)) for run, found in versions.items()]
    rows = [_row(line, runs[line.run]) for line in lines]
    return "\n\n".join([f"## {machine}", "\n".join(told), *charts(PICTURES, lines), "\n".join([HEAD, *rows])])


def _told(number: int, day: str, command: str, versions: Sequence[str]) -> str:
    """A run: what all of its versions begin with, and below it how each of them goes on."""
    parts = [each.split(", ") for each in versions]
    shared = [same[0] for same in takewhile(lambda same: len(set(same)) == 1, zip(*parts, strict=False))]
    rests = [", ".join(each[len(shared) :]) for each in parts]
    head = ", ".join([f"{number}. {day}", f"`{command}`", *shared])
    return "\n".join([head, *(f"   - {rest}" for rest in rests if rest)])


def _row(line: Line, run: int) -> str:
    value = "not measured" if line.value is None else _number(line.value)
    met = {True: "yes", False: "**no**", None: "" if line.target is None else "not measured"}[line.met]
    bound = "" if line.bound_fraction is None else f"{line.bound_fraction:.0%}"
    cells = [line.case, line.metric, value, line.unit, _number(line.baseline), _number(line.ratio), bound]
    return "| " + " | ".join([*cells, line.target or "", met, str(run)]) + " |"


def _number(value: float | None) -> str:
    """Three significant digits; no decimals where there are three digits anyway."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

"""Raw lines -> a Markdown page that people read: newest figures, grouped by machine, targets beside them."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from weft_bench.lines import Line, newest

HEAD = (
    "| case | metric | value | unit | baseline | ratio | of bound | target | met |\n"
    "|---|---|---:|---|---:|---:|---:|---|---|"
)


def page(name: str, about: str, lines: Iterable[Line]) -> str:
    """The page of benchmark `name`; `about` says what is measured and how to read it."""
    current = sorted(newest(lines), key=lambda line: line.machine)
    parts = [f"# Benchmark: {name}", about.strip()]
    parts += [_section(machine, list(group)) for machine, group in groupby(current, key=lambda line: line.machine)]
    parts += [] if current else ["Nothing has been measured yet."]
    parts.append(f"Raw lines: `docs/benchmarks/raw/{name}.jsonl`. This page is written by `weft bench {name}`.")
    return "\n\n".join(parts) + "\n"


def _section(machine: str, lines: Sequence[Line]) -> str:
    latest = max(lines, key=lambda line: line.date)
    origin = f"{latest.date[:10]}, `{latest.command}`, {latest.versions}"
    return "\n".join([f"## {machine}\n\n{origin}\n", HEAD, *(_row(line) for line in lines)])


def _row(line: Line) -> str:
    value = "not measured" if line.value is None else _number(line.value)
    met = {True: "yes", False: "**no**", None: "" if line.target is None else "not measured"}[line.met]
    bound = "" if line.bound_fraction is None else f"{line.bound_fraction:.0%}"
    cells = [line.case, line.metric, value, line.unit, _number(line.baseline), _number(line.ratio), bound]
    return "| " + " | ".join([*cells, line.target or "", met]) + " |"


def _number(value: float | None) -> str:
    """Three significant digits; no decimals where there are three digits anyway."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

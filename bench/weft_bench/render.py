"""Raw lines -> a Markdown page that people read: newest figures, grouped by machine, targets beside them."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, takewhile

from weft_bench.charts import charts
from weft_stage.lines import Line, newest

HEAD = (
    "| case | metric | value | unit | baseline | ratio | of bound | target | met | run |\n"
    "|---|---|---:|---|---:|---:|---:|---|---|---:|"
)
BRACKETS = "In brackets: the value over its baseline (x), the share of its bound (%), and its target."
FEWEST_CASES, FEWEST_METRICS = 3, 3  # of a table with a row for each case
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
    parts = [f"## {machine}", "\n".join(told), *charts(PICTURES, lines), *_tables(lines, runs)]
    return "\n\n".join(parts)


def _tables(lines: Sequence[Line], runs: Mapping[tuple[str, str], int]) -> list[str]:
    """A row for each case and a column for each metric where cases share their metrics; else a row for each figure."""
    cases = dict[str, list[Line]]()
    for line in lines:
        cases.setdefault(line.case, []).append(line)
    groups = dict[tuple[tuple[str, str], ...], list[list[Line]]]()
    for found in cases.values():
        columns = tuple((line.metric, line.unit) for line in found)
        home = next((each for each in groups if set(each) >= set(columns)), columns)
        groups.setdefault(home, []).append(found)
    by_case, by_figure = list[str](), list[str]()
    for columns, group in groups.items():
        if len(group) < FEWEST_CASES or len(columns) < FEWEST_METRICS or group[0][0].of_machine:
            by_figure += [_row(line, runs[line.run]) for found in group for line in found]
        else:
            by_case.append(_by_case(columns, group, runs))
    note = [BRACKETS] if by_case else []
    return [*note, *by_case, *(["\n".join([HEAD, *by_figure])] if by_figure else [])]


def _by_case(
    columns: Sequence[tuple[str, str]], group: Sequence[Sequence[Line]], runs: Mapping[tuple[str, str], int]
) -> str:
    """A table of cases; what the names of all of them begin with stands in its head."""
    names = [found[0].case.split(", ") for found in group]
    columns_of_words = zip(*(name[:-1] for name in names), strict=False)
    shared = sum(1 for _ in takewhile(lambda words: len(set(words)) == 1, columns_of_words))
    heads = [
        ", ".join(names[0][:shared]) or "case",
        *(f"{metric} [{unit}]" if unit else metric for metric, unit in columns),
    ]
    rows = [f"| {' | '.join([*heads, 'run'])} |", "|---" + "|---:" * (len(columns) + 1) + "|"]
    for name, found in zip(names, group, strict=True):
        cells = {line.metric: _cell(line) for line in found}
        numbers = dict.fromkeys(str(runs[line.run]) for line in found)
        values = [cells.get(metric, "") for metric, _ in columns]
        rows.append(f"| {' | '.join([', '.join(name[shared:]), *values, ', '.join(numbers)])} |")
    return "\n".join(rows)


def _cell(line: Line) -> str:
    """A value with what it is compared with; a missed target is bold."""
    if line.value is None:
        return "not measured"
    beside = [] if line.ratio is None or line.baseline == line.value else [f"{_number(line.ratio)}x"]
    beside += [] if line.bound_fraction is None else [f"{line.bound_fraction:.0%}"]
    if line.target is not None:
        beside.append(f"{line.target}: yes" if line.met else f"**{line.target}: no**")
    return f"{_number(line.value)} ({', '.join(beside)})" if beside else _number(line.value)


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

"""Pages of figures. People write the method at the head of a page, this module the picture and the table below it."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from weft_bench.cases import BENCHMARKS, PAGES
from weft_stage.lines import Line, newest, number, read

MARK = "<!-- Everything below is written by `weft bench`. -->"
COLUMNS = ("case", "metric", "value", "ratio", "of bound", "target", "run")
MAX_METRICS = 5  # with a column each
MAX_BARS = 16
TIMES = "times as fast"


def write_page(docs: Path, name: str) -> Path:
    """Write the generated part of a page from the newest raw lines of its benchmarks. Returns the page's path."""
    path = docs / f"{name}.md"
    head = path.read_text(encoding="utf-8").partition(MARK)[0] if path.exists() else f"# {PAGES[name].title}\n\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{head}{MARK}\n\n{body(docs, name)}", encoding="utf-8")
    return path


def body(docs: Path, name: str) -> str:
    """Return a page's generated part: picture, table, figures in which Weft is slower, runs."""
    shown = {benchmark: lines for benchmark in BENCHMARKS if (lines := shown_lines(docs, name, benchmark))}
    lines = [line for of_benchmark in shown.values() for line in of_benchmark]
    if not lines:
        return "Nothing has been measured yet.\n"
    runs = {run: n for n, run in enumerate(dict.fromkeys(_run(line) for line in lines), 1)}
    parts = [picture(PAGES[name].picture, lines)]
    for benchmark, of_benchmark in shown.items():
        parts += [f"## Figures of `weft bench {benchmark}`", table(of_benchmark, runs)]
    slower = [f"- {line.case}: {line.metric}: {_value(line)}" for line in lines if is_slower(line)]
    parts += ["## Where Weft is slower, or misses a target", "\n".join(slower) or "Nowhere."]
    parts += [
        "## Runs",
        "\n".join(f"{n}. {day}: `{command}`, {machine}" for (day, command, machine), n in runs.items()),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def shown_lines(docs: Path, page: str, benchmark: str) -> list[Line]:
    """Return the newest lines of a benchmark that its page shows; none if it has another page."""
    row, raw = BENCHMARKS[benchmark], docs / "raw" / f"{benchmark}.jsonl"
    if row.page != page or not raw.exists():
        return []
    return [line for line in newest(read(raw)) if any(fnmatchcase(line.metric, pattern) for pattern in row.shown)]


def is_slower(line: Line) -> bool:
    """Return whether a figure misses its target, or is a comparison that Weft loses."""
    return line.met is False or (line.metric.endswith(TIMES) and line.value is not None and line.value < 1)


def picture(metric: str, lines: Iterable[Line]) -> str:
    """Return horizontal bars of a metric, of the last cases, as Mermaid; empty with fewer than two values."""
    every = {line.case: line for line in lines if line.metric == metric and line.value is not None}
    values = dict([*every.items()][-MAX_BARS:])
    if len(values) < 2:
        return ""
    labels = ", ".join(f'"{case.replace(chr(34), chr(39))}"' for case in values)
    lengths = [line.value or 0.0 for line in values.values()]
    bars, unit = ", ".join(f"{length:.3g}" for length in lengths), next(iter(values.values())).unit
    rows = [
        "```mermaid", "xychart-beta horizontal", f'    title "{metric} ({unit})"', f"    x-axis [{labels}]",
        f"    y-axis 0 --> {max([1e-9, *lengths]) * 1.1:.3g}", f"    bar [{bars}]", "```",
    ]  # fmt: skip
    return "\n".join(rows)


def _run(line: Line) -> tuple[str, str, str]:
    return line.date[:10], line.command, line.machine


def table(lines: Sequence[Line], runs: Mapping[tuple[str, str, str], int]) -> str:
    """Return a row for each case with a column for each metric, or a row for each figure if there are many metrics."""
    metrics = list(dict.fromkeys(line.metric for line in lines))
    if len(metrics) > MAX_METRICS:
        return _markdown(COLUMNS, [_cells(line, runs) for line in lines])
    rows = dict[tuple[str, str], dict[str, str]]()
    for line in lines:
        missed = f" (**missed**: {line.target})" if line.met is False else ""
        rows.setdefault((line.case, str(runs[_run(line)])), {})[line.metric] = _value(line) + missed
    cells = [[case, *(row.get(metric, "") for metric in metrics), run] for (case, run), row in rows.items()]
    return _markdown(["case", *metrics, "run"], cells)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table without the columns that are empty in all rows."""
    shown = [place for place in range(len(head)) if any(row[place] for row in rows)]
    every = [head, ["---" if name in ("case", "metric", "target") else "---:" for name in head], *rows]
    return "\n".join(f"| {' | '.join(row[place] for place in shown)} |" for row in every)


def _cells(line: Line, runs: Mapping[tuple[str, str, str], int]) -> Sequence[str]:
    bound = "" if line.bound_fraction is None else f"{line.bound_fraction:.0%}"
    met = {True: f"{line.target}: met", False: f"{line.target}: **missed**", None: line.target or ""}[line.met]
    return line.case, line.metric, _value(line), number(line.ratio), bound, met, str(runs[_run(line)])


def _value(line: Line) -> str:
    return "not measured" if line.value is None else f"{number(line.value)} {line.unit}".rstrip()

"""Pages of figures. People write the method at the head of a page, this module the picture and the table below it."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from weft_bench.cases import BENCHMARKS, PAGES
from weft_stage.lines import Line, newest, number, read

MARK = "<!-- Everything below is written by `weft bench`. -->"
COLUMNS = ("case", "metric", "value", "ratio", "of bound", "target", "run")
MAX_METRICS = 5  # with a column each
MAX_BARS = 12
TIMES = "times as fast"


def write_page(docs: Path, name: str) -> Path:
    """Write the generated part of a page from the newest raw lines of its benchmarks. Returns the page's path."""
    path = docs / f"{name}.md"
    head = path.read_text(encoding="utf-8").partition(MARK)[0] if path.exists() else f"# {PAGES[name].title}\n\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{head}{MARK}\n\n{body(docs, name)}", encoding="utf-8")
    return path


def body(docs: Path, name: str) -> str:
    """Return a page's generated part: picture, tables, figures in which Weft is slower, runs."""
    every = {benchmark: lines for benchmark in BENCHMARKS if (lines := kept_lines(docs, name, benchmark))}
    shown = {benchmark: [line for line in lines if is_shown(line, benchmark)] for benchmark, lines in every.items()}
    slower = [line for lines in every.values() for line in lines if is_slower(line)]
    if not every:
        return "Nothing has been measured yet.\n"
    listed = [line for lines in shown.values() for line in lines]
    runs = {run: n for n, run in enumerate(dict.fromkeys(_run(line) for line in listed), 1)}
    parts = [picture(PAGES[name].picture, listed)]
    for benchmark, lines in shown.items():
        text = table(lines, runs) if lines else f"No figure that this page shows is kept; see `raw/{benchmark}.jsonl`."
        parts += [f"## Figures of `weft bench {benchmark}`", text]
    parts += ["## Where Weft is slower, or misses a target", "\n".join(map(_slower, slower)) or "Nowhere."]
    run_list = "\n".join(f"{n}. {day}: `{command}`, {machine}" for (day, command, machine), n in runs.items())
    return "\n\n".join(filter(None, [*parts, "## Runs" if runs else "", run_list])) + "\n"


def kept_lines(docs: Path, page: str, benchmark: str) -> list[Line]:
    """Return the newest lines of a benchmark; none if it has another page."""
    raw = docs / "raw" / f"{benchmark}.jsonl"
    return newest(read(raw)) if BENCHMARKS[benchmark].page == page and raw.exists() else []


def is_shown(line: Line, benchmark: str) -> bool:
    """Return whether the page's table has the figure."""
    return any(fnmatchcase(line.metric, pattern) for pattern in BENCHMARKS[benchmark].shown)


def is_slower(line: Line) -> bool:
    """Return whether a figure misses its target, or is a comparison that Weft loses."""
    return line.is_missed or (line.metric.endswith(TIMES) and line.value is not None and line.value < 1)


def _slower(line: Line) -> str:
    target = f", target {_target(line)}" if line.is_missed else ""
    return f"- {line.case}: {line.metric}: {_value(line)}{target}"


def _target(line: Line) -> str:
    return f"{line.target} {line.unit}".rstrip()


def picture(metric: str, lines: Iterable[Line]) -> str:
    """Return horizontal bars of a metric as Mermaid, of the largest values; empty with fewer than two values."""
    every = {line.case: line for line in lines if line.metric == metric and line.value is not None}
    values = dict(sorted(every.items(), key=lambda item: -(item[1].value or 0.0))[:MAX_BARS])
    if len(values) < 2:
        return ""
    labels = ", ".join(f'"{case.replace(chr(34), chr(39))}"' for case in values)
    lengths = [line.value or 0.0 for line in values.values()]
    bars, unit = ", ".join(f"{length:.4g}" for length in lengths), next(iter(values.values())).unit
    note = f", the largest {MAX_BARS} of {len(every)}" if len(every) > MAX_BARS else ""
    rows = [
        "```mermaid", "xychart-beta horizontal", f'    title "{metric} ({unit}){note}"', f"    x-axis [{labels}]",
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
        missed = f" (**missed**: {_target(line)})" if line.met is False else ""
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
    target = _target(line) if line.target else ""
    met = {True: f"{target}: met", False: f"{target}: **missed**", None: target}[line.met]
    return line.case, line.metric, _value(line), number(line.ratio), bound, met, str(runs[_run(line)])


def _value(line: Line) -> str:
    """Return value and unit. A value that misses its target has a digit more: rounding must not hide the miss."""
    if line.value is None:
        return "not measured"
    return f"{f'{line.value:.4g}' if line.met is False else number(line.value)} {line.unit}".rstrip()

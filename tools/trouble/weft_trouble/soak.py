"""`weft bench soak`: a stack does for hours what people do with it; what each of its processes needs meanwhile.

At the same time, on a stack of its own that asks for API keys: streams of three models, greedy and sampled; answers
that clients leave; adapters that come, change and go; broken sources; keys that are made, used and revoked; wrong
requests; a pool that is scaled to zero and back. Every answer is compared, token by token, with that of the same
request when nothing else ran. *wrong* counts what differs, and promises that were broken: an older content after an
adapter was Ready with a newer one, an answer of an adapter two seconds after its deletion, or of a key two seconds
after it was revoked, a wrong request that was not refused.

Every process is looked at every ten seconds: resident memory (VmRSS), descriptors and threads. A slope is the median
of the slopes between all pairs of samples (Theil and Sen) after the first minutes, in which caches fill. Processes that
came or went meanwhile (runners of the scaled pool) have none. Once everything is idle, all pages of every runner are
free.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import combinations, groupby
from pathlib import Path
from statistics import median

from weft_stage.lines import Line, Origin, newest

Curves = Mapping[str, Sequence[tuple[float, float]]]  # (minute, resident MB) of each process
Draw = Callable[[Curves], str]  # -> an SVG picture

RESIDENT, DESCRIPTORS, THREADS = "resident", "descriptors", "threads"
UNITS = {RESIDENT: "MB", DESCRIPTORS: "descriptors", THREADS: "threads"}
TARGETS = {RESIDENT: "<= 2", DESCRIPTORS: "<= 1", THREADS: "<= 1"}  # an hour
STACK, HOUR_S, EVERY_MINUTES = "the stack", 3600.0, 5
MAX_PAIRED_SAMPLES = 400  # samples whose pairs a slope takes
WRITTEN_S = 30  # the lines of a soak are written within


@dataclass(frozen=True, slots=True)
class Sample:
    """What one process needs at a moment. `process`: its component and pid."""

    at_s: float
    process: tuple[str, int]
    needs: Mapping[str, float]  # by RESIDENT, DESCRIPTORS, THREADS


@dataclass(frozen=True, slots=True)
class Done:
    """What was done: by activity, how many ended as they should; `wrong`: a sentence for each that did not."""

    right: Mapping[str, int]
    wrong: Sequence[str]
    unbalanced: Sequence[str]  # runners whose pages do not add up when all is idle


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the median slope between pairs of (x, y) with different x; 0 where there are none."""
    some = points[:: max(1, len(points) // MAX_PAIRED_SAMPLES)]
    return median([(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(some, 2) if x1 != x2] or [0.0])


def lines(
    origin: Origin, samples: Sequence[Sample], done: Done, stack: Mapping[str, float], *, warm_s: float
) -> Iterator[Line]:
    """Yield the figures of one soak. `stack`: what grew from the end of the warm-up to the end, by what and unit."""
    end = max(sample.at_s for sample in samples)
    for process, of in groupby(sorted(samples, key=lambda s: (s.process, s.at_s)), key=lambda s: s.process):
        mine = list(of)
        if mine[0].at_s > warm_s or mine[-1].at_s < end:
            continue
        for need, unit in UNITS.items():
            series = [(sample.at_s / HOUR_S, sample.needs[need]) for sample in mine]
            late = [point for point in series if point[0] * HOUR_S >= warm_s]
            yield origin.line(process[0], f"{need}, slope", slope(late), f"{unit}/h", target=TARGETS[need])
            yield origin.line(process[0], f"{need}, most", max(value for _, value in series), unit)
        for minute in range(0, int(end / 60) + 1, EVERY_MINUTES):
            nearest = min(mine, key=lambda sample: abs(sample.at_s - 60 * minute))
            yield origin.line(process[0], f"{RESIDENT} at minute {minute}", nearest.needs[RESIDENT], UNITS[RESIDENT])
    yield origin.line(STACK, "minutes", end / 60, "minutes")
    yield origin.line(STACK, "minutes of warm-up", warm_s / 60, "minutes")
    for activity, count in sorted(done.right.items()):
        yield origin.line(STACK, f"right: {activity}", count, "times")
    yield origin.line(STACK, "wrong", len(done.wrong), "times", target="<= 0")
    yield origin.line(STACK, "runners whose pages do not balance", len(done.unbalanced), "runners", target="<= 0")
    for what, grown in sorted(stack.items()):
        yield origin.line(STACK, f"growth: {what}", grown, "an hour")


def page(name: str, about: str, found: Iterable[Line], *, docs: Path, draw: Draw) -> str:
    """Render the page: for the last soak of each machine what grew, and a picture below `docs`."""
    parts = [f"# Benchmark: {name}", about.strip()]
    current = sorted(newest(found), key=lambda line: line.machine)
    for number, (machine, of) in enumerate(groupby(current, key=lambda line: line.machine)):
        last, mine = _last_soak(list(of))
        whole = {line.metric: line for line in mine if line.case == STACK}
        minutes, warm = (whole[metric].value or 0.0 for metric in ("minutes", "minutes of warm-up"))
        missed = [line for line in mine if line.target and line.met is not True]
        picture = docs / "pictures" / (f"soak-{number}.svg" if number else "soak.svg")
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_text(draw(_resident_mb(mine)), encoding="utf-8")
        parts += [
            f"## {machine}",
            f"{last.date[:10]}, `{last.command}`, {last.versions}: {minutes:.0f} minutes, of which {warm:.0f} warm up.",
            f"**{'held' if not missed else 'missed: ' + '; '.join(f'{one.case}, {one.metric}' for one in missed)}**",
            "\n".join(_needs(mine)),
            "\n".join(["| | |", "|---|---:|", *(f"| {m} | {_plain(line)} |" for m, line in whole.items())]),
            f"![resident memory of each process](pictures/{picture.name})",
        ]
    parts.append(f"Raw lines: `docs/benchmarks/raw/{name}.jsonl`. This page is written by `weft bench {name}`.")
    return "\n\n".join(parts) + "\n"


def _last_soak(of_machine: Sequence[Line]) -> tuple[Line, list[Line]]:
    """Return a machine's newest line, and the lines that were written with it: an older soak may have been longer."""
    last = max(of_machine, key=lambda line: line.date)
    since = (datetime.fromisoformat(last.date) - timedelta(seconds=WRITTEN_S)).isoformat(timespec="seconds")
    return last, [line for line in of_machine if line.date >= since]


def _needs(mine: Sequence[Line]) -> Iterator[str]:
    yield "| process | " + " | ".join(f"{need}, slope | most" for need in UNITS) + " |"
    yield "|---|" + "---:|" * (2 * len(UNITS))
    values = {(line.case, line.metric): line for line in mine}
    for process in sorted({line.case for line in mine} - {STACK}):
        cells = (values[process, f"{need}, {of}"] for need in UNITS for of in ("slope", "most"))
        yield f"| {process} | " + " | ".join(_plain(line) for line in cells) + " |"


def _plain(line: Line) -> str:
    value = line.value or 0.0
    return f"{value:,.0f} {line.unit}" if value == int(value) else f"{value:,.2f} {line.unit}"


def _resident_mb(mine: Sequence[Line]) -> Curves:
    series: dict[str, list[tuple[float, float]]] = {}
    for line in mine:
        if line.metric.startswith(f"{RESIDENT} at minute "):
            series.setdefault(line.case, []).append((float(line.metric.rpartition(" ")[2]), line.value or 0.0))
    return series

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from statistics import median

from weft_stage.lines import Line, Origin

RESIDENT, DESCRIPTORS, THREADS = "resident", "descriptors", "threads"
UNITS = {RESIDENT: "MB", DESCRIPTORS: "descriptors", THREADS: "threads"}
TARGETS = {RESIDENT: "<= 2", DESCRIPTORS: "<= 1", THREADS: "<= 1"}  # an hour
STACK, HOUR_S = "the stack", 3600.0
MAX_PAIRED_SAMPLES = 400  # samples whose pairs a slope takes


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
    """Return the median slope between pairs of (x, y) with different x; 0 if there are none."""
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
    yield origin.line(STACK, "minutes", end / 60, "minutes")
    yield origin.line(STACK, "minutes of warm-up", warm_s / 60, "minutes")
    for activity, count in sorted(done.right.items()):
        yield origin.line(STACK, f"right: {activity}", count, "times")
    yield origin.line(STACK, "wrong", len(done.wrong), "times", target="<= 0")
    yield origin.line(STACK, "runners whose pages do not balance", len(done.unbalanced), "runners", target="<= 0")
    for what, grown in sorted(stack.items()):
        yield origin.line(STACK, f"growth: {what}", grown, "an hour")

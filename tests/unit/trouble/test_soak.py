"""The figures of a soak: slopes, and who has one."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from weft_stage.lines import Line, Origin
from weft_trouble.soak import DESCRIPTORS, RESIDENT, THREADS, Done, Sample, lines, slope

ORIGIN = Origin("weft bench soak", "a machine", "Python")
NOTHING_WRONG = Done({"streams": 3}, (), ())


def samples(process: str, pid: int, resident: Sequence[float], *, since: int = 0) -> list[Sample]:
    """One a minute."""
    return [
        Sample(60.0 * (since + minute), (process, pid), {RESIDENT: mb, DESCRIPTORS: 20.0, THREADS: 9.0})
        for minute, mb in enumerate(resident)
    ]


def figure(found: Sequence[Line], case: str, metric: str) -> Line:
    (line,) = [line for line in found if (line.case, line.metric) == (case, metric)]
    return line


@given(st.floats(-100, 100), st.floats(-1e3, 1e3), st.integers(2, 60), st.integers(0, 10))
def test_the_slope_is_that_of_the_line_whatever_a_few_points_do(a: float, b: float, count: int, wild: int) -> None:
    points = [(float(x), a * x + b) for x in range(count)]
    for number in range(min(wild, count // 5)):
        points[number * 4] = (points[number * 4][0], 1e6)
    assert abs(slope(points) - a) < 1e-6 * (1 + abs(a) + abs(b))


def test_the_slope_is_taken_after_the_warm_up_and_of_those_that_lived_throughout() -> None:
    grown = [100.0 + 10 * minute for minute in range(16)] + [250.0 + minute for minute in range(45)]
    found = list(
        lines(
            ORIGIN,
            [*samples("gateway", 1, grown), *samples("runner", 2, [5.0] * 10), *samples("runner", 3, [5.0], since=60)],
            NOTHING_WRONG,
            {"MB of logs": 3.0},
            warm_s=15 * 60,
        )
    )
    line = figure(found, "gateway", "resident, slope")
    assert (line.value, line.unit, line.met) == (60.0, "MB/h", False)
    assert figure(found, "gateway", "threads, slope").met
    assert "runner" not in {line.case for line in found}

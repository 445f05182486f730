"""The machine's rates for a working set, and which figures are held against targets."""

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weft_bench.cpu_context import QUICK, Context, Options
from weft_bench.cpu_decode import Model
from weft_bench.cpu_machine import MEMORY_BYTES, REPETITIONS, Native, machine_lines
from weft_bench.cpu_shapes import SHAPES
from weft_bench.lines import Origin
from weft_kernels.cpu.library import load


@dataclass(slots=True)
class Sized:
    """A machine that reads as many bytes a second as it is asked to read."""

    name: str = "sized"
    asked: list[int] = field(default_factory=list[int])

    def bandwidth(self, n_bytes: int) -> float:
        self.asked.append(n_bytes)
        return float(n_bytes)

    def peak(self) -> float:
        return 2e9


@contextmanager
def bar(_label: str, _length: int) -> Generator[Callable[[int], None]]:
    yield lambda _: None


def context(meter: Sized) -> Context:
    model = Model("tiny", SHAPES["tiny"], Path(), random.Random(0))
    return Context(Options(Path()), model, Origin("c", "m", "v"), meter, 2e9, bar, lambda _: None)


@given(st.floats(1, MEMORY_BYTES))
@example(float(MEMORY_BYTES))
@example(271e6)
def test_a_bandwidth_is_never_that_of_a_larger_working_set(n_bytes: float) -> None:
    measured = context(Sized()).rates(n_bytes).bytes_per_s
    assert n_bytes / 2 < measured <= n_bytes or measured == 1
    assert measured >= n_bytes / 2**0.25 - 1


def test_working_sets_of_about_the_same_size_are_measured_once() -> None:
    meter = Sized()
    same = context(meter)
    assert same.rates(100e6) is same.rates(101e6)
    assert len(meter.asked) == 1


@pytest.mark.parametrize(
    ("changed", "label"),
    [({"threads": 2}, " (2 threads)"), ({"amounts": QUICK}, " (quick)"), ({"dtype": "fp32"}, ""),
     ({"executor": "reference"}, "")],
)  # fmt: skip
def test_figures_of_unusual_options_have_no_target(changed: dict[str, object], label: str) -> None:
    usual = Options(Path())
    assert (usual.usual, usual.label) == (True, "")
    unusual = replace(usual, **changed)
    assert (unusual.usual, unusual.label) == (False, label)


def test_the_lines_about_a_machine_name_what_measured_it() -> None:
    bandwidth, peak = machine_lines(Origin("c", "m", "v"), Sized(), 3e9)
    assert (bandwidth.case, bandwidth.metric, bandwidth.value) == ("machine, by sized", "read bandwidth", 2**30 / 1e9)
    assert (peak.metric, peak.value, peak.of_machine) == ("bf16 peak", 3, True)


def test_the_peak_is_the_best_of_several() -> None:
    library = load()
    found: list[float] = []

    class Noted:
        def __getattr__(self, name: str) -> object:
            return getattr(library, name)

        def peak(self, pool: object) -> float:
            found.append(float(len(found) % 3))
            return found[-1]

    pool = library.pool(1)
    assert Native(Noted(), pool).peak() == 2  # pyright: ignore[reportArgumentType]
    assert len(found) == REPETITIONS

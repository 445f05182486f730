"""The machine's rates for a working set, and which figures are held against targets."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weft_bench.cpu_context import QUICK, Options
from weft_bench.cpu_machine import MEMORY_BYTES, REPETITIONS, WORKING_SETS, Machine, Native
from weft_bench.lines import Origin
from weft_kernels.cpu.library import load


@dataclass(slots=True)
class Shrinking:
    """A machine that reads the larger sets the more slowly, but for one that it was disturbed in."""

    name: str = "shrinking"
    disturbed: int = 0

    def bandwidth(self, n_bytes: int) -> float:
        return 1.0 if n_bytes == self.disturbed else 1e18 / n_bytes

    def peak(self) -> float:
        return 2e9


@given(st.floats(1, 4 * MEMORY_BYTES))
@example(float(MEMORY_BYTES))
@example(271e6)
def test_a_bandwidth_is_never_that_of_a_larger_working_set(n_bytes: float) -> None:
    measured_at = 1e18 / Machine.measured(Shrinking()).rates(n_bytes).bytes_per_s
    if WORKING_SETS[0] <= n_bytes < MEMORY_BYTES:
        assert n_bytes / 2**0.51 < measured_at <= n_bytes * (1 + 1e-12)
    else:
        assert measured_at == pytest.approx(WORKING_SETS[0] if n_bytes < MEMORY_BYTES else MEMORY_BYTES)


@given(st.sampled_from(WORKING_SETS[:-1]))
def test_a_disturbed_moment_makes_no_small_set_slower_than_a_larger_one(disturbed: int) -> None:
    machine = Machine.measured(Shrinking(disturbed=disturbed))
    found = [machine.rates(n_bytes).bytes_per_s for n_bytes in WORKING_SETS]
    assert found == sorted(found, reverse=True)
    assert machine.rates(disturbed) == machine.rates(min(size for size in WORKING_SETS if size > disturbed))


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
    bandwidth, peak = Machine.measured(Shrinking()).lines(Origin("c", "m", "v"))
    assert (bandwidth.case, bandwidth.metric) == ("machine, by shrinking", "read bandwidth")
    assert bandwidth.value == pytest.approx(1e9 / MEMORY_BYTES)
    assert (peak.metric, peak.value, peak.of_machine) == ("bf16 peak", 2, True)


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

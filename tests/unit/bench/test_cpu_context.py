"""The machine's rates for a working set."""

from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weft_bench.cpu_machine import MEMORY_BYTES, WORKING_SETS, Machine


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

"""The simulator's laws as tests, for mutants that unit tests let live: shipped machines on one clock, under faults."""

import pytest

from weft_sim.check import check_seed


@pytest.mark.parametrize("seed", range(6))
def test_the_laws_hold(seed: int) -> None:
    assert not check_seed(seed).fault, f"python -m weft_sim check --seeds 1 --first {seed}"

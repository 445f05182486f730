"""Stages that offload: how many batches they have in flight, and what they are together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.runner import OffloadState
from weft_runner.offload import OffloadFigures, PassTime, StageState, TierFigures, batches_in_flight, state_of_all

SECONDS = st.floats(0.001, 10.0)


def figures_of(weight_bytes: int) -> OffloadFigures:
    pages = TierFigures()
    return OffloadFigures(0, 0, weight_bytes, 0, TierFigures(), pages, pages, 0.0, 0.0, None)


@given(hosts=st.integers(1, 8), read_s=SECONDS, least_s=SECONDS, row_s=SECONDS, rows=st.integers(1, 64))
def test_parts_are_in_flight_only_where_that_is_no_slower(
    hosts: int, read_s: float, least_s: float, row_s: float, rows: int
) -> None:
    def token_s(parts: int) -> float:
        return hosts * max(read_s, least_s + row_s * rows / parts)

    compute_s = least_s + row_s * rows
    stage = PassTime(read_s, 0.0, 0.0, 0.0, compute_s, max(read_s, compute_s))
    chosen = batches_in_flight(hosts, stage)
    assert token_s(chosen) <= token_s(1)
    if read_s >= compute_s:
        assert chosen == 1  # the weights are read once
    assert batches_in_flight(hosts, None) == 1


def test_a_token_passes_all_stages() -> None:
    """Their times add up; what the other figures say is of all bytes, and of the slowest stage."""
    first = StageState(OffloadState(0.8, 2e9, 100.0, 110.0, 90.0, disk_bound=True), figures_of(600), 32)
    second = StageState(OffloadState(0.2, 1e9, 200.0, 210.0, 190.0), figures_of(200), 24)
    assert state_of_all([first, second]) == (pytest.approx(0.65), 1e9, 300.0, 320.0, 280.0, False)
    unknown = StageState(OffloadState(0.2), figures_of(200), 24)
    assert state_of_all([first, unknown])[2:5] == (0.0, 0.0, 0.0)

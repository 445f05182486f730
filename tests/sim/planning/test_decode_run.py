"""Decode steps in one piece take as long as one by one."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_sim.performance import StepShape
from weft_sim.planning import DecodeRun


@dataclass(frozen=True)
class Roofline:
    """The larger of two linear times, as of compute and memory, and a constant."""

    base: float
    row: float
    key: float
    floor: float

    def seconds(self, step: StepShape) -> float:
        return self.base + max(self.row * step.decode_rows, self.floor, self.key * step.context_tokens)


models = st.builds(Roofline, st.floats(1e-3, 1e-1), st.floats(0, 1e-3), st.floats(0, 1e-6), st.floats(0, 1e-1))


@given(models, st.integers(1, 512), st.integers(1, 1_000_000), st.integers(1, 700), st.data())
def test_the_sum_is_that_of_single_steps(
    model: Roofline, rows: int, context: int, steps: int, data: st.DataObject
) -> None:
    run = DecodeRun(model, rows, context, 0, steps)
    singles = [
        model.seconds(StepShape(decode_rows=rows, context_tokens=context + rows * index)) for index in range(steps)
    ]
    some = data.draw(st.integers(0, steps))
    assert run.seconds(some) == pytest.approx(sum(singles[:some]), rel=1e-9)
    if some < steps:
        in_the_middle_of_the_next = sum(singles[:some]) + singles[some] / 2
        assert run.steps_within(in_the_middle_of_the_next) == some
    assert run.steps_within(sum(singles) * 2) == steps

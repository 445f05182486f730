"""What rank 0 tells the others is what they hear."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from weft_kernels.plan import plan_rows
from weft_runner.model.step import Step, StepRow, check_step
from weft_runner.parallel.commands import Layers, read_again, read_ints, read_run, write_again, write_ints, write_run
from weft_runner.parallel.shared_tensors import FixedScales, RecordedScales, open_shared, share_tensors

rows_of_a_step = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 100), st.sampled_from((None, 0, 1, 7)), st.booleans()), min_size=1
)
layers = st.builds(Layers, st.integers(0, 5), st.integers(6, 9), st.booleans())


def step_of(rows: list[tuple[int, int, int | None, bool]]) -> Step:
    made: list[StepRow] = []
    slots: list[int | None] = []
    for n_tokens, position, slot, samples in rows:
        start = len(slots)
        pages = tuple(range(start, start + -(-(position + n_tokens) // 16)))
        made.append(StepRow(start, start + n_tokens, position, pages, samples))
        slots += [slot] * n_tokens
    return Step([17 * i for i in range(len(slots))], tuple(made), plan_rows(slots, {0: 5, 1: 2, 7: 192}))


@given(rows=rows_of_a_step, layers=layers)
def test_a_step_is_heard_as_it_was_told_and_moves_on_as_it_does(rows, layers):
    step = step_of(rows)
    heard, told = read_run(write_run(step, layers))
    assert (heard, told) == (step, layers)
    check_step(heard, 16)
    arrays = heard.arrays
    step.advance([token + 1 for token in step.tokens], [row.position + 1 for row in step.rows])
    assert read_again(write_again(step, layers), heard) == layers
    assert heard == step
    assert heard.arrays is arrays, "whoever derived something from it keeps it"
    assert arrays.tokens.tolist() == step.tokens


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_numbers_are_heard_as_they_were_told(numbers):
    assert read_ints(write_ints(numbers)) == numbers


def test_an_adapters_tensors_and_scales_are_carried_as_they_are():
    tensors = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.randn(7, 2).half(),
        "strided": torch.randn(4, 6).t()[::2],
        "c": torch.randn(1),
    }
    file, table = share_tensors(tensors)
    found = open_shared(file, table)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor)
    recorded = RecordedScales(FixedScales({"m": 0.5, "n": 2.0}))
    assert recorded.scale_of("m") == 0.5
    assert recorded.by_module == {"m": 0.5}

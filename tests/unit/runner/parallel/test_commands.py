"""What rank 0 sends to the others is what they receive."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft_kernels.plan import plan_rows
from weft_runner.model import BFLOAT16, FLOAT16, FLOAT32, StepInput, StepRow, check_step
from weft_runner.parallel import Channel, FixedScales, Layers, RecordedScales, open_shared, share_tensors

rows_of_a_step = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 100), st.sampled_from((None, 0, 1, 7)), st.booleans()), min_size=1
)


def step_of(rows: list[tuple[int, int, int | None, bool]]) -> StepInput:
    made: list[StepRow] = []
    slots: list[int | None] = []
    for n_tokens, position, slot, samples in rows:
        start = len(slots)
        pages = tuple(range(start, start + -(-(position + n_tokens) // 16)))
        made.append(StepRow(start, start + n_tokens, position, pages, samples))
        slots += [slot] * n_tokens
    return StepInput([17 * i for i in range(len(slots))], tuple(made), plan_rows(slots, {0: 5, 1: 2, 7: 192}))


@given(rows=rows_of_a_step)
def test_a_step_is_received_as_it_was_sent(channels: tuple[Channel, Channel], rows):
    """Without its arrays, where it ran here before."""
    (one, other), step, layers = channels, step_of(rows), Layers(0, 6, hidden=True)
    pages = step.arrays.pages
    one.send(("run", step, layers))
    received = other.receive()
    assert received == ("run", step, layers)
    assert received[1].arrays.pages.tolist() == pages.tolist()
    check_step(step, 16)


def test_an_adapters_tensors_and_scales_are_carried_as_they_are():
    rng = np.random.default_rng(1)
    tensors = {
        "a": rng.normal(size=(3, 5)).astype(BFLOAT16),
        "b": rng.normal(size=(7, 2)).astype(FLOAT16),
        "strided": rng.normal(size=(4, 6)).astype(FLOAT32).T[::2],
        "c": rng.normal(size=1).astype(FLOAT32),
    }
    file, table = share_tensors(tensors)
    found = open_shared(file, table)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert np.array_equal(found[name], tensor)
    recorded = RecordedScales(FixedScales({"m": 0.5, "n": 2.0}))
    assert recorded.scale_of("m", 4) == 0.5
    assert recorded.by_module == {"m": 0.5}

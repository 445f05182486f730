"""A step in parts: how rows whose KV is on a disk are split between them."""

import numpy as np
import pytest

from harness.native_models import make_step
from weft_runner.model import cut_step


@pytest.mark.parametrize(("on_disk", "ends"), [(False, [8, 11]), (True, [3, 11])])
def test_a_prompt_beside_other_rows_is_not_cut_where_its_later_part_would_wait_for_the_disk(
    *, on_disk: bool, ends: list[int]
) -> None:
    decode = [([1], 5, [page], None) for page in range(3)]
    arrays = make_step([*decode, ([2] * 8, 0, [3], None)]).arrays
    marks = np.full(len(arrays.pages), on_disk)
    parts = cut_step(arrays, 8, marks, 4)
    assert [part.end for part in parts] == ends
    assert sum(part.n_tokens for part in parts) == len(arrays.tokens)


def test_a_row_larger_than_a_part_is_cut() -> None:
    arrays = make_step([([1], 5, [0], None), ([2] * 12, 0, [1], None)]).arrays
    parts = cut_step(arrays, 8, np.ones(len(arrays.pages), bool), 4)
    assert [part.end for part in parts] == [1, 9, 13]

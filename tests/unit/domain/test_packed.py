"""What matrices and KV take as the executors hold them: whole groups, whole rows, and their scales."""

import pytest

from weft.domain.model.packed import CUDA_INT4, int4_kv_group, packed_bytes


@pytest.mark.parametrize("kind", ["int4", CUDA_INT4])
def test_int4_has_whole_groups_of_64_inputs_each_with_a_scale_and_a_minimum_of_two_bytes(kind: str) -> None:
    group = 64 // 2 + 4
    for n_in, groups in ((32, 1), (64, 1), (65, 2), (96, 2), (128, 2), (4096, 64)):
        assert packed_bytes(16, n_in, kind) == 16 * groups * group


def test_rows_come_in_sixteens_and_columns_in_thirty_twos() -> None:
    for n_out, rows in ((1, 16), (16, 16), (17, 32)):
        assert packed_bytes(n_out, 33, "int8") == rows * (64 + 4), "a scale of four bytes for each row"
        assert packed_bytes(n_out, 33, "bf16") == rows * 64 * 2


def test_plain_tensors_are_not_padded() -> None:
    assert packed_bytes(17, 33, "cuda fp32") == 17 * 33 * 4


@pytest.mark.parametrize(("head_dim", "group"), [(64, 64), (128, 64), (96, 32), (32, 32), (80, 0)])
def test_heads_have_groups_of_64_or_32_in_int4_kv(head_dim: int, group: int) -> None:
    assert int4_kv_group(head_dim) == group

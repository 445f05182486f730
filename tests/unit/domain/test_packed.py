"""What matrices and KV take as the executors hold them: whole groups, whole rows, and their scales."""

import math

import pytest

from harness.model_configs import config_of
from tests.unit.domain.test_model_config import parse
from weft.domain.model.config import parse_spec
from weft.domain.model.families import FAMILIES, Family
from weft.domain.model.packed import (
    CUDA_INT4,
    int4_kv_group,
    kv_token_bytes,
    packed_bytes,
    stacked_shapes,
    vector_numbers,
)
from weft.domain.model.tensors import layer_tensors


@pytest.mark.parametrize("kind", ["int4", CUDA_INT4])
def test_int4_has_whole_groups_of_64_inputs_each_with_a_scale_and_a_minimum_of_two_bytes(kind: str) -> None:
    group = 64 // 2 + 4
    for n_in, groups in ((32, 1), (64, 1), (65, 2), (96, 2), (128, 2), (4096, 64)):
        assert packed_bytes(16, n_in, kind) == 16 * groups * group


def test_rows_come_in_sixteens_and_columns_in_thirty_twos() -> None:
    for n_out, rows in ((1, 16), (16, 16), (17, 32)):
        assert packed_bytes(n_out, 33, "int8") == rows * (64 + 4), "a scale of four bytes for each row"
        assert packed_bytes(n_out, 33, "bf16") == rows * 64 * 2


@pytest.mark.parametrize(("kind", "number"), [("reference", 4), ("cuda bf16", 2), ("cuda fp32", 4)])
def test_plain_tensors_are_not_padded(kind: str, number: int) -> None:
    assert packed_bytes(17, 33, kind) == 17 * 33 * number


@pytest.mark.parametrize(
    ("kind", "number"), [("bf16", 2), ("fp32", 4), ("int8", 2), ("int4", 2), (CUDA_INT4, 2), ("reference", 4)]
)
def test_a_token_has_a_key_and_a_value_of_each_head(kind: str, number: int) -> None:
    spec = parse(num_key_value_heads=2, head_dim=96)
    assert kv_token_bytes(spec, kind) == 2 * 2 * 96 * number
    assert kv_token_bytes(spec, kind, int4=True) == 2 * 2 * 3 * (32 // 2 + 4), "three groups of 32"


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_matrices_and_vectors_of_a_layer_are_all_of_its_tensors(family: Family, biased: bool) -> None:
    spec = parse_spec(config_of(family, num_key_value_heads=2, head_dim=8, **dict.fromkeys(family.bias_flags, biased)))
    sizes = [shape for _, shape in layer_tensors(spec, 0)]
    assert {len(shape) for shape in sizes} == {1, 2}
    assert sum(math.prod(shape) for shape in sizes if len(shape) == 1) == vector_numbers(spec)
    assert sum(math.prod(shape) for shape in sizes if len(shape) == 2) == sum(map(math.prod, stacked_shapes(spec)))


@pytest.mark.parametrize(("head_dim", "group"), [(64, 64), (128, 64), (96, 32), (32, 32), (80, 0)])
def test_heads_have_groups_of_64_or_32_in_int4_kv(head_dim: int, group: int) -> None:
    assert int4_kv_group(head_dim) == group

"""Products with int4 weights against fp64 of the numbers that they stand for: both forms, splits, what is padded."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.int4 import dequantised, rounded_to_int4
from harness.on_device import BF16, FP32, TOLERANCES, assert_close, name_of, sized
from weft_kernels.int4 import GROUP, quantised
from weft_kernels.triton import int4
from weft_stage.gpu_device import Gpu

pytestmark = pytest.mark.gpu

# (inputs, outputs) of models: split and not, groups and blocks of outputs that are not full, outputs of a head
SHAPES = sized(gpu=((4096, 6144), (14336, 4096), (4096, 28672), (4096, 128256), (1040, 1000)), interpreted=((80, 40),))
ROWS = sized(gpu=(1, 2, 3, 8, 9, 16, 31, 64, 65, 300, 2048), interpreted=(3, 9))
MAX_NUMBERS = 1 << 28  # of a product that is checked: fp64 takes its time
CHECKED_OUTPUTS = 8192  # at a time: fp64 of a whole head would take more of the device than its weights do


def check(device: torch.device, rows: int, n_in: int, n_out: int, dtype: torch.dtype, seed: int, sms: int = 4) -> None:
    """Rows of x lie in a wider tensor, among NaN."""
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(n_out, n_in, generator=generator), torch.randn(n_out, generator=generator)
    weight[0] = 0.25  # no range: its scale is 0
    wide = torch.full((rows, n_in + 16), torch.nan, dtype=dtype)
    wide[:, :n_in] = torch.randn(rows, n_in, generator=generator)
    bias = bias if seed % 2 else None
    expected = wide[:, :n_in].double() @ dequantised(quantised(weight), n_in).double().T
    expected += 0.0 if bias is None else bias.double()
    y = int4.linear(
        wide.to(device)[:, :n_in], int4.pack(weight.to(device)), n_out, sms=sms,
        bias=None if bias is None else bias.to(device),
    )  # fmt: skip
    assert y.dtype == dtype
    assert y.shape == expected.shape
    assert_close(y, expected, TOLERANCES[dtype].product)


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [FP32, *sized(gpu=[BF16], interpreted=[])], ids=name_of)
@pytest.mark.parametrize(
    ("rows", "n_in", "n_out"), [(rows, *shape) for shape in SHAPES for rows in ROWS if rows * shape[1] <= MAX_NUMBERS]
)
def test_products_of_a_models_shapes(gpu: Gpu, rows: int, n_in: int, n_out: int, dtype: torch.dtype) -> None:
    """Made on the device: the largest matrix has half a billion numbers."""
    generator = torch.Generator(gpu.device).manual_seed(rows)
    weight = torch.randn(n_out, n_in, device=gpu.device, generator=generator).mul_(n_in**-0.5)
    x = torch.randn(rows, n_in, device=gpu.device, generator=generator).to(dtype)
    bias = torch.randn(n_out, device=gpu.device, generator=generator)
    y = int4.linear(x, int4.pack(weight), n_out, sms=gpu.sms, bias=bias)
    for begin in range(0, n_out, CHECKED_OUTPUTS):
        own = slice(begin, begin + CHECKED_OUTPUTS)
        expected = x.double() @ rounded_to_int4(weight[own]).double().T + bias[own].double()
        assert_close(y[:, own], expected, TOLERANCES[dtype].product)


@pytest.mark.numeric
@settings(max_examples=10, deadline=None)
@given(
    rows=st.one_of(st.integers(1, int4.FEW_ROWS), st.integers(int4.FEW_ROWS + 1, 40), st.just(130)),
    n_in=st.integers(1, 5).map(lambda n: 16 * n) | st.sampled_from([1, 63, 65, 520]),
    n_out=st.integers(1, 150),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_the_numbers_that_codes_stand_for(
    device: torch.device, rows: int, n_in: int, n_out: int, dtype: torch.dtype, seed: int
) -> None:
    check(device, rows, n_in, n_out, dtype, seed)


@pytest.mark.numeric
@pytest.mark.parametrize(("rows", "seed"), [(1, 0), (3, 1), (int4.FEW_ROWS + 1, 1)])
def test_few_outputs_of_many_inputs_are_split(device: torch.device, rows: int, seed: int) -> None:
    """Three parts, of which the last is not full, and ends within a group."""
    check(device, rows, GROUP * (2 * int4.MIN_PART_GROUPS + 3) - 16, 2 * int4.BLOCK_OUT, torch.float32, seed, sms=132)


@pytest.mark.parametrize("n_out", [5, 16, 40])
def test_packed_words_are_the_codes_scales_and_minima(device: torch.device, n_out: int) -> None:
    n_in = 200
    matrix = torch.randn(n_out, n_in)
    codes, scale, minimum = quantised(matrix)
    packed = int4.pack(matrix.to(device)).cpu()
    assert packed.nbytes == -(-n_out // int4.BLOCK_OUT) * int4.BLOCK_OUT * -(-n_in // GROUP) * GROUP * 9 // 16
    words = (
        packed.view(len(packed), -1, 9, int4.BLOCK_OUT).permute(0, 3, 1, 2).flatten(0, 1)[:n_out].long() & 0xFFFF_FFFF
    )
    nibbles = words[:, :, None, :8] >> 4 * torch.arange(8)[:, None] & 15  # [n_out, groups, 8 j, 8 i]
    assert torch.equal(nibbles.flatten(2).flatten(1)[:, :n_in], codes.flatten(1)[:, :n_in].long())
    for bits, numbers in ((words[..., 8] & 0xFFFF, scale), (words[..., 8] >> 16, minimum)):
        assert torch.equal(bits, numbers[..., 0].bfloat16().view(torch.int16).long() & 0xFFFF)


def test_matrices_are_quantised_in_parts_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(70, 100).bfloat16()
    whole = int4.pack(matrix)
    monkeypatch.setattr("weft_kernels.triton.int4.PACK_NUMBERS", 100 * 2 * int4.BLOCK_OUT)
    assert torch.equal(int4.pack(matrix), whole)

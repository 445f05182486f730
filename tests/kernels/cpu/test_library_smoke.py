"""The real library, built from the sources, on every level that this CPU has: packing and products against torch."""

import math

import numpy as np
import pytest
import torch

from harness.int4 import rounded_to_int4
from harness.native_library import native_library
from harness.native_tensors import aligned, matmul, pack
from harness.numerics import within
from weft_kernels.cpu import BF16, FP32, INT4, INT8, LEVELS, CallRefused, Library, load
from weft_kernels.int4 import GROUP, quantised

# Building takes half a minute of a machine with two cores, once: later runs find the library in the cache.


@pytest.fixture(scope="module")
def best() -> Library:
    return native_library()


@pytest.fixture(params=LEVELS)
def library(request: pytest.FixtureRequest, best: Library) -> Library:
    if request.param not in best.levels:
        pytest.skip(f"this CPU has no {request.param}: run on one that has")
    return load(request.param)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0] * 1000 + shape[-1])).to(dtype)


def assert_close(ours: torch.Tensor, exact: torch.Tensor, bound: float) -> None:
    """Errors against the size of a row: a sum of products is as exact as its largest partial sum allows."""
    within("native products, of the largest", float((ours - exact).abs().max() / exact.abs().max()), bound)


@pytest.mark.numeric
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("m", [1, 3, 16, 33])
@pytest.mark.parametrize(("n_out", "n_in"), [(16, 32), (48, 64), (272, 416), (100, 80)])
def test_bf16_products_are_those_of_torch(library: Library, m: int, n_out: int, n_in: int, threads: int):
    weight, x = random(n_out, n_in, dtype=torch.bfloat16), random(m, n_in, dtype=torch.bfloat16)
    with library.pool(threads) as pool:
        y = matmul(library, pool, pack(library, pool, weight, BF16), x)
    assert_close(y, (x.double() @ weight.double().T).float(), 1e-6)


@pytest.mark.numeric
@pytest.mark.parametrize(("m", "n_out", "n_in"), [(1, 48, 64), (17, 272, 416)])
def test_fp32_products_are_those_of_torch(library: Library, m: int, n_out: int, n_in: int):
    weight, x = random(n_out, n_in, dtype=torch.float32), random(m, n_in, dtype=torch.float32)
    bias = random(n_out, dtype=torch.float32)
    with library.pool(2) as pool:
        y = matmul(library, pool, pack(library, pool, weight, FP32, bias=bias), x)
    assert_close(y, (x.double() @ weight.double().T + bias.double()).float(), 1e-6)


@pytest.mark.numeric
def test_int8_products_are_those_of_the_rounded_weights(library: Library):
    weight, x = random(96, 128, dtype=torch.float32), random(5, 128, dtype=torch.bfloat16)
    with library.pool(1) as pool:
        packed = pack(library, pool, weight, INT8)
        y = matmul(library, pool, packed, x)
    scale = weight.abs().amax(1, keepdim=True) / 127
    assert packed.scale is not None
    assert torch.allclose(packed.scale, scale.flatten(), rtol=1e-6)
    rounded = (weight / scale).round().double() * scale.double()
    assert_close(y, (x.double() @ rounded.T).float(), 1e-5)
    assert_close(y, (x.double() @ weight.double().T).float(), 2e-2)


@pytest.mark.numeric
@pytest.mark.parametrize("m", [1, 2, 5, 33])
@pytest.mark.parametrize(("n_out", "n_in"), [(16, 32), (272, 416), (100, 80), (64, 16), (112, 1072)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int4_products_are_scaled_dot_products_of_64_inputs(
    library: Library, m: int, n_out: int, n_in: int, dtype: torch.dtype
):
    weight, x = random(n_out, n_in, dtype=dtype), random(m, n_in, dtype=torch.bfloat16)
    weight[0] = 0.25  # no range: its scale is 0
    steps, scale, minimum = quantised(weight)
    expected = torch.zeros(m, n_out)
    with library.pool(2) as pool:
        y = matmul(library, pool, pack(library, pool, weight, INT4), x)
        for k, part in enumerate(x.split(GROUP, dim=1)):
            numbers = (1 + steps[:, k, : part.shape[1]] / 16).contiguous()
            dots = matmul(library, pool, pack(library, pool, numbers.bfloat16(), BF16), part.contiguous())
            of_dot, of_sum = 16 * scale[:, k, 0], minimum[:, k, 0] - 16 * scale[:, k, 0]
            expected = fma(library, dots, of_dot, expected)
            expected = fma(library, in_lanes(part)[:, None], of_sum, expected)
    assert torch.equal(y, expected)
    assert_close(y, (x.double() @ rounded_to_int4(weight.float()).double().T).float(), 1e-5)
    assert_close(y, (x.double() @ weight.double().T).float(), 0.2)


def test_int4_rows_of_more_inputs_than_scratch_has_sums_for_are_computed_in_parts(library: Library):
    weight, x = random(16, 16448, dtype=torch.bfloat16), random(200, 16448, dtype=torch.bfloat16)
    with library.pool(1) as pool:
        packed = pack(library, pool, weight, INT4)
        together, apart = matmul(library, pool, packed, x), matmul(library, pool, packed, x[190:])
    assert torch.equal(together[190:], apart)


def fma(library: Library, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in fp32, rounded once where the level has such an instruction."""
    if library.level == "portable":
        return a * b + c
    exact = a.numpy().astype(np.longdouble) * b.numpy().astype(np.longdouble) + c.numpy().astype(np.longdouble)
    return torch.from_numpy(exact.astype(np.float32))


def in_lanes(x: torch.Tensor) -> torch.Tensor:
    """The sums of rows of at most 64 inputs: sixteen lanes first, then halves of them."""
    lanes = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 16)).unflatten(1, (-1, 16))
    total = lanes[:, 0]
    for part in lanes[:, 1:].unbind(1):
        total = total + part
    while total.shape[1] > 1:
        low, high = total.chunk(2, dim=1)
        total = low + high
    return total[:, 0]


def test_a_view_with_longer_rows_is_packed_as_it_stands(library: Library):
    whole, x = random(64, 256, dtype=torch.bfloat16), random(2, 96, dtype=torch.bfloat16)
    part = whole[16:48, 32:128]
    with library.pool(2) as pool:
        viewed = matmul(library, pool, pack(library, pool, part, BF16), x)
        copied = matmul(library, pool, pack(library, pool, part.contiguous(), BF16), x)
    assert torch.equal(viewed, copied)


def test_threads_do_not_show_in_the_bits(library: Library):
    weight, x = random(272, 416, dtype=torch.bfloat16), random(33, 416, dtype=torch.bfloat16)
    results: list[torch.Tensor] = []
    for threads in (1, 2, 3, 7):
        with library.pool(threads) as pool:
            results.append(matmul(library, pool, pack(library, pool, weight, BF16), x))
    assert all(torch.equal(results[0], other) for other in results)


def test_a_packed_matrix_lies_where_vectors_can_load_it(library: Library):
    with library.pool(1) as pool:
        packed = pack(library, pool, random(20, 40, dtype=torch.float32), BF16)
    assert packed.data.data_ptr() % 64 == 0
    assert packed.n_bytes == library.packed_bytes(BF16, 20, 40) == 32 * 64 * 2
    assert all(aligned(n, 4096).data_ptr() % 4096 == 0 for n in (1, 100, 5000))


@pytest.mark.parametrize(
    ("kind", "n_out", "n_in", "pad_in"),
    [
        (-1, 16, 32, 32),
        (4, 16, 32, 32),
        (BF16, -1, 32, 32),
        (BF16, 16, 0, 32),
        (BF16, 16, 32, 0),
        (INT4, 16, 1 << 22, 32),
    ],
)
def test_matrices_that_no_kernel_reads_are_refused(best: Library, kind: int, n_out: int, n_in: int, pad_in: int):
    with pytest.raises(CallRefused, match="a size is not supported"):
        best.packed_bytes(kind, n_out, n_in, pad_in)
    with best.pool(1) as pool, pytest.raises(CallRefused, match="a size is not supported"):
        best.pack(pool, 0, BF16, n_in, (n_out, n_in), 0, kind, pad_in=pad_in)


def test_int8_without_a_place_for_its_scales_is_refused(best: Library):
    with best.pool(1) as pool, pytest.raises(CallRefused, match="a size is not supported"):
        best.pack(pool, 0, BF16, 32, (16, 32), 0, INT8)


def test_the_machine_can_be_measured(library: Library):
    with library.pool(1) as pool:
        for rate in (library.read_bandwidth(pool, 8 << 20, 2), library.peak(pool, 1000)):
            assert 0 < rate < math.inf

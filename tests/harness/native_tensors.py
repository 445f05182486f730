"""Torch tensors in and out of the native library: a thin convenience for tests."""

from dataclasses import dataclass

import torch

from weft_kernels.cpu import BF16, FP32, INT8, Library, Matrix, ThreadPool

KINDS = {torch.bfloat16: BF16, torch.float32: FP32}


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A packed matrix: `matrix` points into `data`, `scale` and `bias`, which live as long as this."""

    matrix: Matrix
    data: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None

    @property
    def n_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.data, self.scale) if part is not None)


def pack(
    library: Library,
    pool: ThreadPool,
    weight: torch.Tensor,
    kind: int,
    *,
    pad_in: int = 32,
    bias: torch.Tensor | None = None,
) -> Packed:
    """`weight` [n_out, n_in], bf16 or fp32, rows dense; `bias` fp32, [n_out] up to a multiple of 16.

    Raises CallRefused.
    """
    assert weight.stride(1) == 1, weight.stride()
    n_out, n_in = weight.shape
    data = aligned(library.packed_bytes(kind, n_out, n_in, pad_in))
    scale = torch.zeros(-(-n_out // 16) * 16) if kind == INT8 else None
    library.pack(
        pool, weight.data_ptr(), KINDS[weight.dtype], weight.stride(0), (n_out, n_in), data.data_ptr(), kind,
        pad_in=pad_in, scale=address(scale),
    )  # fmt: skip
    return Packed(Matrix(data.data_ptr(), address(scale), address(bias), n_in, n_out, kind, 0), data, scale, bias)


def matmul(library: Library, pool: ThreadPool, packed: Packed, x: torch.Tensor) -> torch.Tensor:
    """y[m, n_out] fp32 of dense x[m, n_in], bf16 or fp32. Raises CallRefused."""
    assert x.is_contiguous(), x.stride()
    assert x.shape[1] == packed.matrix.n_in, (x.shape, packed.matrix.n_in)
    y = torch.empty(x.shape[0], packed.matrix.n_out)
    library.matmul(pool, packed.matrix, x.data_ptr(), KINDS[x.dtype], x.shape[0], y.data_ptr())
    return y


def aligned(n_bytes: int, to: int = 64) -> torch.Tensor:
    """Uninitialised bytes whose address is a multiple of `to`."""
    whole = torch.empty(n_bytes + to, dtype=torch.uint8)
    skipped = -whole.data_ptr() % to
    return whole[skipped : skipped + n_bytes]


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

"""Matrices in the bytes that a GPU's kernels read, for files: rows of numbers, or int4 (`weft_kernels.triton.int4`)."""

import ctypes
import hashlib

import torch

from weft.domain.model.packed import CUDA_INT4, packed_bytes
from weft_kernels.triton import int4
from weft_runner.model.arrays import Array
from weft_runner.model.cuda.device import DTYPES
from weft_runner.model.host_tensors import tensor_of


class DevicePacker:
    """The MatrixPacker of the cuda executor. `device`: where int4 is packed, as it is without a file."""

    version = "cuda1"

    def __init__(self, dtype: str, device: torch.device) -> None:
        self.packed, self.dtype, self._device = dtype == "int4", DTYPES[dtype], device
        self._kind = CUDA_INT4 if self.packed else f"cuda {dtype}"

    def n_bytes(self, n_out: int, n_in: int) -> int:
        return packed_bytes(n_out, n_in, self._kind)

    def scale_bytes(self, n_out: int) -> int:
        """Return 0: scales of int4 are beside their numbers."""
        del n_out
        return 0

    def pack(self, weight: Array, to: int, scale: int | None) -> None:
        del scale
        rows = tensor_of(weight)
        made = int4.pack(rows.to(self._device)).cpu() if self.packed else rows.to(self.dtype).contiguous()
        ctypes.memmove(to, made.data_ptr(), made.numel() * made.element_size())

    def view(self, memory: torch.Tensor, n_out: int, n_in: int) -> torch.Tensor:
        """View uint8 [bytes] as the matrix that they are, in the form of `LayerWeights`."""
        numbers = memory[: self.n_bytes(n_out, n_in)]
        if self.packed:
            return numbers.view(torch.int32).view(-(-n_out // int4.BLOCK_OUT), -1, int4.WORDS)
        return numbers.view(self.dtype).view(n_out, n_in)

    def fingerprint(self) -> str:
        matrix = torch.linspace(-1.0, 1.0, 32 * 192).square().view(32, 192)
        memory = torch.zeros(self.n_bytes(32, 192), dtype=torch.uint8)
        self.pack(matrix.numpy(), memory.data_ptr(), None)
        return hashlib.sha256(memory.numpy().tobytes()).hexdigest()

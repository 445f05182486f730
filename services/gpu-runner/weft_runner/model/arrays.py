"""Tensors in host memory: numpy arrays, of the dtypes in which models and adapters are stored, and all finite."""

from typing import Any

import numpy as np
import numpy.typing as npt

from weft_kernels.cpu.structs import BF16, FP32
from weft_runner.errors import WeightsInvalid

try:
    from ml_dtypes import bfloat16
except ModuleNotFoundError:  # torch's executors compute with none of them here: bits pass to its own bf16
    bfloat16 = "V2"

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
BFLOAT16 = np.dtype(bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
NATIVE_KINDS = {BFLOAT16: BF16, FLOAT32: FP32}  # that the native kernels read; fp16 is converted to fp32 for them
FINITE_CHUNK = 1 << 18  # numbers: they stay in the cache; 11 GB/s of bf16 on one core of an EPYC
# dtype -> integer of the same width, all bits but the sign, the exponent's bits: all of these set is NaN or infinite
_BITS = {
    FLOAT32: (np.int32, 0x7FFF_FFFF, 0x7F80_0000),
    FLOAT16: (np.int16, 0x7FFF, 0x7C00),
    BFLOAT16: (np.int16, 0x7FFF, 0x7F80),
}


def native(array: Array) -> Array:
    """In a dtype of `NATIVE_KINDS`: the same array, or a copy in fp32, which holds fp16's fraction."""
    return array if array.dtype in NATIVE_KINDS else array.astype(np.float32)


def check_finite(name: str, array: Array) -> None:
    """Refuse a number that is NaN or infinite: one can spoil a whole batch.

    Numbers are compared as integers, in chunks that stay in the cache: no copy of the array is made. Raises
    WeightsInvalid.
    """
    integer, magnitude, exponent = _BITS[array.dtype]
    flat = array.reshape(-1).view(integer)
    for start in range(0, flat.size, FINITE_CHUNK):
        chunk = flat[start : start + FINITE_CHUNK] & integer(magnitude)
        if chunk.max() >= exponent:
            at = start + int(np.argmax(chunk >= exponent))
            index = [int(i) for i in np.unravel_index(at, array.shape)]
            raise WeightsInvalid(f"{name} is NaN or infinite at {index}")

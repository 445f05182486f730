"""Tensors in host memory: numpy arrays, of the dtypes in which models and adapters are stored."""

from typing import Any

import numpy as np
import numpy.typing as npt

from weft_kernels.cpu.structs import BF16, FP32

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


def native(array: Array) -> Array:
    """In a dtype of `NATIVE_KINDS`: the same array, or a copy in fp32, which holds fp16's fraction."""
    return array if array.dtype in NATIVE_KINDS else array.astype(np.float32)

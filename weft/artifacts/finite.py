"""No NaN and no infinity in any weight: one such number in one row can spoil a whole batch.

Weights are read in bounded chunks and looked at as integers: a number is NaN or infinite exactly when all bits of its
exponent are set. That also covers bfloat16, which numpy does not have.
"""

import math
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from weft.artifacts.errors import Reason, Refused
from weft.artifacts.safetensors_header import Header, TensorInfo

CHUNK_BYTES = 4 << 20
# safetensors dtype -> (integer of the same width, mask of its exponent)
_EXPONENTS: dict[str, tuple[Any, int]] = {
    "F16": (np.dtype("<u2"), 0x7C00),
    "BF16": (np.dtype("<u2"), 0x7F80),
    "F32": (np.dtype("<u4"), 0x7F80_0000),
}
SERVED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def check_finite(
    file: BinaryIO, header: Header, *, chunk_bytes: int = CHUNK_BYTES, tick: Callable[[], None] = lambda: None
) -> None:
    """Read every tensor of `file`; `tick` is called before each chunk and may raise to stop.

    Raises Refused: NotFinite (names tensor and index), DtypeNotSupported, OffsetsInvalid when the file ends early.
    """
    for tensor in header.tensors.values():
        check_dtype(tensor)
        _check_tensor(file, tensor, chunk_bytes, tick)


def check_dtype(tensor: TensorInfo) -> None:
    """Raises Refused(DtypeNotSupported) unless the tensor is float32, float16 or bfloat16."""
    if tensor.dtype not in SERVED_DTYPES:
        served = ", ".join(SERVED_DTYPES)
        raise Refused(Reason.DTYPE_NOT_SUPPORTED, f"tensor {tensor.name!r} is {tensor.dtype}; served are: {served}")


def dtype_name(dtypes: set[str]) -> str:
    """The widest of some served dtypes, by its long name: what a verdict reports."""
    return next(name for short, name in SERVED_DTYPES.items() if short in dtypes)


def _check_tensor(file: BinaryIO, tensor: TensorInfo, chunk_bytes: int, tick: Callable[[], None]) -> None:
    dtype, exponent = _EXPONENTS[tensor.dtype]
    file.seek(tensor.begin)
    step, done = chunk_bytes // 8 * 8, 0
    while done < tensor.size_bytes:
        tick()
        raw = file.read(min(step, tensor.size_bytes - done))
        if len(raw) % dtype.itemsize or not raw:
            raise Refused(Reason.OFFSETS_INVALID, f"the file ends inside tensor {tensor.name!r}")
        values: Any = np.frombuffer(raw, dtype)
        bad = (values & exponent) == exponent
        if bad.any():
            raise _not_finite(tensor, done // dtype.itemsize + int(bad.argmax()))
        done += len(raw)


def _not_finite(tensor: TensorInfo, flat: int) -> Refused:
    assert flat < math.prod(tensor.shape)
    index = [int(at) for at in np.unravel_index(flat, tensor.shape)] if tensor.shape else []
    return Refused(Reason.NOT_FINITE, f"tensor {tensor.name!r} is NaN or infinite at {index}")

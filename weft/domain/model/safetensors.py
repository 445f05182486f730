"""The header of a safetensors file, read with bounds and believed only where it adds up.

Layout: 8 bytes little-endian length N, N bytes of JSON `{name: {"dtype", "shape", "data_offsets": [begin, end)}}` with
an optional `"__metadata__"` of strings, then the tensors' bytes. Tensors have to cover the rest of the file exactly: no
overlap, no hole, nothing after the last (a hole could hide content that no check has seen).
"""

import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO, cast

from weft.domain.model.errors import Reason, Refused
from weft.domain.strict_json import JsonError, JsonObject, is_int, parse_object

MAX_ADAPTER_HEADER_BYTES = 1 << 20  # 7 projections x 126 layers x 2 tensors are about 220 KB
MAX_MODEL_HEADER_BYTES = 8 << 20
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 8
MAX_DIMENSION = 1 << 40

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
SERVED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # of weights


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: safetensors' dtype name, shape, and its bytes [begin, end) counted from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of a file in the order of their bytes; they cover all bytes behind the header."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    file_bytes: int


def check_dtype(tensor: TensorInfo) -> None:
    """Check that a tensor is float32, float16 or bfloat16. Raises Refused(DtypeNotSupported)."""
    if tensor.dtype not in SERVED_DTYPES:
        served = ", ".join(SERVED_DTYPES)
        raise Refused(Reason.DTYPE_NOT_SUPPORTED, f"tensor {tensor.name!r} is {tensor.dtype}; served are: {served}")


def dtype_name(dtypes: set[str]) -> str:
    """The widest of some served dtypes, by its long name: what a verdict reports."""
    return next(name for short, name in SERVED_DTYPES.items() if short in dtypes)


def read_header(file: BinaryIO, file_bytes: int, *, max_bytes: int = MAX_ADAPTER_HEADER_BYTES) -> Header:
    """Read the header at the start of `file`, which is `file_bytes` long; reads at most 8 + max_bytes.

    Raises Refused: HeaderTruncated, HeaderTooLarge, HeaderInvalid, OffsetsInvalid, DtypeNotSupported.
    """
    prefix = file.read(8)
    if len(prefix) < 8:
        raise Refused(Reason.HEADER_TRUNCATED, f"the file has {file_bytes} bytes; a header alone needs 8")
    (length,) = struct.unpack("<Q", prefix)
    if length > max_bytes:
        raise Refused(Reason.HEADER_TOO_LARGE, f"the header claims {length} bytes, the limit is {max_bytes}")
    if 8 + length > file_bytes:
        raise Refused(Reason.HEADER_TRUNCATED, f"the header claims {length} bytes, the file has {file_bytes}")
    if length < 2:
        raise Refused(Reason.HEADER_INVALID, f"a header of {length} bytes cannot be a JSON object")
    raw = file.read(length)
    try:
        value = parse_object(raw, max_bytes=len(raw))
    except JsonError as error:
        raise Refused(Reason.HEADER_INVALID, f"the header is not JSON: {error}") from error
    metadata: object = value.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in cast("JsonObject", metadata).values()):
        raise Refused(Reason.HEADER_INVALID, "__metadata__ is no object of strings")
    if len(value) > MAX_TENSORS:
        raise Refused(Reason.HEADER_INVALID, f"{len(value)} tensors, the limit is {MAX_TENSORS}")
    data_start = 8 + len(raw)
    tensors = sorted((_tensor(name, row, data_start) for name, row in value.items()), key=lambda t: (t.begin, t.end))
    check_cover(tensors, data_start, file_bytes)
    named = {tensor.name: tensor for tensor in tensors}
    return Header(named, cast("dict[str, str]", metadata), file_bytes)


def check_cover(tensors: list[TensorInfo], data_start: int, file_bytes: int) -> None:
    """Check that tensors, in the order of their bytes, cover [data_start, file_bytes). Raises
    Refused(OffsetsInvalid)."""
    if not tensors:
        end = data_start
    else:
        if tensors[0].begin != data_start:
            raise Refused(Reason.OFFSETS_INVALID, f"a hole before the first tensor, {tensors[0].name!r}")
        for before, after in pairwise(tensors):
            if before.end != after.begin:
                kind = "overlap" if before.end > after.begin else "leave a hole between them"
                raise Refused(Reason.OFFSETS_INVALID, f"tensors {before.name!r} and {after.name!r} {kind}")
        end = tensors[-1].end
    if end != file_bytes:
        raise Refused(Reason.OFFSETS_INVALID, f"the tensors end at byte {end}, the file at byte {file_bytes}")


def _tensor(name: str, row: object, data_start: int) -> TensorInfo:
    if not isinstance(row, dict) or set(cast("JsonObject", row)) != {"dtype", "shape", "data_offsets"}:
        raise Refused(Reason.HEADER_INVALID, f"tensor {name[:200]!r} needs exactly dtype, shape and data_offsets")
    fields = cast("JsonObject", row)
    dtype, shape = fields["dtype"], _integers(name, "shape", fields["shape"], MAX_DIMENSIONS)
    offsets = _integers(name, "data_offsets", fields["data_offsets"], 2)
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise Refused(Reason.DTYPE_NOT_SUPPORTED, f"tensor {name[:200]!r} has the unknown dtype {str(dtype)[:40]!r}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Refused(Reason.OFFSETS_INVALID, f"tensor {name[:200]!r} has the offsets {list(offsets)}")
    if offsets[1] - offsets[0] != math.prod(shape) * ITEM_BYTES[dtype]:
        raise Refused(
            Reason.OFFSETS_INVALID,
            f"tensor {name[:200]!r} is {dtype}{list(shape)} and cannot have {offsets[1] - offsets[0]} bytes",
        )
    return TensorInfo(name, dtype, shape, data_start + offsets[0], data_start + offsets[1])


def _integers(name: str, field: str, value: object, limit: int) -> tuple[int, ...]:
    items = cast("list[object]", value) if isinstance(value, list) else None
    if items is None or len(items) > limit or not all(is_int(item) for item in items):
        raise Refused(Reason.HEADER_INVALID, f"tensor {name[:200]!r}: {field} is no list of at most {limit} integers")
    integers = cast("list[int]", items)
    if not all(0 <= item <= MAX_DIMENSION for item in integers):
        reason = Reason.OFFSETS_INVALID if field == "data_offsets" else Reason.HEADER_INVALID
        raise Refused(reason, f"tensor {name[:200]!r}: {field} holds a number below 0 or above {MAX_DIMENSION}")
    return tuple(integers)

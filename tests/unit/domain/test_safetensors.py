"""The header reader: every way a header can lie has its reason, and no bytes make it fail otherwise."""

import io
import json
import re
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.artifacts.making import pack, safetensors
from weft.artifacts.errors import Reason, Refused
from weft.domain.model.safetensors import ITEM_BYTES, Header, check_cover, read_header


def read(raw: bytes, **limits: int) -> Header:
    return read_header(io.BytesIO(raw), len(raw), **limits)


def refusal(raw: bytes, **limits: int) -> Reason:
    with pytest.raises(Refused) as caught:
        read(raw, **limits)
    return caught.value.reason


def tensor(begin: int, end: int, *, shape: Any = None, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_a_correct_file_is_read_with_places_counted_from_its_first_byte() -> None:
    raw = pack({"b": ("F32", np.ones((2, 3))), "a": ("BF16", np.zeros((4,))), "empty": ("F16", np.zeros((0, 5)))})
    header = read(raw)
    assert header.metadata == {"format": "pt"}
    assert header.tensors["b"].shape == (2, 3)
    assert raw[header.tensors["b"].begin : header.tensors["b"].end] == np.ones(6, "<f4").tobytes()
    assert header.tensors["a"].size_bytes == 8
    assert header.tensors["empty"].size_bytes == 0


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_a_dtype_says_how_many_bits_a_number_has(dtype: str) -> None:
    bits = int(re.findall(r"[0-9]+", dtype)[0]) if dtype != "BOOL" else 8
    size = 3 * bits // 8
    assert (
        read(safetensors({"a": tensor(0, size, shape=[3], dtype=dtype)}, bytes(size))).tensors["a"].size_bytes == size
    )


def test_a_file_without_tensors_and_one_with_padding_are_correct() -> None:
    assert read(safetensors({})).tensors == {}
    assert read(safetensors(b'{"__metadata__":{}}     ')).tensors == {}


@pytest.mark.parametrize("cut", [0, 1, 7])
def test_a_file_shorter_than_its_length_field_is_truncated(cut: int) -> None:
    assert refusal(safetensors({})[:cut]) == Reason.HEADER_TRUNCATED


def test_a_file_that_ends_inside_its_header_is_truncated() -> None:
    assert refusal(pack({"a": ("F32", np.ones(4))})[:40]) == Reason.HEADER_TRUNCATED


@pytest.mark.parametrize("length", [(1 << 20) + 1, 1 << 40, (1 << 64) - 1])
def test_a_header_that_claims_too_much_is_refused_unread(length: int) -> None:
    class Once(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            assert size == 8, "nothing beyond the length field is read"
            return super().read(size)

    raw = safetensors({}, length=length)
    with pytest.raises(Refused) as caught:
        read_header(Once(raw), len(raw))
    assert caught.value.reason == Reason.HEADER_TOO_LARGE


def test_the_limit_can_be_raised_for_models() -> None:
    raw = safetensors(b"{}" + b" " * (2 << 20))
    assert refusal(raw) == Reason.HEADER_TOO_LARGE
    assert read(raw, max_bytes=8 << 20).tensors == {}


@pytest.mark.parametrize(
    "header",
    [
        b"[]", b"nope", b'{"a":}', b"{}x", b"\xff\xfe", b'{"a":1}', b'{"a":[]}', b'{"__metadata__":{"a":1}}',
        b'{"__metadata__":[]}', b'{"a":NaN}', b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"more":1}}', b'{"a":{"dtype":"U8","shape":[0]}}',
        b'{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":0,"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}}',
        b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", b'{"a":' * 150_000,
    ],
)  # fmt: skip
def test_a_header_that_is_not_what_safetensors_defines_is_invalid(header: bytes) -> None:
    assert refusal(safetensors(header)) == Reason.HEADER_INVALID


def test_half_a_character_is_invalid_anywhere_in_a_header() -> None:
    assert refusal(safetensors({"\ud800": tensor(0, 1)}, b"0")) == Reason.HEADER_INVALID
    assert refusal(safetensors({"__metadata__": {"a": "\udc00"}})) == Reason.HEADER_INVALID
    assert read(safetensors({"__metadata__": {"a": "\U0001f9f6 \\ud800"}})).metadata["a"].startswith("\U0001f9f6")


def test_too_many_tensors_are_refused() -> None:
    rows = ",".join(f'"{n}":0' for n in range((1 << 16) + 1))
    assert refusal(safetensors(f"{{{rows}}}".encode())) == Reason.HEADER_INVALID


@pytest.mark.parametrize("dtype", ["F7", "f32", "", 5, None])
def test_an_unknown_dtype_is_named(dtype: object) -> None:
    assert refusal(safetensors({"a": tensor(0, 0, dtype=dtype)})) == Reason.DTYPE_NOT_SUPPORTED


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": tensor(0, 4), "b": tensor(2, 6)},  # overlap
        {"a": tensor(0, 4), "b": tensor(0, 4)},  # the same bytes twice
        {"a": tensor(0, 4), "b": tensor(5, 8)},  # a hole
        {"a": tensor(1, 8)},  # a hole at the start
        {"a": tensor(0, 7)},  # bytes after the last
        {"a": tensor(0, 9)},  # beyond the end
        {"a": tensor(0, 8, shape=[7])},  # size and shape disagree
        {"a": tensor(0, 8, dtype="F32")},  # size and dtype disagree
        {"a": {"dtype": "U8", "shape": [0], "data_offsets": [8, 0]}},  # backwards
        {"a": {"dtype": "U8", "shape": [8], "data_offsets": [-8, 0]}},  # negative
        {"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 1 << 70]}},
        {"a": {"dtype": "U8", "shape": [8], "data_offsets": [0]}},
        {"a": {"dtype": "U8", "shape": [1 << 40] * 8, "data_offsets": [0, 8]}},
    ],
)
def test_offsets_that_do_not_add_up_are_refused(tensors: dict[str, Any]) -> None:
    assert refusal(safetensors(tensors, b"12345678")) == Reason.OFFSETS_INVALID


def test_a_truncated_file_is_refused_by_its_offsets() -> None:
    assert refusal(pack({"a": ("F32", np.ones(4))})[:-1]) == Reason.OFFSETS_INVALID


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 66) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
OFFSET = st.integers(-1, 20)
ROW = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F16", "F32", "BF16", "X", None]),
        "shape": st.lists(OFFSET, max_size=3) | JSON,
        "data_offsets": st.lists(OFFSET, min_size=2, max_size=2) | JSON,
    }
)


@given(st.binary(max_size=64) | st.builds(lambda n, rest: struct.pack("<Q", n) + rest, st.integers(0, 80), st.binary()))
@example(b"")
def test_no_bytes_make_the_reader_fail_in_another_way(raw: bytes) -> None:
    _read_or_refuse(raw)


@given(st.dictionaries(st.text(max_size=4), ROW | JSON, max_size=4), st.binary(max_size=24))
def test_no_header_makes_the_reader_fail_in_another_way(header: dict[str, Any], data: bytes) -> None:
    _read_or_refuse(safetensors(json.dumps(header).encode(), data))


@given(st.data())
def test_a_correct_file_with_one_byte_changed_is_read_or_refused(data: st.DataObject) -> None:
    raw = bytearray(pack({"a": ("F32", np.ones((2, 2))), "b": ("BF16", np.ones(3))}))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    _read_or_refuse(bytes(raw))


def _read_or_refuse(raw: bytes) -> None:
    try:
        header = read(raw, max_bytes=1 << 16)
    except Refused:
        return
    check_cover(list(header.tensors.values()), 8 + int.from_bytes(raw[:8], "little"), len(raw))


@given(
    st.lists(st.tuples(st.sampled_from(["F32", "F16", "BF16"]), st.lists(st.integers(0, 4), max_size=3)), max_size=6)
)
def test_every_correct_file_is_read(shapes: list[tuple[str, list[int]]]) -> None:
    tensors = {f"t{n}": (dtype, np.zeros(shape)) for n, (dtype, shape) in enumerate(shapes)}
    header = read(pack(tensors))
    assert {name: (t.dtype, list(t.shape)) for name, t in header.tensors.items()} == {
        f"t{n}": (dtype, shape) for n, (dtype, shape) in enumerate(shapes)
    }

"""The NaN scan: finds every NaN and infinity wherever chunks are cut, and nothing else."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.artifacts.making import pack, refused
from weft.artifacts.errors import Reason, Refused
from weft.artifacts.verify import check_finite
from weft.domain.model.safetensors import read_header


def scan(raw: bytes, *, chunk_bytes: int = 16) -> None:
    file = io.BytesIO(raw)
    check_finite(file, read_header(file, len(raw)), chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 7, 8, 59])
def test_one_bad_number_is_found_and_its_place_named(dtype: str, bad: float, at: int) -> None:
    values = np.linspace(-1, 1, 60)
    values[at] = bad
    with pytest.raises(Refused) as caught:
        scan(pack({"fine": ("F32", np.ones(5)), "w": (dtype, values.reshape(6, 10))}))
    assert caught.value.reason == Reason.NOT_FINITE
    assert f"'w' is NaN or infinite at [{at // 10}, {at % 10}]" in caught.value.message


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_largest_and_smallest_numbers_are_finite(dtype: str) -> None:
    most = {"F32": np.finfo("f4").max, "F16": np.finfo("f2").max, "BF16": 3.38e38}[dtype]
    scan(pack({"w": (dtype, np.array([most, -most, 0.0, -0.0, 1e-45]))}))


@given(
    st.sampled_from(["F32", "F16", "BF16"]),
    st.lists(st.floats(width=16, allow_nan=True, allow_infinity=True), max_size=40),
    st.sampled_from([8, 16, 24, 4096]),
)
def test_the_scan_agrees_with_numpy(dtype: str, values: list[float], chunk_bytes: int) -> None:
    array = np.array(values)
    raw = pack({"w": (dtype, array)})
    if np.isfinite(array).all():
        scan(raw, chunk_bytes=chunk_bytes)
    else:
        with pytest.raises(Refused):
            scan(raw, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("dtype", ["F64", "I32"])
def test_another_dtype_is_not_looked_at_but_refused(dtype: str) -> None:
    with refused(Reason.DTYPE_NOT_SUPPORTED):
        scan(pack({"w": (dtype, np.ones(2))}))


def test_a_file_that_shrinks_while_it_is_scanned_is_refused() -> None:
    raw = pack({"w": ("F32", np.ones(64))})
    header = read_header(io.BytesIO(raw), len(raw))
    with refused(Reason.OFFSETS_INVALID):
        check_finite(io.BytesIO(raw[:-6]), header, chunk_bytes=16)


def test_the_scan_can_be_stopped_between_two_chunks() -> None:
    class StopNowError(Exception):
        pass

    seen: list[int] = []

    def tick(_: int) -> None:
        seen.append(1)
        if len(seen) == 3:
            raise StopNowError

    raw = pack({"w": ("F32", np.ones(64))})
    file = io.BytesIO(raw)
    with pytest.raises(StopNowError):
        check_finite(file, read_header(file, len(raw)), chunk_bytes=16, tick=tick)

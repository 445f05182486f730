"""A model as a file: one .npz of plain arrays (nothing is ever unpickled), replaced atomically.

Layout 1: `meta` (JSON as bytes: layout, family, learned, adapter names, group levels), the ridge's `weight` and
`variance` [dim], the `spread`, and the windows of offsets and groups as one array each with their lengths.
"""

import io
import json
import zipfile
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.files import write_atomically
from weft_predictor.core.conformal import WINDOW, Group, Groups
from weft_predictor.core.offsets import Offsets
from weft_predictor.core.predictor import COVERAGE_WINDOW, TARGET, LengthPredictor
from weft_predictor.core.ridge import Ridge
from weft_predictor.core.spread import OCTAVES, Spread
from weft_predictor.errors import CorruptModel

LAYOUT = 1
MAX_FILE_BYTES = 512 << 20
Arrays = dict[str, NDArray[Any]]


def save(path: Path, arrays: Arrays) -> None:
    """Write `arrays` to `path`, whole. A crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    write_atomically(path, buffer.getbuffer())


def load(path: Path) -> LengthPredictor:
    """Read a model back. Raises FileNotFoundError, CorruptModel."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise CorruptModel(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            return from_arrays({name: file[name] for name in file.files})
    except (ValueError, KeyError, TypeError, EOFError, IndexError, zipfile.BadZipFile) as error:
        raise CorruptModel(f"{path}: {error}") from error


def to_arrays(model: LengthPredictor) -> Arrays:
    """A copy of everything that the model has learned."""
    groups = {"": model.groups.pooled, **model.groups.by_adapter}
    offsets = dict(model.offsets.items())
    meta = {
        "layout": LAYOUT,
        "family": model.family,
        "learned": model.learned,
        "base": model.ridge.base,
        "offset_adapters": list(offsets),
        "groups": [[name, group.level, group.prior, group.draws] for name, group in groups.items()],
    }
    return {
        "meta": np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8),
        "weight": model.ridge.weight.copy(),
        "variance": model.ridge.variance.copy(),
        "spread_scale": model.spread.scale.copy(),
        "spread_count": model.spread.count.copy(),
        "hits": np.array(model.hits, dtype=np.bool_),
        **_pack("offset", offsets.values()),
        **_pack("group", (group.scores() for group in groups.values())),
    }


def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> LengthPredictor:
    """The model of `to_arrays`. Raises CorruptModel (or KeyError, ValueError) for anything else."""
    meta = json.loads(arrays["meta"].tobytes())
    if meta["layout"] != LAYOUT:
        raise CorruptModel(f"layout {meta['layout']}, this version reads {LAYOUT}")
    model = LengthPredictor(
        str(meta["family"]),
        _ridge(arrays, float(meta["base"])),
        _offsets(meta["offset_adapters"], _unpack("offset", arrays)),
        Spread(_vector(arrays, "spread_scale", OCTAVES), _vector(arrays, "spread_count", OCTAVES)),
        _groups(meta["groups"], _unpack("group", arrays)),
        int(meta["learned"]),
    )
    model.hits = deque((bool(hit) for hit in arrays["hits"]), maxlen=COVERAGE_WINDOW)
    return model


def _ridge(arrays: Mapping[str, NDArray[Any]], base: float) -> Ridge:
    dim = len(arrays["weight"])
    if dim & (dim - 1):
        raise CorruptModel(f"{dim} weights are not a power of two")
    weight, variance = (_vector(arrays, name, dim).astype(np.float32) for name in ("weight", "variance"))
    return Ridge(weight, variance, base)


def _offsets(adapters: list[str], windows: list[list[float]]) -> Offsets:
    offsets = Offsets()
    for adapter, window in zip(adapters, windows, strict=True):
        offsets.restore(adapter, window)
    return offsets


def _groups(rows: list[tuple[str, float, int, int]], windows: list[list[float]]) -> Groups:
    groups = Groups(target=TARGET)
    for (name, level, prior, draws), window in zip(rows, windows, strict=True):
        if not 0 < len(window) <= WINDOW + prior:
            raise CorruptModel(f"a group of {len(window)} scores")
        group = Group(window, target=TARGET, prior=prior)
        group.level, group.draws = level, draws
        if name:
            groups.by_adapter[name] = group
        else:
            groups.pooled = group
    return groups


def _pack(name: str, windows: Iterable[list[float]]) -> Arrays:
    rows = list(windows)
    flat = np.array([value for row in rows for value in row], dtype=np.float64)
    return {f"{name}_values": flat, f"{name}_lengths": np.array([len(row) for row in rows], dtype=np.int64)}


def _unpack(name: str, arrays: Mapping[str, NDArray[Any]]) -> list[list[float]]:
    lengths = arrays[f"{name}_lengths"]
    values = _vector(arrays, f"{name}_values", int(lengths.sum()))
    ends = np.cumsum(lengths)
    return [values[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]


def _vector(arrays: Mapping[str, NDArray[Any]], name: str, length: int) -> NDArray[Any]:
    vector = arrays[name]
    if vector.shape != (length,) or not np.isfinite(vector).all():
        raise CorruptModel(f"{name} is not {length} finite numbers")
    return vector

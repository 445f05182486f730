"""A base on disk: safetensors files, mapped and compared with the model's configuration before anything is read.

Each tensor is a view of the mapped file, in the dtype it is stored in: no second copy in memory. `release` lets the
pages of a tensor leave memory once it has been read, so that loading a model never needs much more than the model.

`depot.DepotSource` has compared each file with its SHA-256 before. A file that the disk changes under a process that
has mapped it is not noticed before the next start; one that is cut short there ends the process (SIGBUS).
"""

import json
import mmap
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import numpy as np

from weft.domain.model.config import parse_model_config
from weft.domain.model.errors import Refused
from weft.domain.model.generation import tokenizer_eos
from weft.domain.model.safetensors import MAX_MODEL_HEADER_BYTES, Header, TensorInfo, read_header
from weft.domain.model.spec import LayerSpec, ModelSpec
from weft.domain.model.tensors import (
    EMBEDDING,
    HEAD,
    NORM,
    check_model_tensors,
    head_norms,
    layer_tensors,
    some_of,
    whole_names,
)
from weft_runner.errors import ModelUnsupported, StoppedAtStart, WeightsInvalid
from weft_runner.model.arrays import BFLOAT16, FLOAT16, FLOAT32, Array

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}
Files = Mapping[str, Path]  # plain file name -> where it is
# torch, which shares these arrays, has no read-only tensors, so a mapping is private and writable; nothing is ever
# written, so no memory has to be set aside for it, and a file may be larger than memory. Python names the flag from
# 3.13 on; this is Linux's.
_PRIVATE = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def read_spec(config: Path, files: Files | None = None) -> ModelSpec:
    """Read the configuration of a base model, and of its other files where answers end. Raises ModelUnsupported."""

    def read(name: str) -> bytes | None:
        return files[name].read_bytes() if files and name in files else None

    try:
        spec = parse_model_config(config.read_bytes(), read("generation_config.json"))
        return replace(spec, eos=spec.eos | tokenizer_eos(read, spec.vocab_size))
    except Refused as error:
        raise ModelUnsupported(error.message) from error


@dataclass(frozen=True, slots=True, eq=False)
class MappedTensor:
    """A tensor of a mapped safetensors file; the mapping lives as long as one of its tensors."""

    file: mmap.mmap
    info: TensorInfo

    def view(self) -> Array:
        begin, end, shape, dtype = self.info.begin, self.info.end, self.info.shape, DTYPES[self.info.dtype]
        if begin == end:
            return np.empty(shape, dtype)
        if begin % dtype.itemsize:  # no writer that pads its header does this; kernels read aligned numbers
            return np.frombuffer(bytearray(self.file[begin:end]), dtype).reshape(shape)
        count = (end - begin) // dtype.itemsize
        return np.frombuffer(self.file, dtype, count, begin).reshape(shape)

    def release(self) -> None:
        """Let the pages leave memory: they are the file's own and clean, so nothing is lost."""
        start = self.info.begin // mmap.PAGESIZE * mmap.PAGESIZE
        self.file.madvise(mmap.MADV_DONTNEED, start, self.info.end - start)


def map_file(file: BinaryIO) -> mmap.mmap:
    """All of it, for tensors that are views."""
    return mmap.mmap(file.fileno(), 0, flags=_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


@dataclass(frozen=True, slots=True, eq=False)
class LayerTensors:
    """One layer as it lies on disk: views, each in its stored dtype.

    `projections`: those that the family has by name (`q_proj`), each [out, in]; `biases`: [out] of those that have one.
    Norms are what is multiplied with, [H], or with LayerNorm that and what is added, [2, H]; None: there is none.
    `q_norm`, `k_norm`: of a head [D], or of all of them.
    """

    attention_norm: Array | None
    attention_post_norm: Array | None
    mlp_norm: Array | None
    mlp_post_norm: Array | None
    projections: Mapping[str, Array]
    biases: Mapping[str, Array]
    q_norm: Array | None
    k_norm: Array | None
    spec: LayerSpec


class LoadProgress(Protocol):
    """How far the weights of a process are loaded, as `weft.telemetry.progress` counts it."""

    def begin(self, subject: str, total: int) -> None: ...
    def add(self, count: int) -> None: ...


class Checkpoint:
    """The tensors of one base, in one file or in shards. Made by `open_checkpoint`; nothing of it may be written to."""

    def __init__(
        self,
        spec: ModelSpec,
        stored: Mapping[str, MappedTensor],
        stopping: Callable[[], bool],
        taken: Callable[[int], None],
    ) -> None:
        self.spec = spec
        self._stored, self._stopping, self._taken = stored, stopping, taken

    def tensor(self, name: str) -> Array:
        """A view of the mapped file, in the stored dtype. Raises StoppedAtStart; KeyError for what is no weight."""
        if self._stopping():
            raise StoppedAtStart(f"stopped before {name} was loaded")
        self._taken(self._stored[name].info.size_bytes)
        return self._stored[name].view()

    @property
    def embedding(self) -> Array:
        """[V, H]"""
        return self.tensor(EMBEDDING)

    @property
    def norm(self) -> Array:
        """[H], or [2, H] with LayerNorm."""
        return self._norm(NORM.removesuffix(".weight"))

    @property
    def head(self) -> Array:
        """[V, H]; the embedding where the two are tied."""
        return self.tensor(EMBEDDING if self.spec.tied_embeddings else HEAD)

    def layer(self, index: int) -> LayerTensors:
        """One layer, not stacked. Raises StoppedAtStart."""
        spec, prefix = self.spec, f"model.layers.{index}"
        projections, biases = dict[str, Array](), dict[str, Array]()
        for module, held in spec.family.modules.items():
            projections |= self._parts(f"{prefix}.{module}.weight", held)
            if held[0] in spec.biases:
                biases |= self._parts(f"{prefix}.{module}.bias", held)
        before, behind, before_mlp, behind_mlp = (
            self._norm(f"{prefix}.{name}") if name else None for name in spec.family.norms.value
        )
        heads = {name: self._scaled(f"{prefix}.self_attn.{name}") for name, _ in head_norms(spec)}
        return LayerTensors(
            before, behind, before_mlp, behind_mlp, projections, biases, heads.get("q_norm"), heads.get("k_norm"),
            spec.by_layer[index],
        )  # fmt: skip

    def _parts(self, name: str, held: Sequence[str]) -> dict[str, Array]:
        """View each projection's rows of a tensor that holds them under each other."""
        whole, first, parts = self.tensor(name), 0, dict[str, Array]()
        for projection in held:
            rows = self.spec.projection(projection)[1]
            parts[projection] = whole[first : first + rows]
            first += rows
        return parts

    def _norm(self, name: str) -> Array:
        scaled = self._scaled(name)
        return np.stack([scaled, self.tensor(f"{name}.bias")]) if self.spec.family.layer_norm else scaled

    def _scaled(self, name: str) -> Array:
        """Read what a norm multiplies with: its stored weight, or one more."""
        weight, offset = self.tensor(f"{name}.weight"), self.spec.family.norm_offset
        return weight.astype(np.float32) + np.float32(offset) if offset else weight

    def release(self, *names: str) -> None:
        """These have been read: their pages may leave memory. Reading a view again brings them back from disk."""
        for name in names:
            self._stored[name].release()

    def release_layer(self, index: int) -> None:
        """Release all tensors of a layer (`release`)."""
        self.release(*(name for name, _ in layer_tensors(self.spec, index)))


def open_checkpoint(
    files: Files, spec: ModelSpec, stopping: Callable[[], bool] = lambda: False, progress: LoadProgress | None = None
) -> Checkpoint:
    """Map the weights and compare names, shapes and dtypes with the spec; no weight is read yet.

    `progress` counts the bytes of tensors as they are taken.

    Raises WeightsInvalid: files or tensors that are missing, not part of the model, in two files, misshaped, quantised.
    """
    index = _read_index(files[INDEX]) if INDEX in files else None
    headers: dict[str, Header] = {}
    mapped: dict[str, mmap.mmap] = {}
    for shard in _shards(files, index):
        try:
            with files[shard].open("rb") as file:
                size = files[shard].stat().st_size
                headers[shard] = read_header(file, size, max_bytes=MAX_MODEL_HEADER_BYTES)
                mapped[shard] = map_file(file)
        except (Refused, OSError) as error:
            raise WeightsInvalid(f"{shard}: {error}") from error
        held = headers[shard].tensors.keys()
        if index is not None and (lost := {name for name, at in index.items() if at == shard} - held):
            raise WeightsInvalid(f"{shard} has no tensor {some_of(lost)}, and {INDEX} names it there")
    try:
        check_model_tensors(spec, headers)
    except Refused as error:
        raise WeightsInvalid(error.message) from error
    stored = {
        name: MappedTensor(mapped[shard], info)
        for shard, header in whole_names(headers, spec).items()
        for name, info in header.tensors.items()
    }
    if progress is None:
        return Checkpoint(spec, stored, stopping, lambda _: None)
    progress.begin("loading", sum(tensor.info.size_bytes for tensor in stored.values()))
    return Checkpoint(spec, stored, stopping, progress.add)


# ---- the index


def _read_index(path: Path) -> dict[str, str]:
    """tensor name -> shard."""
    try:
        index: Any = json.loads(path.read_bytes())
    except ValueError as error:
        raise WeightsInvalid(f"{INDEX} is not JSON: {error}") from error
    where: Any = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
        raise WeightsInvalid(f"{INDEX} has no weight_map from tensors to files")
    return cast("dict[str, str]", where)


def _shards(files: Files, index: Mapping[str, str] | None) -> list[str]:
    if index is not None:
        shards = sorted(set(index.values()))
    else:
        shards = [SINGLE] if SINGLE in files else sorted(name for name in files if name.endswith(".safetensors"))
    if outside := [shard for shard in shards if "/" in shard or "\\" in shard]:
        raise WeightsInvalid(f"{INDEX} names {some_of(outside)}: shards lie beside it, without a path")
    if missing := [shard for shard in shards if shard not in files]:
        raise WeightsInvalid(f"no weights: {some_of(missing)} is not there")
    if not shards:
        raise WeightsInvalid(f"no weights: {SINGLE} is not there")
    return shards

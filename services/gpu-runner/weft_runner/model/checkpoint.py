"""A base on disk: safetensors mapped and compared with its spec before anything is read. Never a pickle.

Each tensor is a view of the mapped file, in the dtype it is stored in: no second copy in memory. Whoever has read one
may let its pages go (`release`), so that loading a model never needs much more than the model itself.

`depot.DepotSource` has compared each file with its SHA-256 before. A file that the disk changes under a process that
has mapped it is not noticed before the next start; one that is cut short there ends the process (SIGBUS).
"""

import json
import mmap
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from weft_runner.errors import StoppedAtStart, WeightsInvalid
from weft_runner.model.spec import ModelSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
BIASED = ATTENTION[:3]
READ_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
NAMED_MAX = 4  # tensors that an error names
Files = Mapping[str, Path]  # plain file name -> where it is
# torch has no read-only tensors, so a mapping is private and writable; nothing is ever written, so no memory has to be
# set aside for it, and a file may be larger than memory. Python names the flag from 3.13 on; this is Linux's.
_PRIVATE = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


@dataclass(frozen=True, slots=True, eq=False)
class LayerTensors:
    """One layer as it lies on disk: views, each in its stored dtype.

    `projections`: the seven by name (`q_proj`), each [out, in]; `biases`: [out] of those that have one.
    """

    attention_norm: torch.Tensor  # [H]
    mlp_norm: torch.Tensor  # [H]
    projections: Mapping[str, torch.Tensor]
    biases: Mapping[str, torch.Tensor]
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    window: int


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """Where a tensor lies: bytes [begin, end) of a mapped file."""

    file: mmap.mmap
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    begin: int
    end: int

    def view(self) -> torch.Tensor:
        dtype = READ_DTYPES[self.dtype]
        if self.begin % dtype.itemsize:  # no writer that pads its header does this; torch wants numbers aligned
            return torch.frombuffer(bytearray(self.file[self.begin : self.end]), dtype=dtype).view(self.shape)
        count = (self.end - self.begin) // dtype.itemsize
        return torch.frombuffer(self.file, dtype=dtype, count=count, offset=self.begin).view(self.shape)

    def release(self) -> None:
        """The pages are the file's own and clean, so nothing is lost."""
        start = self.begin // mmap.PAGESIZE * mmap.PAGESIZE
        self.file.madvise(mmap.MADV_DONTNEED, start, self.end - start)


class Checkpoint:
    """The tensors of one base, in one file or in shards. Made by `open_checkpoint`; nothing of it may be written to."""

    def __init__(self, spec: ModelSpec, stored: Mapping[str, _Stored], stopping: Callable[[], bool]) -> None:
        self.spec = spec
        self._stored, self._stopping = stored, stopping

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the mapped file, in the stored dtype. Raises StoppedAtStart; KeyError for what is no weight."""
        if self._stopping():
            raise StoppedAtStart(f"told to stop before {name} was loaded")
        return self._stored[name].view()

    @property
    def embedding(self) -> torch.Tensor:
        """[V, H]"""
        return self.tensor(EMBEDDING)

    @property
    def norm(self) -> torch.Tensor:
        """[H]"""
        return self.tensor(NORM)

    @property
    def head(self) -> torch.Tensor:
        """[V, H]; the embedding where the two are tied."""
        return self.tensor(EMBEDDING if self.spec.tied else HEAD)

    def layer(self, index: int) -> LayerTensors:
        """One layer, not stacked. Raises StoppedAtStart."""
        spec, prefix = self.spec, f"model.layers.{index}"

        def head_norm(name: str) -> torch.Tensor | None:
            return self.tensor(f"{prefix}.self_attn.{name}.weight") if spec.qk_norm else None

        return LayerTensors(
            attention_norm=self.tensor(f"{prefix}.input_layernorm.weight"),
            mlp_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight"),
            projections={name: self.tensor(f"{_module(prefix, name)}.weight") for name in ATTENTION + MLP},
            biases={name: self.tensor(f"{_module(prefix, name)}.bias") for name in BIASED if spec.qkv_bias},
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
            window=spec.windows[index],
        )

    def release(self, *names: str) -> None:
        """These have been read: their pages may leave memory. Reading a view again brings them back from disk."""
        for name in names:
            self._stored[name].release()

    def release_layer(self, index: int) -> None:
        """As `release`, of all tensors of a layer."""
        self.release(*(name for name, _ in _layer_tensors(self.spec, index)))


def open_checkpoint(files: Files, spec: ModelSpec, stopping: Callable[[], bool] = lambda: False) -> Checkpoint:
    """Map the weights and compare names, shapes and dtypes with the spec; no weight is read yet.

    Raises WeightsInvalid: files or tensors that are missing, not part of the model, in two files, misshaped, quantised.
    """
    stored = _map_all(files)
    _check_tensors(stored, spec)
    return Checkpoint(spec, stored, stopping)


def expected_tensors(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor that the model's weights have."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    yield EMBEDDING, (vocab, hidden)
    for layer in range(spec.layers):
        yield from _layer_tensors(spec, layer)
    yield NORM, (hidden,)
    if not spec.tied:
        yield HEAD, (vocab, hidden)


def _layer_tensors(spec: ModelSpec, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    prefix = f"model.layers.{layer}"
    for name in ATTENTION + MLP:
        n_in, n_out = spec.projection(name)
        yield f"{_module(prefix, name)}.weight", (n_out, n_in)
        if spec.qkv_bias and name in BIASED:
            yield f"{_module(prefix, name)}.bias", (n_out,)
    if spec.qk_norm:
        yield from ((f"{prefix}.self_attn.{half}_norm.weight", (spec.head_dim,)) for half in "qk")
    yield f"{prefix}.input_layernorm.weight", (spec.hidden_size,)
    yield f"{prefix}.post_attention_layernorm.weight", (spec.hidden_size,)


def _module(prefix: str, projection: str) -> str:
    return f"{prefix}.{'self_attn' if projection in ATTENTION else 'mlp'}.{projection}"


# ---- files


def _map_all(files: Files) -> dict[str, _Stored]:
    """tensor name -> where it is."""
    index = _read_index(files[INDEX]) if INDEX in files else None
    stored: dict[str, _Stored] = {}
    for shard in _shards(files, index):
        found = _map_file(shard, files[shard])
        if twice := found.keys() & stored.keys():
            raise WeightsInvalid(f"{shard}: {_some(twice)} is in another file too")
        if index is not None and (lost := {name for name, at in index.items() if at == shard} - found.keys()):
            raise WeightsInvalid(f"{shard} has no tensor {_some(lost)}, and {INDEX} says so")
        stored |= found
    return stored


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
        raise WeightsInvalid(f"{INDEX} names {_some(outside)}: shards lie beside it, without a path")
    if missing := [shard for shard in shards if shard not in files]:
        raise WeightsInvalid(f"no weights: {_some(missing)} is not there")
    if not shards:
        raise WeightsInvalid(f"no weights: {SINGLE} is not there")
    return shards


def _map_file(name: str, path: Path) -> dict[str, _Stored]:
    """safetensors checks that the header's tensors cover the file, without holes, each with the bytes of its shape."""
    try:
        with safe_open(str(path), framework="pt", device="cpu"), path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
            mapped = mmap.mmap(file.fileno(), 0, flags=_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (SafetensorError, OSError) as error:
        raise WeightsInvalid(f"{name}: {error}") from error
    header.pop("__metadata__", None)
    return {
        tensor: _Stored(
            mapped, row["dtype"], tuple(row["shape"]), *(8 + length + offset for offset in row["data_offsets"])
        )
        for tensor, row in header.items()
    }


def _check_tensors(stored: Mapping[str, _Stored], spec: ModelSpec) -> None:
    expected = dict(expected_tensors(spec))
    if foreign := {f"{name} ({at.dtype})" for name, at in stored.items() if _quantised(at.dtype)}:
        raise WeightsInvalid(f"quantised weights are not read: {_some(foreign)}; read are {', '.join(READ_DTYPES)}")
    if extra := {name for name in stored.keys() - expected.keys() if not _harmless(name, spec)}:
        raise WeightsInvalid(f"{_some(extra)} is no part of a {spec.architecture} of this config.json")
    if missing := expected.keys() - stored.keys():
        raise WeightsInvalid(f"the weights have no tensor {_some(missing)}, config.json asks for it")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise WeightsInvalid(f"{name} has the shape {list(stored[name].shape)}, config.json asks for {list(shape)}")
        if stored[name].dtype not in READ_DTYPES:
            raise WeightsInvalid(f"{name} is {stored[name].dtype}; read are {', '.join(READ_DTYPES)}")


def _quantised(dtype: str) -> bool:
    """Packed whole numbers, bytes and numbers of 4 to 8 bits: what quantised checkpoints hold beside their scales."""
    return dtype.startswith(("I8", "I16", "I32", "U", "F8_", "F6_", "F4"))


def _harmless(name: str, spec: ModelSpec) -> bool:
    """Rotary tables of old files, and a head beside the embedding that it is tied to."""
    return name.endswith(".rotary_emb.inv_freq") or (name == HEAD and spec.tied)


def _some(names: Iterable[str]) -> str:
    """`a, b, c, d and 12 more`"""
    ordered = [name[:200] for name in sorted(names)]
    more = f" and {len(ordered) - NAMED_MAX} more" if len(ordered) > NAMED_MAX else ""
    return ", ".join(ordered[:NAMED_MAX]) + more

"""The tensors of a LoRA adapter, as PEFT writes them, against the base model that they change.

The depot asks with shapes (headers only, milliseconds), the runner with the tensors that it is about to pack: both pair
A [r, in] and B [out, r] of each module here, by the same names and sizes.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from weft.domain.model.config import ModelSpec
from weft.domain.model.errors import Reason, Refused
from weft.domain.model.safetensors import Header, TensorInfo, check_dtype
from weft.domain.model.tensors import INNER, PROJECTIONS, check_shape, linear_modules, module_name
from weft.domain.text import quoted

_KEY = re.compile(r"base_model\.model\.(.{1,400})\.lora_([AB])\.weight", re.DOTALL)
_MODULE = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,4})\.(?:self_attn|mlp)\.([a-z_]{1,40})", re.ASCII)


class LoraConfig(Protocol):
    """The part of adapter_config.json about each module (`weft.artifacts.adapter_config` reads it)."""

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names that target_modules lists; none where it is a pattern."""
        ...

    def selects(self, module: str, layer: int, /) -> bool:
        """Whether the adapter changes this module."""
        ...

    def rank_of(self, module: str, /) -> int: ...

    def scale_of(self, module: str, /) -> float:
        """What B (A x) is multiplied by."""
        ...


class Shaped(Protocol):
    """A tensor, or a header's row about one."""

    @property
    def shape(self) -> tuple[int, ...]: ...


T = TypeVar("T", bound=Shaped)


@dataclass(frozen=True, slots=True)
class LoraTensors(Generic[T]):
    """A and B of one module."""

    module: str
    layer: int
    projection: str
    a: T
    b: T

    def check_shapes(self, spec: ModelSpec, rank: int) -> None:
        """A [rank, in], B [out, rank]. Raises Refused(ShapeMismatch)."""
        n_in, n_out = spec.projection(self.projection)
        check_shape(_key(self.module, "A"), tuple(self.a.shape), (rank, n_in))
        check_shape(_key(self.module, "B"), tuple(self.b.shape), (n_out, rank))


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """One adapted module of a verified adapter: y += scale * B (A x), A [rank, in], B [out, rank]."""

    module: str
    layer: int
    projection: str
    rank: int
    scale: float
    a: TensorInfo
    b: TensorInfo


def pair_tensors(
    tensors: Mapping[str, T], spec: ModelSpec, selects: Callable[[str, int], bool] = lambda _module, _layer: True
) -> list[LoraTensors[T]]:
    """Names of the file -> A and B of each module, in the order of the model.

    Raises Refused: UnknownModule, UnsupportedAdapter, ShapeMismatch (no tensors, half a pair).
    """
    found: dict[str, dict[str, T]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if not match:
            raise _unexpected_tensor(key)
        module = INNER + match[1] if match[1].startswith("layers.") else match[1]  # trained on a model without a head
        found.setdefault(module, {})[match[2]] = tensor
    if not found:
        raise Refused(Reason.SHAPE_MISMATCH, "the adapter has no tensors")
    known = {name: (layer, projection) for name, layer, projection in linear_modules(spec) if name in found}
    for name in found:
        if name not in known:
            raise _unknown_module(name, spec)
        if not selects(name, known[name][0]):
            raise Refused(Reason.UNKNOWN_MODULE, f"{name} is in the file and not selected by adapter_config.json")
    for name, halves in found.items():
        if lost := {"A", "B"} - halves.keys():
            raise Refused(Reason.SHAPE_MISMATCH, f"{name}.lora_{lost.pop()} is not in the file, its other half is")
    return [LoraTensors(name, *where, found[name]["A"], found[name]["B"]) for name, where in known.items()]


def check_adapter(config: LoraConfig, header: Header, spec: ModelSpec, *, max_rank: int) -> tuple[AdaptedModule, ...]:
    """Every module that the configuration selects, with the rank it declares, and nothing else; in the model's order.

    Raises Refused: UnknownModule, UnsupportedAdapter, RankTooLarge, ShapeMismatch, DtypeNotSupported.
    """
    pairs = pair_tensors(header.tensors, spec, config.selects)
    for tensor in header.tensors.values():
        check_dtype(tensor)
    selected = [name for name, layer, _ in linear_modules(spec) if config.selects(name, layer)]
    if missing := sorted(set(selected) - {pair.module for pair in pairs}):
        raise Refused(Reason.SHAPE_MISMATCH, f"target_modules asks for {missing[0]}.lora_A, which is not in the file")
    for target in config.target_names:
        if not any(name == target or name.endswith(f".{target}") for name in selected):
            raise Refused(Reason.UNKNOWN_MODULE, f"target_modules holds {target[:100]!r}, which the base does not have")
    return tuple(_adapted(config, spec, max_rank, pair) for pair in pairs)


def _adapted(config: LoraConfig, spec: ModelSpec, max_rank: int, pair: LoraTensors[TensorInfo]) -> AdaptedModule:
    name, rank = pair.module, config.rank_of(pair.module)
    if rank > max_rank:
        raise Refused(Reason.RANK_TOO_LARGE, f"{name} has rank {rank}, at most {max_rank} is served here")
    pair.check_shapes(spec, rank)
    return AdaptedModule(name, pair.layer, pair.projection, rank, config.scale_of(name), pair.a, pair.b)


def _key(module: str, half: str) -> str:
    return f"base_model.model.{module}.lora_{half}.weight"


def _unknown_module(name: str, spec: ModelSpec) -> Refused:
    match = _MODULE.fullmatch(name)
    if match and match[2] in PROJECTIONS and name == module_name(int(match[1]), match[2]):
        return Refused(Reason.UNKNOWN_MODULE, f"{name}: the base has {spec.layers} layers")
    if name.rpartition(".")[2] in ("lm_head", "embed_tokens"):
        text = f"{quoted(name, 200)}: embeddings and output layers cannot be adapted"
        return Refused(Reason.UNSUPPORTED_ADAPTER, text)
    return Refused(Reason.UNKNOWN_MODULE, f"{quoted(name, 200)}: the base has no such linear layer")


def _unexpected_tensor(key: str) -> Refused:
    """Why a tensor that is no lora_A or lora_B cannot be served."""
    if "lora_magnitude_vector" in key:
        return Refused(Reason.UNSUPPORTED_ADAPTER, f"tensor {key[:200]!r}: DoRA cannot be served")
    if "lora_embedding" in key:
        return Refused(Reason.UNSUPPORTED_ADAPTER, f"tensor {key[:200]!r}: embeddings cannot be adapted")
    if "lora_" not in key and key.startswith("base_model.model.") and key.endswith((".weight", ".bias")):
        return Refused(Reason.UNSUPPORTED_ADAPTER, f"tensor {key[:200]!r}: whole modules and biases cannot be adapted")
    return Refused(
        Reason.UNKNOWN_MODULE, f"tensor {key[:200]!r} is no base_model.model.*.lora_A.weight or .lora_B.weight"
    )

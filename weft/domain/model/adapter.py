"""The tensors of a LoRA adapter, as PEFT writes them, against the base model that they change.

The depot asks with shapes (headers only, milliseconds), the runner with the tensors that it is about to pack: both pair
A [r, in] and B [out, r] of each module here, by the same names and sizes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from weft.domain.model.errors import Reason, Refused
from weft.domain.model.safetensors import Header, TensorInfo, check_dtype
from weft.domain.model.spec import ModelSpec
from weft.domain.model.tensors import IMAGE_PARTS, INNER, TEXT_PARTS, check_shape, linear_modules, module_size
from weft.domain.text import quoted

# PEFT's names, and those of a model that was saved as it was trained: unwrapped, compiled, with the adapter's name.
_KEY = re.compile(
    r"(?:(?:base_model\.model|module|_orig_mod)\.){0,4}(.{1,400})\.lora_([AB])(?:\.[^.]{1,100})?\.weight", re.DOTALL
)
_MODULE = re.compile(r"model\.layers\.(?:0|[1-9][0-9]{0,4})\.([a-z_]{1,40}\.[a-z_]{1,40})", re.ASCII)


class LoraConfig(Protocol):
    """The part of adapter_config.json about each module, by its name in training (`weft.artifacts.adapter_config`)."""

    def rank_of(self, module: str, /) -> int | None:
        """The rank that this module's tensors should have; None if that is not known."""
        ...

    def scale_of(self, module: str, rank: int, /) -> float:
        """The factor of B (A x), where A has `rank` rows."""
        ...


class Shaped(Protocol):
    """A tensor, or a header's row about one."""

    @property
    def shape(self) -> tuple[int, ...]: ...


T = TypeVar("T", bound=Shaped)


@dataclass(frozen=True, slots=True)
class LoraTensors(Generic[T]):
    """A and B of one module; `projections`: what it holds, its outputs under each other.

    `trained`: what PEFT saw it as, which has other names before the layer's where the model was within a larger one.
    """

    module: str
    trained: str
    layer: int
    projections: tuple[str, ...]
    a: T
    b: T

    @property
    def rank(self) -> int:
        """The number of rows of A."""
        return max(1, self.a.shape[0] if self.a.shape else 0)

    def check_shapes(self, spec: ModelSpec) -> None:
        """Check that the shapes are A [rank, in], B [out, rank]. Raises Refused(ShapeMismatch)."""
        n_in, n_out = module_size(spec, self.projections)
        check_shape(_key(self.module, "A"), tuple(self.a.shape), (self.rank, n_in))
        check_shape(_key(self.module, "B"), tuple(self.b.shape), (n_out, self.rank))


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """One adapted module of a verified adapter: y += scale * B (A x), A [rank, in], B [out, rank]."""

    module: str
    trained: str
    layer: int
    projections: tuple[str, ...]
    rank: int
    scale: float
    a: TensorInfo
    b: TensorInfo


def pair_tensors(tensors: Mapping[str, T], spec: ModelSpec) -> list[LoraTensors[T]]:
    """Pair the tensors, named as in the file, to A and B of each module, in the order of the model.

    Raises Refused: UnknownModule, UnsupportedAdapter, ShapeMismatch (no tensors, half a pair), HeaderInvalid (one
    tensor under two names).
    """
    found, trained = dict[str, dict[str, T]](), dict[str, str]()
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if not match:
            raise _unexpected_tensor(key)
        module = _own_name(match[1])
        trained[module] = match[1]
        if found.setdefault(module, {}).setdefault(match[2], tensor) is not tensor:
            raise Refused(Reason.HEADER_INVALID, f"tensor {key[:200]!r} is there under another name too")
    if not found:
        raise Refused(Reason.SHAPE_MISMATCH, "the adapter has no tensors")
    known = {name: (layer, held) for name, layer, held in linear_modules(spec) if name in found}
    for name in found:
        if name not in known:
            raise _unknown_module(name, spec)
    for name, halves in found.items():
        if lost := {"A", "B"} - halves.keys():
            raise Refused(Reason.SHAPE_MISMATCH, f"{name}.lora_{lost.pop()} is not in the file, its other half is")
    return [
        LoraTensors(name, trained[name], *where, found[name]["A"], found[name]["B"]) for name, where in known.items()
    ]


def check_adapter(config: LoraConfig, header: Header, spec: ModelSpec, *, max_rank: int) -> tuple[AdaptedModule, ...]:
    """Check each module that the file has tensors for, and the rank by which the configuration scales it.

    Modules are in the model's order. Raises Refused: UnknownModule, UnsupportedAdapter, RankTooLarge, ShapeMismatch,
    DtypeNotSupported, HeaderInvalid.
    """
    pairs = pair_tensors(header.tensors, spec)
    for tensor in header.tensors.values():
        check_dtype(tensor)
        if 0 in tensor.shape:
            why = "is empty: training that shards weights (DeepSpeed ZeRO-3) has to gather them before it saves"
            raise Refused(Reason.SHAPE_MISMATCH, f"tensor {tensor.name!r} {why}")
    return tuple(_adapted(config, spec, max_rank, pair) for pair in pairs)


def _adapted(config: LoraConfig, spec: ModelSpec, max_rank: int, pair: LoraTensors[TensorInfo]) -> AdaptedModule:
    name, rank = pair.module, pair.rank
    noted = config.rank_of(pair.trained) or rank
    if max(rank, noted) > max_rank:
        raise Refused(Reason.RANK_TOO_LARGE, f"{name} has rank {max(rank, noted)}, at most {max_rank} is served here")
    if noted != rank:
        raise Refused(
            Reason.SHAPE_MISMATCH,
            f"tensor {pair.a.name!r} has rank {rank}, adapter_config.json says {noted}, so that its scale is not "
            "known; correct r or rank_pattern",
        )
    pair.check_shapes(spec)
    scale = config.scale_of(pair.trained, rank)
    return AdaptedModule(name, pair.trained, pair.layer, pair.projections, rank, scale, pair.a, pair.b)


def _own_name(module: str) -> str:
    """Name a module as in a text model with a head, also where it was trained without one, or within a larger one."""
    part = next((part for part in (*TEXT_PARTS, "language_model.") if module.startswith(f"{part}layers.")), "")
    return INNER + module.removeprefix(part) if part or module.startswith("layers.") else module


def _key(module: str, half: str) -> str:
    return f"base_model.model.{module}.lora_{half}.weight"


def _unknown_module(name: str, spec: ModelSpec) -> Refused:
    match = _MODULE.fullmatch(name)
    if match and match[1] in spec.family.modules:
        return Refused(Reason.UNKNOWN_MODULE, f"{name}: the base has {spec.layers} layers")
    if name.startswith(IMAGE_PARTS):
        what = "LoRA on what reads images cannot be served; train the language model's layers alone"
        return Refused(Reason.UNSUPPORTED_ADAPTER, f"{quoted(name, 200)}: {what}")
    if name.rpartition(".")[2] in ("lm_head", "embed_tokens"):
        text = f"{quoted(name, 200)}: LoRA on embeddings and output layers cannot be served; {_REMEDY}"
        return Refused(Reason.UNSUPPORTED_ADAPTER, text)
    return Refused(Reason.UNKNOWN_MODULE, f"{quoted(name, 200)}: the base has no such linear layer")


_REMEDY = "train without it, or merge the adapter into the base (PEFT's merge_and_unload) and serve the merged model"
# Parts of the names of tensors that PEFT saves beside lora_A and lora_B, and what they belong to.
_OTHER_TENSORS = {
    "lora_magnitude_vector": "DoRA",
    "lora_embedding": "LoRA on embeddings",
    "lora_B.bias": "a bias inside LoRA (lora_bias)",
    "trainable_tokens": "trained token embeddings (trainable_token_indices)",
    "lora_diag": "KaSA",
    "lora_monteclora": "MonteCLoRA",
    "lora_velora": "VeLoRA",
}


def _unexpected_tensor(key: str) -> Refused:
    """Explain why a tensor that is no lora_A or lora_B cannot be served."""
    what = next((what for part, what in _OTHER_TENSORS.items() if part in key), "")
    if not what and "lora_" not in key:
        whole = {".weight": "a whole trained module (modules_to_save)", ".bias": "a trained bias (bias)"}
        what = whole.get(key[key.rfind(".") :], "")
    if what:
        return Refused(
            Reason.UNSUPPORTED_ADAPTER, f"tensor {key[:200]!r} is of {what}, which cannot be served; {_REMEDY}"
        )
    return Refused(
        Reason.UNKNOWN_MODULE, f"tensor {key[:200]!r} is no base_model.model.*.lora_A.weight or .lora_B.weight"
    )

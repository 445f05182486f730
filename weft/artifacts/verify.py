"""An adapter against its base, and a base model against its own config: headers only, so it takes milliseconds.

What passes can be served as it is: every module the config selects has A [r, in] and B [out, r] of the rank it
declares, nothing else is in the file, and every size fits the base.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from weft.artifacts.adapter_config import AdapterSpec
from weft.artifacts.errors import Reason, Refused
from weft.artifacts.finite import check_dtype, dtype_name
from weft.artifacts.model_config import PROJECTIONS, ModelShape, module_name
from weft.artifacts.safetensors_header import Header, TensorInfo
from weft.printable import quoted

_LORA_KEY = re.compile(r"base_model\.model\.(.{1,400})\.lora_([AB])\.weight", re.DOTALL)
_MODULE = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,4})\.(?:self_attn|mlp)\.([a-z_]{1,40})", re.ASCII)


@dataclass(frozen=True, slots=True)
class LoraPair:
    """One adapted module: y += scale * B (A x), A [rank, in], B [out, rank]."""

    module: str
    layer: int
    projection: str
    rank: int
    scale: float
    a: TensorInfo
    b: TensorInfo


@dataclass(frozen=True, slots=True)
class AdapterVerdict:
    """What an accepted adapter is. `rank` is the largest of any module, `target_modules` the projections it changes."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    size_bytes: int
    dtype: str
    base_model: str


@dataclass(frozen=True, slots=True)
class ModelVerdict:
    """What an accepted base model is."""

    architecture: str
    hidden_size: int
    layers: int
    vocab_size: int
    max_context: int
    size_bytes: int
    dtype: str


def verify_adapter(spec: AdapterSpec, header: Header, shape: ModelShape, *, max_rank: int) -> tuple[LoraPair, ...]:
    """The adapter's modules in the order of the model. `shape` is of the base.

    Raises Refused: UnknownModule, UnsupportedAdapter, RankTooLarge, ShapeMismatch, DtypeNotSupported.
    """
    found = read_modules(header)
    selected = {name: (layer, projection) for name, layer, projection in shape.modules() if spec.selects(name, layer)}
    _check_modules(spec, found, selected, shape)
    return tuple(
        _pair(spec, shape, max_rank, (name, *selected[name]), found[name])
        for name, _, _ in shape.modules()
        if name in selected
    )


def verdict_of(spec: AdapterSpec, pairs: tuple[LoraPair, ...], size_bytes: int) -> AdapterVerdict:
    """The summary of a verified adapter; `size_bytes` is of all its files."""
    changed = {pair.projection for pair in pairs}
    return AdapterVerdict(
        rank=max(pair.rank for pair in pairs),
        alpha=spec.alpha,
        target_modules=tuple(name for name in PROJECTIONS if name in changed),
        size_bytes=size_bytes,
        dtype=dtype_name({tensor.dtype for pair in pairs for tensor in (pair.a, pair.b)}),
        base_model=spec.base_model or "",
    )


def check_base_name(spec: AdapterSpec, accepted: Iterable[str]) -> None:
    """The last path part of what the adapter was trained on is one of `accepted`. Raises Refused(BaseMismatch).

    An adapter whose training did not know its base claims nothing; then shapes alone decide.
    """
    names = {last_part(name) for name in accepted if name}
    if not spec.base_model or not names or last_part(spec.base_model) in names:
        return
    raise Refused(
        Reason.BASE_MISMATCH,
        f"the adapter was trained on {spec.base_model[:200]!r}, the pool serves {' / '.join(sorted(names))}; "
        "if they are the same model, set spec.baseModel to the pool's model name",
    )


def last_part(name: str) -> str:
    """`org/model` and `/some/where/model/` -> `model`."""
    return name.rstrip("/").rpartition("/")[2].rpartition(":")[2]


def read_modules(header: Header) -> dict[str, dict[str, TensorInfo]]:
    """Module name -> its tensors "A" and "B". Raises Refused: UnsupportedAdapter, UnknownModule, DtypeNotSupported."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for key, tensor in header.tensors.items():
        match = _LORA_KEY.fullmatch(key)
        if not match:
            raise _strange_tensor(key)
        check_dtype(tensor)
        found.setdefault(match[1], {})[match[2]] = tensor
    if not found:
        raise Refused(Reason.SHAPE_MISMATCH, "the adapter has no tensors")
    return found


def verify_model(shape: ModelShape, headers: dict[str, Header], size_bytes: int) -> ModelVerdict:
    """A base model's weights (file name -> header) hold exactly what its config asks for.

    Raises Refused: ShapeMismatch, UnknownModule, HeaderInvalid, DtypeNotSupported.
    """
    tensors: dict[str, TensorInfo] = {}
    for name, header in headers.items():
        if twice := tensors.keys() & header.tensors.keys():
            raise Refused(Reason.HEADER_INVALID, f"tensor {min(twice)!r} of {name} is in another file too")
        tensors |= header.tensors
    dtypes = _check_tensors(shape, tensors)
    return ModelVerdict(
        architecture=shape.architecture,
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        vocab_size=shape.vocab_size,
        max_context=shape.max_context,
        size_bytes=size_bytes,
        dtype=dtype_name(dtypes),
    )


def _check_modules(
    spec: AdapterSpec, found: dict[str, dict[str, TensorInfo]], selected: dict[str, tuple[int, str]], shape: ModelShape
) -> None:
    for name in found.keys() - selected.keys():
        raise _unselected(name, shape)
    if missing := sorted(
        f"{name}.lora_{half}" for name in selected for half in "AB" if half not in found.get(name, {})
    ):
        raise Refused(Reason.SHAPE_MISMATCH, f"target_modules asks for {missing[0]}, which is not in the file")
    for target in () if spec.by_pattern else spec.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in selected):
            raise Refused(Reason.UNKNOWN_MODULE, f"target_modules holds {target[:100]!r}, which the base does not have")


def _pair(
    spec: AdapterSpec, shape: ModelShape, max_rank: int, where: tuple[str, int, str], tensors: dict[str, TensorInfo]
) -> LoraPair:
    name, layer, projection = where
    a, b, rank = tensors["A"], tensors["B"], spec.rank_of(name)
    if rank > max_rank:
        raise Refused(Reason.RANK_TOO_LARGE, f"{name} has rank {rank}, at most {max_rank} is served here")
    features_in, features_out = shape.projection(projection)
    _check_shape(a, (rank, features_in))
    _check_shape(b, (features_out, rank))
    return LoraPair(name, layer, projection, rank, spec.scale_of(name), a, b)


def _check_shape(tensor: TensorInfo, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise Refused(
            Reason.SHAPE_MISMATCH, f"tensor {tensor.name!r} is {list(tensor.shape)}, it has to be {list(shape)}"
        )


def _unselected(name: str, shape: ModelShape) -> Refused:
    match = _MODULE.fullmatch(name)
    if match and match[2] in PROJECTIONS and name == module_name(int(match[1]), match[2]):
        if int(match[1]) >= shape.layers:
            return Refused(Reason.UNKNOWN_MODULE, f"{name}: the base has {shape.layers} layers")
        return Refused(Reason.UNKNOWN_MODULE, f"{name} is in the file and not selected by adapter_config.json")
    if name.rpartition(".")[2] in ("lm_head", "embed_tokens"):
        return Refused(
            Reason.UNSUPPORTED_ADAPTER, f"{quoted(name, 200)}: embeddings and output layers cannot be adapted"
        )
    return Refused(Reason.UNKNOWN_MODULE, f"{quoted(name, 200)}: the base has no such linear layer")


def _strange_tensor(key: str) -> Refused:
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


def _check_tensors(shape: ModelShape, tensors: dict[str, TensorInfo]) -> set[str]:
    """Every tensor the config asks for and no other (rotary tables of old files aside); returns the dtypes."""
    expected = dict(shape.tensors())
    for name in sorted(tensors.keys() - expected.keys()):
        if not name.endswith(".rotary_emb.inv_freq") and not (name == "lm_head.weight" and shape.tied_embeddings):
            raise Refused(Reason.UNKNOWN_MODULE, f"tensor {name[:200]!r} is not part of {shape.architecture}")
    for name, wanted in expected.items():
        if name not in tensors:
            raise Refused(Reason.SHAPE_MISMATCH, f"config.json asks for tensor {name!r}, which is in no file")
        check_dtype(tensors[name])
        _check_shape(tensors[name], wanted)
    return {tensors[name].dtype for name in expected}

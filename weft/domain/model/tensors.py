"""The tensors of a base model: names and shapes as Hugging Face writes them, and the check of files against them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from weft.domain.model.config import ModelSpec
from weft.domain.model.errors import Reason, Refused
from weft.domain.model.safetensors import SERVED_DTYPES, Header, TensorInfo, check_dtype

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
BIASED = ATTENTION[:3]
MLP = ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = ATTENTION + MLP
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
INNER = "model."  # what the decoder is called inside a model with a head
PACKED = ("I8", "I16", "I32", "U", "F8_", "F6_", "F4")  # what quantised checkpoints hold beside their scales
MAX_NAMED_TENSORS = 4  # tensors that an error names


def module_name(layer: int, projection: str) -> str:
    """Name a projection as PEFT sees it inside the model: `model.layers.3.self_attn.q_proj`."""
    block = "self_attn" if projection in ATTENTION else "mlp"
    return f"model.layers.{layer}.{block}.{projection}"


def linear_modules(spec: ModelSpec) -> Iterator[tuple[str, int, str]]:
    """Yield (module name, layer, projection) of every linear layer that LoRA may change."""
    for layer in range(spec.layers):
        for projection in PROJECTIONS:
            yield module_name(layer, projection), layer, projection


def layer_tensors(spec: ModelSpec, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of every tensor of one layer."""
    prefix = f"model.layers.{layer}"
    for projection in PROJECTIONS:
        module, (n_in, n_out) = module_name(layer, projection), spec.projection(projection)
        yield f"{module}.weight", (n_out, n_in)
        if spec.qkv_bias and projection in BIASED:
            yield f"{module}.bias", (n_out,)
    if spec.qk_norm:
        yield from ((f"{prefix}.self_attn.{half}_norm.weight", (spec.head_dim,)) for half in "qk")
    yield f"{prefix}.input_layernorm.weight", (spec.hidden_size,)
    yield f"{prefix}.post_attention_layernorm.weight", (spec.hidden_size,)


def model_tensors(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of every tensor that the model's weights have."""
    yield EMBEDDING, (spec.vocab_size, spec.hidden_size)
    for layer in range(spec.layers):
        yield from layer_tensors(spec, layer)
    yield NORM, (spec.hidden_size,)
    if not spec.tied_embeddings:
        yield HEAD, (spec.vocab_size, spec.hidden_size)


def whole_names(headers: Mapping[str, Header]) -> dict[str, Header]:
    """Rename tensors of files without a head (`layers.0.`) to the names that a model with a head has."""
    bare = EMBEDDING.removeprefix(INNER)
    if not any(bare in header.tensors for header in headers.values()):
        return dict(headers)
    return {
        file: replace(header, tensors={INNER + name: tensor for name, tensor in header.tensors.items()})
        for file, header in headers.items()
    }


def check_model_tensors(spec: ModelSpec, headers: Mapping[str, Header]) -> dict[str, TensorInfo]:
    """Check that the weights (file name -> header) are exactly the tensors of the model; returns those by name.

    Ignored: rotary tables of old files, and a head beside the embedding that it is tied to. Raises Refused:
    ShapeMismatch, UnknownModule, HeaderInvalid, DtypeNotSupported.
    """
    found: dict[str, TensorInfo] = {}
    for file, header in whole_names(headers).items():
        if twice := found.keys() & header.tensors.keys():
            raise Refused(Reason.HEADER_INVALID, f"{file}: {some_of(twice)} is in another file too")
        found |= header.tensors
    expected = dict(model_tensors(spec))
    if quantised := [f"{tensor.name} ({tensor.dtype})" for tensor in found.values() if tensor.dtype.startswith(PACKED)]:
        served = ", ".join(SERVED_DTYPES)
        raise Refused(Reason.DTYPE_NOT_SUPPORTED, f"quantised weights: {some_of(quantised)}; served are: {served}")
    ignored = {name for name in found if name.endswith(".rotary_emb.inv_freq") or name == HEAD}
    if unknown := found.keys() - expected.keys() - (ignored if spec.tied_embeddings else ignored - {HEAD}):
        text = f"{some_of(unknown)} is no part of a {spec.architecture} of this config.json"
        raise Refused(Reason.UNKNOWN_MODULE, text)
    if missing := expected.keys() - found.keys():
        raise Refused(Reason.SHAPE_MISMATCH, f"config.json asks for {some_of(missing)}, which is in no file")
    for name, shape in expected.items():
        check_dtype(found[name])
        check_shape(name, found[name].shape, shape)
    return {name: found[name] for name in expected}


def check_shape(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Compare a tensor's shape with the wanted one. Raises Refused(ShapeMismatch), which names the tensor."""
    if shape != wanted:
        raise Refused(Reason.SHAPE_MISMATCH, f"tensor {name!r} is {list(shape)}, it has to be {list(wanted)}")


def some_of(names: Iterable[str]) -> str:
    """List the first few names: `a, b, c, d and 12 more`."""
    ordered = [name[:200] for name in sorted(names)]
    more = f" and {len(ordered) - MAX_NAMED_TENSORS} more" if len(ordered) > MAX_NAMED_TENSORS else ""
    return ", ".join(ordered[:MAX_NAMED_TENSORS]) + more

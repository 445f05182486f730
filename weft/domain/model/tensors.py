"""The tensors of a base model: names and shapes as Hugging Face writes them, and the check of files against them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from weft.domain.model.errors import Reason, Refused
from weft.domain.model.families import Family, HeadNorms
from weft.domain.model.safetensors import SERVED_DTYPES, Header, TensorInfo, check_dtype
from weft.domain.model.spec import ModelSpec

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
INNER = "model."  # what the decoder is called inside a model with a head
# What the decoder is called inside a model that reads images: by transformers since 4.52, and before.
TEXT_PARTS = ("model.language_model.", "language_model.model.")
IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
PACKED = ("I8", "I16", "I32", "U", "F8_", "F6_", "F4")  # what quantised checkpoints hold beside their scales
MAX_NAMED_TENSORS = 4  # tensors that an error names


def module_of(family: Family, projection: str) -> tuple[str, tuple[str, ...]]:
    """Find the module within a layer that holds a projection, and all that it holds."""
    return next((name, held) for name, held in family.modules.items() if projection in held)


def module_name(family: Family, layer: int, projection: str) -> str:
    """Name a projection's module as PEFT sees it inside the model: `model.layers.3.self_attn.q_proj`."""
    return f"model.layers.{layer}.{module_of(family, projection)[0]}"


def module_size(spec: ModelSpec, held: Iterable[str]) -> tuple[int, int]:
    """(in, out) features of a module that holds these projections under each other."""
    sizes = [spec.projection(name) for name in held]
    return sizes[0][0], sum(n_out for _, n_out in sizes)


def linear_modules(spec: ModelSpec) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Yield (module name, layer, projections that it holds) of every linear layer that LoRA may change."""
    for layer in range(spec.layers):
        for name, held in spec.family.modules.items():
            yield f"model.layers.{layer}.{name}", layer, held


def layer_tensors(spec: ModelSpec, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of every tensor of one layer."""
    prefix, family = f"model.layers.{layer}", spec.family
    for module, held in family.modules.items():
        n_in, n_out = module_size(spec, held)
        yield f"{prefix}.{module}.weight", (n_out, n_in)
        if held[0] in spec.biases:
            yield f"{prefix}.{module}.bias", (n_out,)
    for name, size in head_norms(spec):
        yield f"{prefix}.self_attn.{name}.weight", (size,)
    for name in filter(None, family.norms.value):
        yield from norm_tensors(family, f"{prefix}.{name}", spec.hidden_size)


def head_norms(spec: ModelSpec) -> tuple[tuple[str, int], ...]:
    """Names of the norms of q and k and their sizes."""
    match spec.family.head_norms:
        case HeadNorms.NONE:
            return ()
        case HeadNorms.EACH:
            return ("q_norm", spec.head_dim), ("k_norm", spec.head_dim)
        case HeadNorms.ALL:
            return ("q_norm", spec.q_size), ("k_norm", spec.kv_size)


def norm_tensors(family: Family, name: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of a norm's tensors."""
    yield f"{name}.weight", (size,)
    if family.layer_norm:
        yield f"{name}.bias", (size,)


def model_tensors(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of every tensor that the model's weights have."""
    yield EMBEDDING, (spec.vocab_size, spec.hidden_size)
    for layer in range(spec.layers):
        yield from layer_tensors(spec, layer)
    yield from norm_tensors(spec.family, NORM.removesuffix(".weight"), spec.hidden_size)
    if not spec.tied_embeddings:
        yield HEAD, (spec.vocab_size, spec.hidden_size)


def whole_names(headers: Mapping[str, Header], spec: ModelSpec) -> dict[str, Header]:
    """Rename tensors to the names that a text model with a head has, and leave out those of a part that reads images.

    Files without a head have `layers.0.`, those of models that read images `language_model.` before or in the name.
    """
    multimodal = spec.architecture == spec.family.multimodal
    bare = any(EMBEDDING.removeprefix(INNER) in header.tensors for header in headers.values())

    def renamed(name: str) -> str:
        if multimodal:
            part = next((part for part in TEXT_PARTS if name.startswith(part)), "")
            return INNER + name.removeprefix(part) if part else name.removeprefix("language_model.")
        return INNER + name if bare else name

    def kept(name: str) -> bool:
        return not (multimodal and name.startswith(IMAGE_PARTS))

    return {
        file: replace(header, tensors={renamed(name): one for name, one in header.tensors.items() if kept(name)})
        for file, header in headers.items()
    }


def check_model_tensors(spec: ModelSpec, headers: Mapping[str, Header]) -> dict[str, TensorInfo]:
    """Check that the weights (file name -> header) are exactly the tensors of the model; returns those by name.

    Ignored: rotary tables of old files, a head beside the embedding that it is tied to, and what reads images. Raises
    Refused: ShapeMismatch, UnknownModule, HeaderInvalid, DtypeNotSupported.
    """
    found: dict[str, TensorInfo] = {}
    for file, header in whole_names(headers, spec).items():
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

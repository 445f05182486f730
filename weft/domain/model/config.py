"""`config.json` of a base model -> ModelSpec: what an executor computes, of the families in `families.FAMILIES`.

Each of them may lack its head (`Qwen3Model`): it embeds, and generates nothing.

The depot, which accepts models and adapters, and the runner, which computes them, both read a configuration here.
transformers 5 writes `rope_parameters`; earlier versions wrote `rope_theta` and `rope_scaling`; both are read. Absent
fields mean what they mean in transformers' configuration class of the family. Sizes are bounded so that arithmetic on
them means something. An option that would be computed otherwise than in transformers is refused by name: serving
something else is worse than not serving.
"""

from typing import cast

from weft.domain.model.config_fields import flag, integer, invalid, positive, real, size, unsupported
from weft.domain.model.errors import Reason, Refused
from weft.domain.model.families import ATTENTION, BARE, FAMILIES, FULL, MLP, SLIDING, Family, Windows, needed_by
from weft.domain.model.rope_config import parse_ropes
from weft.domain.model.safetensors import SERVED_DTYPES
from weft.domain.model.spec import LayerSpec, ModelSpec, is_bare
from weft.domain.strict_json import JsonError, JsonObject, is_int, parse_object
from weft.domain.text import quoted

MAX_CONFIG_BYTES = 1 << 20
MAX_EOS = 64  # of one model
MAX_SCALE = 1 << 20  # of embeddings, scores and the like: numbers stay far from the ends of fp32
OLD_NAMES = ("attention",)  # of full attention in Granite 4
RECURRENT_NAMES = ("linear_attention", "mamba")
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
DEFAULTS: JsonObject = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}  # of every family whose row has no others
# Fields by which transformers changes any model, and what they would need.
OTHERWISE = {
    "quantization_config": "only float32, float16 and bfloat16 weights are served",
    "per_layer_config": "layers of different sizes are not served",
    "attention_chunk_size": "attention in chunks is not served",
    "kv_sharing_modes": "layers that share keys and values are not served",
}


def parse_model_config(raw: bytes, raw_generation: bytes | None = None) -> ModelSpec:
    """Read config.json and generation_config.json as files. Raises Refused: ConfigInvalid, UnsupportedModel."""
    config = _object("config.json", raw)
    return parse_spec(config, None if raw_generation is None else _object("generation_config.json", raw_generation))


def parse_spec(config: JsonObject, generation: JsonObject | None = None) -> ModelSpec:
    """Read a ModelSpec from the parsed objects of both files. Raises Refused: ConfigInvalid, UnsupportedModel."""
    family, architecture = _family(config)
    if config.get("auto_map") is not None and config.get("model_type") is None:
        raise unsupported("auto_map is set and model_type is not; code that comes with a model is never run")
    whole, config = config, {**DEFAULTS, **family.defaults, **_text_part(config, family, architecture)}
    _check_options(whole)
    _check_options(config)
    _check_family_options(config, family)
    named = {name: family.fields.get(name, name) for name in ("hidden_act", "rms_norm_eps", "intermediate_size")}
    hidden, heads = size(config, "hidden_size", 1 << 17), size(config, "num_attention_heads", 1 << 12)
    kv_heads = _size_or(config, family, "num_key_value_heads", heads)
    head_dim = _size_or(config, family, "head_dim", hidden // heads)
    divided = config.get("head_dim") is None or family.divides
    if heads % kv_heads or head_dim % 2 or (divided and hidden % heads):
        raise invalid(f"{heads} heads, {kv_heads} key-value heads of {head_dim} do not share {hidden} features evenly")
    layers = size(config, "num_hidden_layers", 1 << 10)
    vocab_size = size(config, "vocab_size", 1 << 22)
    max_positions = size(config, "max_position_embeddings", 1 << 24)
    windows = _windows(config, family, layers)
    ropes = parse_ropes(config, family, head_dim, max_positions)
    still = _nope_layers(config, family, layers)
    sliding = len(ropes) - 1  # the rotation of layers with windows is the last one
    dtypes = (of.get(name) for name in ("dtype", "torch_dtype") for of in (whole, config))  # transformers 5, earlier
    dtype = next(filter(None, dtypes), None)
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=size(config, named["intermediate_size"], 1 << 19),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=real(config, named["rms_norm_eps"]),
        max_positions=max_positions,
        tied_embeddings=flag(config, "tie_word_embeddings") or is_bare(architecture),
        ropes=ropes,
        by_layer=tuple(
            LayerSpec(window, None if layer in still else sliding if window else 0)
            for layer, window in enumerate(windows)
        ),
        biases=_biases(config, family),
        activation=_activation(config, named["hidden_act"]),
        **_factors(config, family, reads_images=architecture == family.multimodal),
        eos=_eos(whole, generation or {}, vocab_size),
        dtype=dtype if isinstance(dtype, str) and dtype in SERVED_DTYPES.values() else "",
    )


def _size_or(config: JsonObject, family: Family, name: str, follows: int) -> int:
    """Read a size that follows from others where it is left out, and in some families where it is null."""
    if name not in config or (config[name] is None and name in family.nulls):
        return follows
    return size(config, name, 1 << 12)


def _object(name: str, raw: bytes) -> JsonObject:
    try:
        return parse_object(raw, max_bytes=MAX_CONFIG_BYTES)
    except JsonError as error:
        raise Refused(Reason.CONFIG_INVALID, f"{name}: {error}") from error


def _family(config: JsonObject) -> tuple[Family, str]:
    """The family and the architecture, by `architectures`, or by `model_type` if a configuration names none.

    transformers goes by `model_type`, others by `architectures`: where there are both, they have to be of one family.
    """
    names, model_type = config.get("architectures"), config.get("model_type")
    for family in FAMILIES:
        for architecture in family.architectures:
            if names == [architecture]:
                own = family.multimodal_type if architecture == family.multimodal else family.model_type
                if model_type not in (None, own):
                    raise unsupported(
                        f"architectures is {quoted(names)} and model_type {quoted(model_type)}, not {own}"
                    )
                return family, architecture
        if names is None and model_type == family.model_type:
            return family, family.architecture
    named, value = ("model_type", model_type) if names is None and model_type else ("architectures", names)
    needed = needed_by(str(value))
    served = ", ".join(family.architecture for family in FAMILIES)
    raise unsupported(
        f"{named} is {quoted(value)}{needed and f', which needs {needed}'}; served are: {served}, and each as {BARE}, "
        "without its head"
    )


def _text_part(config: JsonObject, family: Family, architecture: str) -> JsonObject:
    """Return what describes the text part: all of it, or `text_config` of a model that reads images, too."""
    if architecture != family.multimodal:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise invalid(f"text_config is {quoted(text)}, not an object")
    if family.text_is_named and (found := text.get("model_type")) != family.model_type:
        what = f"text_config has the model_type {quoted(found)}"
        raise unsupported(f"{what}; served in {architecture} is {family.model_type}")
    tied = flag(config, "tie_word_embeddings", absent=True)  # of the whole, whatever its text part would have alone
    if flag(cast("JsonObject", text), "tie_word_embeddings", absent=tied) != tied:
        raise unsupported("tie_word_embeddings is one thing beside text_config and another in it")
    return cast("JsonObject", text) | {"tie_word_embeddings": tied}


def _check_options(config: JsonObject) -> None:
    for name, needed in OTHERWISE.items():
        if config.get(name) is not None:
            raise unsupported(f"{name} is set; {needed}")
    if config.get("is_causal", True) is not True or (
        config.get("use_bidirectional_attention") is not None and flag(config, "use_bidirectional_attention")
    ):
        raise unsupported("every token attends to all of the text; only causal models are served")


def _check_family_options(config: JsonObject, family: Family) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if name not in family.bias_flags and flag(config, name):
            raise unsupported(f"{name} is true; {family.architecture} has no such biases")
    for name, (value, needed) in family.only.items():
        if (found := config.get(name)) != value or not is_int(found):
            raise unsupported(f"{name} is {quoted(found)}, and {needed} are not served; served is {value}")
    for name, types in family.unused.items():
        if name in config and type(config[name]) not in types:
            raise invalid(f"{name} is {quoted(config[name])}, not of the type {types[0].__name__}")


def _activation(config: JsonObject, name: str) -> str:
    value = config.get(name)
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise unsupported(f"{name} is {quoted(value)}; served are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


def _biases(config: JsonObject, family: Family) -> tuple[str, ...]:
    given = {name for field, names in family.bias_flags.items() if flag(config, field) for name in names}
    return tuple(name for name in (*ATTENTION, *MLP) if name in given or name in family.biases)


def _factors(config: JsonObject, family: Family, *, reads_images: bool) -> dict[str, float]:
    """Read the factors and caps that a family has, by the names that ModelSpec has for them.

    A model that reads images has its text part's factors, and in transformers not its caps.
    """
    found = dict[str, float]()
    for name, (field, power) in family.factors.items():
        found[name] = (
            _bounded(field, positive(config, field) if power == 1 else size(config, field, MAX_SCALE)) ** power
        )
    for name, field in () if reads_images else family.caps.items():
        found[name] = 0.0 if config.get(field) is None else _bounded(field, real(config, field))
    return found


def _bounded(field: str, value: float) -> float:
    if not 1 / MAX_SCALE <= value <= MAX_SCALE:
        raise invalid(f"{field} is {value:g}, not a number from 1 / {MAX_SCALE} to {MAX_SCALE}")
    return value


def _nope_layers(config: JsonObject, family: Family, layers: int) -> frozenset[int]:
    """Read which layers rotate nothing: all, where `no_rope_layers` has a 0, or each last of an interval."""
    field, value = family.rotates_where
    if field:
        if not isinstance(config.get(field), str | None):
            raise invalid(f"{field} is {quoted(config[field])}, not {value} or another name")
        return frozenset() if config.get(field) == value else frozenset(range(layers))
    if not family.nope_interval:
        return frozenset()
    if flag(config, "use_sliding_window") and config.get("sliding_window") is not None:
        raise unsupported(f"use_sliding_window is true; {family.architecture} is served without windows")
    rotates = config.get("no_rope_layers")
    interval = integer({"no_rope_layer_interval": family.nope_interval} | config, "no_rope_layer_interval", 1, 1 << 10)
    if rotates is None:
        return frozenset(range(interval - 1, layers, interval))
    flags = cast("list[object]", rotates) if isinstance(rotates, list) else []
    if len(flags) != layers or not all(is_int(one) and one in (0, 1) for one in flags):
        raise invalid(f"no_rope_layers is no list of {layers} times 0 or 1")
    return frozenset(layer for layer, one in enumerate(flags) if not one)


def _windows(config: JsonObject, family: Family, layers: int) -> tuple[int, ...]:
    """The number of tokens that each layer attends to, the token itself included; 0: all of them."""
    by_layer, interval = family.windows is Windows.BY_LAYER, family.windows is Windows.INTERVAL
    window = 0 if config.get("sliding_window") is None else size(config, "sliding_window", 1 << 30)
    kinds, first = _layer_kinds(config, family, layers), 0
    if family.windows is Windows.NONE:
        if window and kinds is None and not family.nope_interval:  # transformers forgets keys, and its mask does not
            raise unsupported(f"sliding_window is set; {family.architecture} has no layers with windows")
        window = 0
    if by_layer:
        window = window if flag(config, "use_sliding_window") else 0
        first = integer(config, "max_window_layers", 0, 1 << 30)
    if kinds is None:
        return tuple(window if layer >= first else 0 for layer in range(layers))
    old_names = () if family.sliding_theta else OLD_NAMES  # by which transformers finds no object of a layer's rope
    for kind in kinds:
        if kind not in (FULL, SLIDING, *old_names):
            what = "recurrent layers are not served" if kind in RECURRENT_NAMES else f"served are: {FULL}, {SLIDING}"
            raise unsupported(f"layer_types holds {quoted(kind)}; {what}")
        if kind == SLIDING and not window:
            raise unsupported(f"layer_types holds {SLIDING}, and no sliding_window is in use")
        if kind != SLIDING and window and not (by_layer or interval):
            raise unsupported(f"layer_types holds {FULL}, and every layer of {family.architecture} has the window")
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def _layer_kinds(config: JsonObject, family: Family, layers: int) -> list[object] | None:
    """Read `layer_types`, or what a family with an interval means by leaving it out; None: it says nothing."""
    kinds = config.get("layer_types")
    if kinds is None and family.windows is Windows.INTERVAL:
        every, field = family.full_interval
        every = integer({field: every} | config, field, 1, 1 << 10) if field else every
        return [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]
    if family.recurrent and (kinds is None or config.get("layers_block_type", kinds) != kinds):
        raise unsupported("layer_types does not say that every layer attends; recurrent layers are not served")
    if kinds is not None and (not isinstance(kinds, list) or len(cast("list[object]", kinds)) != layers):
        raise invalid(f"layer_types is no list of {layers} names")
    return cast("list[object] | None", kinds)


def _eos(config: JsonObject, generation: JsonObject, vocab_size: int) -> frozenset[int]:
    """Read the ends of sequence, an id or a list of each file, as vLLM's server; -1 and the like, which no token has,
    stand for none."""
    found: set[int] = set()
    text_config = config.get("text_config")
    for fields in (generation, config, cast("JsonObject", text_config) if isinstance(text_config, dict) else {}):
        value = fields.get("eos_token_id")
        ids = cast("list[object]", value) if isinstance(value, list) else [] if value is None else [value]
        if not all(is_int(token) for token in ids):
            raise invalid(f"eos_token_id is {quoted(value)}, not an integer or a list of integers")
        found.update(token for token in cast("list[int]", ids) if 0 <= token < vocab_size)
    if len(found) > MAX_EOS:
        raise invalid(f"eos_token_id names {len(found)} tokens, the limit is {MAX_EOS}")
    return frozenset(found)

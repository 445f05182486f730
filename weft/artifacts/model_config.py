"""`config.json` of a base model -> its shape: everything an adapter has to fit. Llama, Mistral, Qwen2 and Qwen3.

Sizes are bounded so that arithmetic on them means something; options the runners do not have are refused by name, with
the rules of `weft_runner.model.spec`: what passes here, the runners compute.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from weft.artifacts.errors import Reason, Refused
from weft.artifacts.strict_json import JsonError, JsonObject, is_int, parse_object
from weft.printable import quoted

MAX_CONFIG_BYTES = 1 << 20
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
BIASED = ATTENTION[:3]
MLP = ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = ATTENTION + MLP
ROPE_TYPES = ("default", "linear", "llama3")

FULL, SLIDING = "full_attention", "sliding_attention"

_ROPE_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class Family:
    """What tells architectures apart. `kv_heads`, `head_dim`: where config.json leaves them out (None: from `heads`).

    `windows`: its layers may attend to a window; `by_layer`: some of them may, and `use_sliding_window` decides.
    """

    architecture: str
    model_type: str
    windows: bool = False
    by_layer: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None


FAMILIES = (
    Family("LlamaForCausalLM", "llama"),
    Family("MistralForCausalLM", "mistral", windows=True, kv_heads=8),
    Family("Qwen2ForCausalLM", "qwen2", windows=True, by_layer=True, qkv_bias=True, kv_heads=32),
    Family("Qwen3ForCausalLM", "qwen3", windows=True, by_layer=True, qk_norm=True, kv_heads=32, head_dim=128),
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only model. H hidden, I intermediate, heads x head_dim attention, V vocabulary.

    `qkv_bias`: q, k and v have a bias; `qk_norm`: each head of q and k has a norm.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False

    def projection(self, name: str) -> tuple[int, int]:
        """(in, out) features of a projection's linear layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
        sizes |= {"o_proj": (queries, hidden), "down_proj": (inner, hidden)}
        return sizes.get(name, (hidden, inner))

    def modules(self) -> Iterator[tuple[str, int, str]]:
        """(module name, layer, projection) of every linear layer that LoRA may change."""
        for layer in range(self.layers):
            for projection in PROJECTIONS:
                yield module_name(layer, projection), layer, projection

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every tensor the model's weights have."""
        hidden = self.hidden_size
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for module, _, projection in self.modules():
            features_in, features_out = self.projection(projection)
            yield f"{module}.weight", (features_out, features_in)
            if self.qkv_bias and projection in BIASED:
                yield f"{module}.bias", (features_out,)
        for layer in range(self.layers):
            if self.qk_norm:
                yield f"model.layers.{layer}.self_attn.q_norm.weight", (self.head_dim,)
                yield f"model.layers.{layer}.self_attn.k_norm.weight", (self.head_dim,)
            yield f"model.layers.{layer}.input_layernorm.weight", (hidden,)
            yield f"model.layers.{layer}.post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)
        if not self.tied_embeddings:
            yield "lm_head.weight", (self.vocab_size, hidden)


def module_name(layer: int, projection: str) -> str:
    """`model.layers.3.self_attn.q_proj`: as PEFT sees it inside the model."""
    block = "self_attn" if projection in ATTENTION else "mlp"
    return f"model.layers.{layer}.{block}.{projection}"


def parse_model_config(raw: bytes) -> ModelShape:
    """Raises Refused: ConfigInvalid, UnsupportedModel."""
    try:
        config = parse_object(raw, max_bytes=MAX_CONFIG_BYTES)
    except JsonError as error:
        raise Refused(Reason.CONFIG_INVALID, f"config.json: {error}") from error
    family = _family(config)
    _check_options(config)
    hidden, heads = _size(config, "hidden_size", 1 << 17), _size(config, "num_attention_heads", 1 << 12)
    kv_heads = _size(config, "num_key_value_heads", 1 << 12, null=heads, absent=family.kv_heads)
    head_dim = _size(config, "head_dim", 1 << 12, null=hidden // heads, absent=family.head_dim)
    divided = config.get("head_dim") is None and family.head_dim is None
    if heads % kv_heads or head_dim % 2 or (divided and hidden % heads):
        raise _invalid(f"{heads} heads, {kv_heads} key-value heads of {head_dim} do not share {hidden} features evenly")
    layers = _size(config, "num_hidden_layers", 1 << 10)
    _check_windows(config, family, layers)
    return ModelShape(
        architecture=family.architecture,
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size", 1 << 19),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_size(config, "vocab_size", 1 << 22),
        max_context=_size(config, "max_position_embeddings", 1 << 24),
        tied_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )


def _family(config: JsonObject) -> Family:
    names = config.get("architectures")
    for family in FAMILIES:
        if names == [family.architecture] or (names is None and config.get("model_type") == family.model_type):
            return family
    served = ", ".join(family.architecture for family in FAMILIES)
    raise _unsupported(f"architectures is {quoted(names)}; served are: {served}")


def _check_options(config: JsonObject) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if _flag(config, name):
            raise _unsupported(f"{name} is true; only models without biases are served")
    if config.get("quantization_config") is not None:
        raise _unsupported("quantization_config is set; only float32, float16 and bfloat16 weights are served")
    if config.get("hidden_act", "silu") != "silu":
        raise _unsupported(f"hidden_act is {quoted(config['hidden_act'])}; only silu is served")
    if config.get("auto_map") is not None:
        raise _unsupported("auto_map is set; code that comes with a model is never run")
    _check_rope(config)


def _check_windows(config: JsonObject, family: Family, layers: int) -> None:
    """`sliding_window` counts where the family has windows, `use_sliding_window` and `layer_types` with some."""
    used = family.windows and (not family.by_layer or _flag(config, "use_sliding_window"))
    if used and config.get("sliding_window") is not None:
        _size(config, "sliding_window", 1 << 30)
    window = used and config.get("sliding_window", 4096) is not None
    if family.by_layer:
        _integer(config, "max_window_layers", 0, 1 << 30, null=28)
    kinds = config.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(cast("list[object]", kinds)) != layers:
        raise _invalid(f"layer_types is no list of {layers} names")
    for kind in cast("list[object]", kinds):
        if kind not in (FULL, SLIDING):
            raise _unsupported(f"layer_types holds {quoted(kind)}; served are: {FULL}, {SLIDING}")
        if kind != (SLIDING if window else FULL) and not (family.by_layer and window):
            raise _unsupported(f"layer_types holds {kind}, which is not what the other fields say of its layers")


def _check_rope(config: JsonObject) -> None:
    """transformers 5 writes `rope_parameters`, older ones `rope_theta` and `rope_scaling`."""
    if config.get("partial_rotary_factor") not in (None, 1):
        raise _unsupported("partial_rotary_factor is set; only whole heads are rotated")
    for field in ("rope_parameters", "rope_scaling"):
        rope = config.get(field)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise _invalid(f"{field} is no object")
        if any(isinstance(value, dict) for value in cast("JsonObject", rope).values()):
            raise _unsupported(f"{field} differs from layer to layer; only one for all layers is served")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise _unsupported(f"{field} has the type {quoted(kind)}; served are: {', '.join(ROPE_TYPES)}")
        if rope.get("partial_rotary_factor") not in (None, 1):
            raise _unsupported(f"{field} has a partial_rotary_factor; only whole heads are rotated")
        if kind != "default" and rope.get("factor") is None:
            raise _invalid(f"{field} is of the type {kind} and has no factor")
        _check_positive(rope, _ROPE_NUMBERS)
        if kind == "llama3" and (rope.get("low_freq_factor") or 1.0) >= (rope.get("high_freq_factor") or 4.0):
            raise _invalid(f"{field}: low_freq_factor is not below high_freq_factor")
    _check_positive(config, ("rms_norm_eps", "rope_theta", "original_max_position_embeddings"))


def _check_positive(fields: JsonObject, names: tuple[str, ...]) -> None:
    for name in names:
        value = fields.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < math.inf):
            raise _invalid(f"{name} is {quoted(value)}, not a number above 0")


def _size(config: JsonObject, name: str, most: int, null: int | None = None, *, absent: int | None = None) -> int:
    """`null`: what an explicit null stands for; `absent`: what a missing field does, where that is something else."""
    if name not in config and absent is not None:
        return absent
    return _integer(config, name, 1, most, null=null)


def _integer(config: JsonObject, name: str, least: int, most: int, *, null: int | None) -> int:
    value = config.get(name)
    value = null if value is None else value
    if not isinstance(value, int) or not is_int(value) or not least <= value <= most:
        raise _invalid(f"{name} is {quoted(value)}, not an integer from {least} to {most}")
    return value


def _flag(config: JsonObject, name: str) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise _invalid(f"{name} is {quoted(value)}, not true or false")
    return value


def _invalid(what: str) -> Refused:
    return Refused(Reason.CONFIG_INVALID, f"config.json: {what}")


def _unsupported(what: str) -> Refused:
    return Refused(Reason.UNSUPPORTED_MODEL, f"config.json: {what}")

"""`config.json` of a base model -> its shape: everything an adapter has to fit. Llama family.

Sizes are bounded so that arithmetic on them means something; options the runners do not have are refused by name.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from weft.artifacts.errors import Reason, Refused
from weft.artifacts.strict_json import JsonError, JsonObject, is_int, parse_object
from weft.printable import quoted

MAX_CONFIG_BYTES = 1 << 20
ARCHITECTURES = ("LlamaForCausalLM",)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = ATTENTION + MLP
ROPE_TYPES = ("default", "linear", "llama3")

_ROPE_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only model. H hidden, I intermediate, heads x head_dim attention, V vocabulary."""

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
        for layer in range(self.layers):
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
    architecture = _architecture(config)
    _check_options(config)
    hidden, heads = _size(config, "hidden_size", 1 << 17), _size(config, "num_attention_heads", 1 << 12)
    kv_heads = _size(config, "num_key_value_heads", 1 << 12, default=heads)
    head_dim = _size(config, "head_dim", 1 << 12, default=hidden // heads)
    if heads % kv_heads or head_dim % 2 or ("head_dim" not in config and hidden % heads):
        raise _invalid(f"{heads} heads, {kv_heads} key-value heads of {head_dim} do not share {hidden} features evenly")
    return ModelShape(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size", 1 << 19),
        layers=_size(config, "num_hidden_layers", 1 << 10),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_size(config, "vocab_size", 1 << 22),
        max_context=_size(config, "max_position_embeddings", 1 << 24),
        tied_embeddings=_flag(config, "tie_word_embeddings"),
    )


def _architecture(config: JsonObject) -> str:
    names = config.get("architectures")
    if names == [ARCHITECTURES[0]] or (names is None and config.get("model_type") == "llama"):
        return ARCHITECTURES[0]
    raise _unsupported(f"architectures is {quoted(names)}; served are: {', '.join(ARCHITECTURES)}")


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


def _check_rope(config: JsonObject) -> None:
    """transformers 5 writes `rope_parameters`, older ones `rope_theta` and `rope_scaling`."""
    for field in ("rope_parameters", "rope_scaling"):
        rope = config.get(field)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise _invalid(f"{field} is no object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise _unsupported(f"{field} has the type {quoted(kind)}; served are: {', '.join(ROPE_TYPES)}")
        if rope.get("partial_rotary_factor") not in (None, 1):
            raise _unsupported(f"{field} has a partial_rotary_factor; only whole heads are rotated")
        _check_positive(rope, _ROPE_NUMBERS)
    _check_positive(config, ("rms_norm_eps", "rope_theta"))


def _check_positive(fields: JsonObject, names: tuple[str, ...]) -> None:
    for name in names:
        value = fields.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < math.inf):
            raise _invalid(f"{name} is {quoted(value)}, not a number above 0")


def _size(config: JsonObject, name: str, most: int, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        value = default
    if not isinstance(value, int) or not is_int(value) or not 1 <= value <= most:
        raise _invalid(f"{name} is {quoted(value)}, not an integer from 1 to {most}")
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

"""`config.json` of a base model -> ModelSpec: what an executor computes, of the families in `FAMILIES`.

Each of them may lack its head (`Qwen3Model`): it embeds, and generates nothing.

The depot, which accepts models and adapters, and the runner, which computes them, both read a configuration here.
transformers 5 writes `rope_parameters`; earlier versions wrote `rope_theta` and `rope_scaling`; both are read. Absent
fields mean what they mean in transformers' configuration class of the family. Sizes are bounded so that arithmetic on
them means something. An option that would be computed otherwise than in transformers is refused by name: serving
something else is worse than not serving.
"""

import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from weft.domain.model.errors import Reason, Refused
from weft.domain.model.safetensors import SERVED_DTYPES
from weft.domain.strict_json import JsonError, JsonObject, is_int, parse_object
from weft.domain.text import quoted

MAX_CONFIG_BYTES = 1 << 20
MAX_EOS = 64  # of one model
MAX_SCALE = 1 << 20  # of embeddings, scores and the like: numbers stay far from the ends of fp32
ROPE_TYPES = ("default", "linear", "llama3")
BARE = "Model"  # what architectures without a head end with: MistralModel
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_WINDOW, DEFAULT_FIRST_WINDOWED = 4096, 28  # MistralConfig, Qwen2Config, Qwen3Config

_ROPE_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Windows(Enum):
    """The layers of a family that attend to a sliding window only."""

    NONE = "none"
    ALL = "all"  # `sliding_window` counts for every layer (Mistral 7B, arXiv 2310.06825, section 2)
    BY_LAYER = "by layer"  # `layer_types`, or all from layer `max_window_layers` on, where `use_sliding_window` is true


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture; `bare` is the same without its head, which embeds alone.

    `kv_heads`, `head_dim`, `rope_theta`, `tied`: where config.json has none (None: as many as heads, H / heads).
    `multiplied`: embeddings, what layers add, scores and logits have factors. `nope_interval`: without a list in
    config.json, each last layer of so long an interval rotates nothing.
    """

    architecture: str
    model_type: str
    windows: Windows
    qkv_bias: bool = False
    qk_norm: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float = 10_000.0
    tied: bool = False
    multiplied: bool = False
    nope_interval: int | None = None

    @property
    def bare(self) -> str:
        return self.architecture.replace("ForCausalLM", BARE)


FAMILIES = (
    Family("LlamaForCausalLM", "llama", Windows.NONE),
    Family("MistralForCausalLM", "mistral", Windows.ALL, kv_heads=8),
    Family("Qwen2ForCausalLM", "qwen2", Windows.BY_LAYER, qkv_bias=True, kv_heads=32),
    Family("Qwen3ForCausalLM", "qwen3", Windows.BY_LAYER, qk_norm=True, kv_heads=32, head_dim=128),
    Family("GraniteForCausalLM", "granite", Windows.NONE, multiplied=True),
    Family("SmolLM3ForCausalLM", "smollm3", Windows.NONE, kv_heads=4, rope_theta=2e6, tied=True, nope_interval=4),
)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. `factor` for linear and llama3; the last three for llama3 alone."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder-only model: L layers, hidden H, `heads` x `head_dim` queries, N = `kv_heads`, vocabulary V.

    `qkv_bias`: q, k and v have a bias; `qk_norm`: each head of q and k is normalised before it is rotated.
    `windows`: for each layer the tokens that a token attends to, itself included; 0: all.
    `nope_layers`: those that rotate nothing (NoPE: Kazemnejad et al., NeurIPS 2023).
    `embedding_scale`: of embeddings; `residual_scale`: of what attention and MLP add to the residual stream;
    `attention_scale`: of scores, before their softmax; None: D ** -0.5. Logits are divided by `logit_divisor`.
    `dtype`: the dtype of the stored weights as config.json names it; "" where it names none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    tied_embeddings: bool  # the head is the embedding; so it is taken to be where there is no head
    rope: RopeSpec
    qkv_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    nope_layers: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    logit_divisor: float = 1.0
    eos: frozenset[int] = frozenset()
    dtype: str = ""

    @property
    def query_scale(self) -> float:
        """Factor of a query's scores before their softmax."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    def projection(self, name: str) -> tuple[int, int]:
        """(in, out) features of one of the seven projections."""
        hidden, inner = self.hidden_size, self.intermediate_size
        match name:
            case "q_proj":
                return hidden, self.q_size
            case "k_proj" | "v_proj":
                return hidden, self.kv_size
            case "o_proj":
                return self.q_size, hidden
            case "gate_proj" | "up_proj":
                return hidden, inner
            case "down_proj":
                return inner, hidden
            case _:
                raise KeyError(name)


def is_bare(architecture: str) -> bool:
    """Whether such a model has no head: its hidden states are embeddings, and it generates nothing."""
    return architecture.endswith(BARE)


def parse_model_config(raw: bytes, raw_generation: bytes | None = None) -> ModelSpec:
    """Read config.json and generation_config.json as files. Raises Refused: ConfigInvalid, UnsupportedModel."""
    config = _object("config.json", raw)
    return parse_spec(config, None if raw_generation is None else _object("generation_config.json", raw_generation))


def parse_spec(config: JsonObject, generation: JsonObject | None = None) -> ModelSpec:
    """Read a ModelSpec from the parsed objects of both files. Raises Refused: ConfigInvalid, UnsupportedModel."""
    family, architecture = _family(config)
    _check_options(config)
    hidden, heads = _size(config, "hidden_size", 1 << 17), _size(config, "num_attention_heads", 1 << 12)
    kv_heads = _size(config, "num_key_value_heads", 1 << 12, null=heads, absent=family.kv_heads)
    head_dim = _size(config, "head_dim", 1 << 12, null=hidden // heads, absent=family.head_dim)
    divided = config.get("head_dim") is None and family.head_dim is None
    if heads % kv_heads or head_dim % 2 or (divided and hidden % heads):
        raise _invalid(f"{heads} heads, {kv_heads} key-value heads of {head_dim} do not share {hidden} features evenly")
    layers = _size(config, "num_hidden_layers", 1 << 10)
    vocab_size = _size(config, "vocab_size", 1 << 22)
    max_positions = _size(config, "max_position_embeddings", 1 << 24)
    dtype: object = config.get("dtype") or config.get("torch_dtype")  # transformers 5, earlier versions
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size", 1 << 19),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_positive(config, "rms_norm_eps", 1e-6),
        max_positions=max_positions,
        tied_embeddings=_flag(config, "tie_word_embeddings", absent=family.tied) or is_bare(architecture),
        rope=_rope(config, family, max_positions),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        windows=_windows(config, family, layers),
        nope_layers=_nope_layers(config, family, layers),
        **(_scales(config) if family.multiplied else {}),
        eos=_eos(config, generation or {}, vocab_size),
        dtype=dtype if isinstance(dtype, str) and dtype in SERVED_DTYPES.values() else "",
    )


def _object(name: str, raw: bytes) -> JsonObject:
    try:
        return parse_object(raw, max_bytes=MAX_CONFIG_BYTES)
    except JsonError as error:
        raise Refused(Reason.CONFIG_INVALID, f"{name}: {error}") from error


def _family(config: JsonObject) -> tuple[Family, str]:
    """The family and the architecture, by `architectures`, or by `model_type` if a configuration names none."""
    names = config.get("architectures")
    for family in FAMILIES:
        if names == [family.bare]:
            return family, family.bare
        if names == [family.architecture] or (names is None and config.get("model_type") == family.model_type):
            return family, family.architecture
    served = ", ".join(family.architecture for family in FAMILIES)
    raise _unsupported(f"architectures is {quoted(names)}; served are: {served}, and each as {BARE}, without its head")


def _check_options(config: JsonObject) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if _flag(config, name):
            raise _unsupported(f"{name} is true; only models without these biases are served")
    if config.get("quantization_config") is not None:
        raise _unsupported("quantization_config is set; only float32, float16 and bfloat16 weights are served")
    if config.get("hidden_act", "silu") != "silu":
        raise _unsupported(f"hidden_act is {quoted(config['hidden_act'])}; only silu is served")
    if config.get("auto_map") is not None:
        raise _unsupported("auto_map is set; code that comes with a model is never run")
    if config.get("is_causal") is False or _flag(config, "use_bidirectional_attention"):
        raise _unsupported("every token attends to all of the text; only causal models are served")
    if config.get("partial_rotary_factor") not in (None, 1):
        raise _unsupported("partial_rotary_factor is set; only whole heads are rotated")


def _scales(config: JsonObject) -> dict[str, float]:
    """Read the factors of a family that is multiplied (Granite), by the names that ModelSpec has."""
    names = {
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "attention_scale": "attention_multiplier",
        "logit_divisor": "logits_scaling",
    }
    scales = {scale: _positive(config, name, 1.0) for scale, name in names.items()}
    for scale, value in scales.items():
        if not 1 / MAX_SCALE <= value <= MAX_SCALE:
            raise _invalid(f"{names[scale]} is {value:g}, not a number from 1 / {MAX_SCALE} to {MAX_SCALE}")
    return scales


def _nope_layers(config: JsonObject, family: Family, layers: int) -> tuple[int, ...]:
    """Read which layers rotate nothing: where `no_rope_layers` has a 0, or each last of an interval."""
    if family.nope_interval is None:
        return ()
    if _flag(config, "use_sliding_window") and config.get("sliding_window") is not None:
        raise _unsupported(f"use_sliding_window is true; {family.architecture} is served without windows")
    rotates = config.get("no_rope_layers")
    if rotates is None:
        interval = _integer(config, "no_rope_layer_interval", 1, 1 << 10, null=family.nope_interval)
        return tuple(range(interval - 1, layers, interval))
    flags = cast("list[object]", rotates) if isinstance(rotates, list) else []
    if len(flags) != layers or not all(is_int(flag) and flag in (0, 1) for flag in flags):
        raise _invalid(f"no_rope_layers is no list of {layers} times 0 or 1")
    return tuple(layer for layer, flag in enumerate(flags) if not flag)


def _windows(config: JsonObject, family: Family, layers: int) -> tuple[int, ...]:
    """The number of tokens that each layer attends to, the token itself included; 0: all of them."""
    by_layer, first = family.windows is Windows.BY_LAYER, 0
    used = _flag(config, "use_sliding_window") if by_layer else family.windows is Windows.ALL
    window = 0
    if used and config.get("sliding_window", DEFAULT_WINDOW) is not None:
        window = _size(config, "sliding_window", 1 << 30, absent=DEFAULT_WINDOW)
    if by_layer:
        first = _integer(config, "max_window_layers", 0, 1 << 30, null=DEFAULT_FIRST_WINDOWED)
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(window if layer >= first else 0 for layer in range(layers))
    if not isinstance(kinds, list) or len(cast("list[object]", kinds)) != layers:
        raise _invalid(f"layer_types is no list of {layers} names")
    for kind in cast("list[object]", kinds):
        if kind not in (FULL, SLIDING):
            raise _unsupported(f"layer_types holds {quoted(kind)}; served are: {FULL}, {SLIDING}")
        if kind == SLIDING and not window:
            raise _unsupported(f"layer_types holds {SLIDING}, and no sliding_window is in use")
        if kind == FULL and window and not by_layer:
            raise _unsupported(f"layer_types holds {FULL}, and every layer of {family.architecture} has the window")
    return tuple(window if kind == SLIDING else 0 for kind in cast("list[str]", kinds))


def _rope(config: JsonObject, family: Family, max_positions: int) -> RopeSpec:
    """Read the rotary embedding. `rope_scaling` wins over `rope_parameters`, as in transformers; both are checked."""
    for name in ("rope_parameters", "rope_scaling"):
        if config.get(name) is not None:
            _check_rope(name, config[name])
    rope: JsonObject = config.get("rope_scaling") or config.get("rope_parameters") or {}
    original = "original_max_position_embeddings"  # beside the scaling it counts before the one within
    return RopeSpec(
        theta=_positive(rope, "rope_theta", _positive(config, "rope_theta", family.rope_theta)),
        kind=_rope_type(rope),
        factor=_positive(rope, "factor", 1.0),
        low_freq_factor=_positive(rope, "low_freq_factor", 1.0),
        high_freq_factor=_positive(rope, "high_freq_factor", 4.0),
        original_max_positions=int(_positive(config, original, _positive(rope, original, max_positions))),
    )


def _rope_type(rope: JsonObject) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _check_rope(name: str, rope: Any) -> None:
    if not isinstance(rope, dict):
        raise _invalid(f"{name} is no object")
    fields = cast("JsonObject", rope)
    if any(isinstance(value, dict) for value in fields.values()):
        raise _unsupported(f"{name} differs from layer to layer; only one for all layers is served")
    kind = _rope_type(fields)
    if kind not in ROPE_TYPES:
        raise _unsupported(f"{name} has the type {quoted(kind)}; served are: {', '.join(ROPE_TYPES)}")
    if fields.get("partial_rotary_factor") not in (None, 1):
        raise _unsupported(f"{name} has a partial_rotary_factor; only whole heads are rotated")
    if kind != "default" and fields.get("factor") is None:
        raise _invalid(f"{name} is of the type {kind} and has no factor")
    for number in _ROPE_NUMBERS:
        _positive(fields, number, 1.0)
    low, high = _positive(fields, "low_freq_factor", 1.0), _positive(fields, "high_freq_factor", 4.0)
    if kind == "llama3" and low >= high:
        raise _invalid(f"{name}: low_freq_factor is not below high_freq_factor")


def _eos(config: JsonObject, generation: JsonObject, vocab_size: int) -> frozenset[int]:
    """Read the ends of sequence, an id or a list of each file, as vLLM's server; -1 and the like, which no token has,
    stand for none."""
    found: set[int] = set()
    text_config = config.get("text_config")
    for fields in (generation, config, cast("JsonObject", text_config) if isinstance(text_config, dict) else {}):
        value = fields.get("eos_token_id")
        ids = cast("list[object]", value) if isinstance(value, list) else [] if value is None else [value]
        if not all(is_int(token) for token in ids):
            raise _invalid(f"eos_token_id is {quoted(value)}, not an integer or a list of integers")
        found.update(token for token in cast("list[int]", ids) if 0 <= token < vocab_size)
    if len(found) > MAX_EOS:
        raise _invalid(f"eos_token_id names {len(found)} tokens, the limit is {MAX_EOS}")
    return frozenset(found)


def _positive(fields: JsonObject, name: str, default: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise _invalid(f"{name} is {quoted(value)}, not a number above 0")
    return float(value)


def _size(config: JsonObject, name: str, most: int, null: int | None = None, *, absent: int | None = None) -> int:
    """Read a size. `null`: what an explicit null stands for; `absent`: what a missing field does, if that differs."""
    if name not in config and absent is not None:
        return absent
    return _integer(config, name, 1, most, null=null)


def _integer(config: JsonObject, name: str, least: int, most: int, *, null: int | None) -> int:
    value = config.get(name)
    value = null if value is None else value
    if not isinstance(value, int) or not is_int(value) or not least <= value <= most:
        raise _invalid(f"{name} is {quoted(value)}, not an integer from {least} to {most}")
    return value


def _flag(config: JsonObject, name: str, *, absent: bool = False) -> bool:
    value = config.get(name, absent)
    if not isinstance(value, bool):
        raise _invalid(f"{name} is {quoted(value)}, not true or false")
    return value


def _invalid(what: str) -> Refused:
    return Refused(Reason.CONFIG_INVALID, f"config.json: {what}")


def _unsupported(what: str) -> Refused:
    return Refused(Reason.UNSUPPORTED_MODEL, f"config.json: {what}")

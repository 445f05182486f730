"""A Hugging Face config.json -> ModelSpec: what an executor has to compute, whatever the family is called.

transformers 5 writes `rope_parameters`; earlier versions wrote `rope_theta` and `rope_scaling`. Both are read. What
would be computed otherwise than in transformers is refused by name: serving something else is worse than not serving.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from weft_runner.errors import ModelUnsupported
from weft_runner.model.families import family_of, windows_of

ROPE_KINDS = ("default", "linear", "llama3")
DTYPES = ("bfloat16", "float16", "float32")


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
    `windows`: for each layer the tokens that a token sees, itself included (itself and window - 1 before it); 0: all.
    `dtype`: what config.json says the weights are stored in; "" where it does not say.
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
    tied: bool
    rope: RopeSpec
    qkv_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    eos: frozenset[int] = frozenset()
    dtype: str = ""

    @property
    def sliding_window(self) -> int:
        """The window of the layers that have one; 0: none has."""
        return max(self.windows)

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


def read_spec(config: Path, generation_config: Path | None = None) -> ModelSpec:
    """Read the files of a base model. Raises ModelUnsupported."""
    generation = _read_object(generation_config) if generation_config else {}
    return parse_spec(_read_object(config), generation)


def parse_spec(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelSpec:
    """config.json and generation_config.json as objects -> ModelSpec. Raises ModelUnsupported."""
    family = family_of(config)
    if faults := list(_faults(config)):
        raise ModelUnsupported("config.json: " + "; ".join(faults))
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    layers = _size(config, "num_hidden_layers")
    if config.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise ModelUnsupported(f"config.json: {heads} heads do not share {hidden} features evenly")
    return _checked(
        ModelSpec(
            architecture=family.architecture,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(config, "intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=_size(config, "num_key_value_heads", heads, absent=family.kv_heads),
            head_dim=_size(config, "head_dim", hidden // heads, absent=family.head_dim),
            norm_eps=_number(config, "rms_norm_eps", 1e-6),
            max_positions=_size(config, "max_position_embeddings"),
            tied=_flag(config, "tie_word_embeddings"),
            rope=_rope(config),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            windows=windows_of(config, family, layers),
            eos=_eos(config, generation or {}),
            dtype=_dtype(config),
        )
    )


def _checked(spec: ModelSpec) -> ModelSpec:
    if spec.heads % spec.kv_heads or spec.head_dim % 2:
        raise ModelUnsupported(
            f"config.json: {spec.heads} heads do not share {spec.kv_heads} key-value heads of {spec.head_dim} evenly"
        )
    return spec


def _faults(config: Mapping[str, Any]) -> Iterator[str]:
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            yield f"{name} is set, and these biases are not computed"
    if config.get("hidden_act", "silu") != "silu":
        yield f"hidden_act is {config['hidden_act']}, computed is silu"
    if config.get("quantization_config") is not None:
        yield "quantization_config is set, and quantized weights are not read"


def _rope(config: Mapping[str, Any]) -> RopeSpec:
    """`rope_scaling` wins over `rope_parameters`, as in transformers."""
    scaling: Any = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
        raise ModelUnsupported("config.json: rope parameters are no object, or differ from layer to layer")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ModelUnsupported(f"rope type is {kind}, computed are {', '.join(ROPE_KINDS)}")
    if any(place.get("partial_rotary_factor") not in (None, 1.0) for place in (scaling, config)):
        raise ModelUnsupported("partial_rotary_factor is not computed")
    if kind != "default" and scaling.get("factor") is None:
        raise ModelUnsupported(f"rope type is {kind}, and it has no factor")
    return _rope_numbers(kind, cast("Mapping[str, Any]", scaling), config)


def _rope_numbers(kind: str, scaling: Mapping[str, Any], config: Mapping[str, Any]) -> RopeSpec:
    """The pre-training length may stand beside the scaling, and then counts before the one within."""
    name = "original_max_position_embeddings"
    original = config.get(name) or scaling.get(name) or config.get("max_position_embeddings", 8192)

    def number(name: str, default: float) -> float:
        return _positive(default if scaling.get(name) is None else scaling[name])

    try:
        rope = RopeSpec(
            theta=_positive(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            kind=kind,
            factor=number("factor", 1.0),
            low_freq_factor=number("low_freq_factor", 1.0),
            high_freq_factor=number("high_freq_factor", 4.0),
            original_max_positions=int(_positive(original)),
        )
    except (TypeError, ValueError) as error:
        raise ModelUnsupported(f"rope parameters: {error}") from error
    if kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ModelUnsupported("rope parameters: low_freq_factor is not below high_freq_factor")
    return rope


def _positive(value: Any) -> float:
    number = float(value)
    if not 0.0 < number < math.inf:
        raise ValueError(f"{number} is no number above 0")
    return number


def _size(config: Mapping[str, Any], name: str, null: int | None = None, *, absent: int | None = None) -> int:
    """`null`: what an explicit null stands for; `absent`: what a missing field does, where that is something else."""
    value = absent if name not in config and absent is not None else config.get(name)
    value = null if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelUnsupported(f"config.json: {name} is {value}, not a positive integer")
    return value


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name)
    try:
        return _positive(default if value is None else value)
    except (TypeError, ValueError) as error:
        raise ModelUnsupported(f"config.json: {name}: {error}") from error


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise ModelUnsupported(f"config.json: {name} is {value}, not true or false")
    return value


def _dtype(config: Mapping[str, Any]) -> str:
    """transformers 5 writes `dtype`, earlier ones `torch_dtype`. A hint: the tensors themselves say what they are."""
    value = config.get("dtype") or config.get("torch_dtype")
    return value if value in DTYPES else ""


def _eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> frozenset[int]:
    """One id or a list; generation_config.json wins, as in transformers."""
    value = generation.get("eos_token_id", config.get("eos_token_id"))
    if value is None:
        return frozenset()
    ids = cast("list[Any]", value) if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelUnsupported(f"eos_token_id is {value}, not an integer or a list of integers")
    return frozenset(ids)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelUnsupported(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelUnsupported(f"{path.name} is no JSON object")
    return cast("dict[str, Any]", value)

"""A Hugging Face config.json -> ModelSpec: what an executor has to compute. Llama family.

transformers 5 writes `rope_parameters`; earlier versions wrote `rope_theta` and `rope_scaling`. Both are read.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from weft_runner.errors import ModelUnsupported

ROPE_KINDS = ("default", "linear", "llama3")
ARCHITECTURES = ("LlamaForCausalLM",)


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
    """Sizes of a decoder-only model: L layers, hidden H, `heads` x `head_dim` queries, N = `kv_heads`, vocabulary V."""

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
    eos: frozenset[int] = frozenset()

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
    """config.json and generation_config.json as objects -> ModelSpec. Raises ModelUnsupported, all reasons listed."""
    if faults := list(_faults(config)):
        raise ModelUnsupported("config.json: " + "; ".join(faults))
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    return ModelSpec(
        architecture=ARCHITECTURES[0],
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size"),
        layers=_size(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", hidden // heads),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_positions=_size(config, "max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope=_rope(config),
        eos=_eos(config, generation or {}),
    )


def _faults(config: Mapping[str, Any]) -> list[str]:
    faults: list[str] = []
    architectures = config.get("architectures")
    if architectures != list(ARCHITECTURES) and not (architectures is None and config.get("model_type") == "llama"):
        faults.append(f"architectures is {architectures}, computed is {ARCHITECTURES[0]}")
    if config.get("attention_bias") or config.get("mlp_bias"):
        faults.append("biases are not computed")
    if config.get("hidden_act", "silu") != "silu":
        faults.append(f"hidden_act is {config['hidden_act']}, computed is silu")
    if config.get("quantization_config") is not None:
        faults.append("quantized weights are not computed")
    return faults


def _rope(config: Mapping[str, Any]) -> RopeSpec:
    scaling: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ModelUnsupported(f"rope type is {kind}, computed are {', '.join(ROPE_KINDS)}")
    if scaling.get("partial_rotary_factor") not in (None, 1.0):
        raise ModelUnsupported("partial_rotary_factor is not computed")
    original = scaling.get("original_max_position_embeddings") or config.get("max_position_embeddings", 8192)
    try:
        return RopeSpec(
            theta=_positive(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            kind=kind,
            factor=_positive(scaling.get("factor", 1.0)),
            low_freq_factor=_positive(scaling.get("low_freq_factor", 1.0)),
            high_freq_factor=_positive(scaling.get("high_freq_factor", 4.0)),
            original_max_positions=int(original),
        )
    except (TypeError, ValueError) as error:
        raise ModelUnsupported(f"rope parameters: {error}") from error


def _positive(value: Any) -> float:
    number = float(value)
    if not 0.0 < number < math.inf:
        raise ValueError(f"{number} is no number above 0")
    return number


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelUnsupported(f"config.json: {name} is {value}, not a positive integer")
    return value


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

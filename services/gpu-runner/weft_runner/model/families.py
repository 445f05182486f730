"""What tells one family of models from another: Llama, Mistral, Qwen2 and Qwen3 differ in biases, norms and windows.

Absent fields of config.json mean what they mean in transformers' configuration class of that family.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from weft_runner.errors import ModelUnsupported


class Windows(Enum):
    """Which layers attend to a window only."""

    NONE = "none"
    ALL = "all"  # `sliding_window` counts for every layer (Mistral 7B, arXiv 2310.06825, section 2)
    BY_LAYER = "by layer"  # `layer_types`, or all from layer `max_window_layers` on, where `use_sliding_window` says so


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. `kv_heads`, `head_dim`: where config.json leaves them out (None: as many as heads, H / heads).

    `qkv_bias`: q, k and v have a bias; `qk_norm`: each head of q and of k is normalised before it is rotated.
    """

    architecture: str
    model_type: str
    windows: Windows
    qkv_bias: bool = False
    qk_norm: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None


FAMILIES = (
    Family("LlamaForCausalLM", "llama", Windows.NONE),
    Family("MistralForCausalLM", "mistral", Windows.ALL, kv_heads=8),
    Family("Qwen2ForCausalLM", "qwen2", Windows.BY_LAYER, qkv_bias=True, kv_heads=32),
    Family("Qwen3ForCausalLM", "qwen3", Windows.BY_LAYER, qk_norm=True, kv_heads=32, head_dim=128),
)
ARCHITECTURES = tuple(family.architecture for family in FAMILIES)
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_WINDOW, DEFAULT_FIRST_WINDOWED = 4096, 28  # MistralConfig, Qwen2Config, Qwen3Config


def family_of(config: Mapping[str, Any]) -> Family:
    """By `architectures`, or by `model_type` where there is none. Raises ModelUnsupported."""
    architectures = config.get("architectures")
    for family in FAMILIES:
        if architectures == [family.architecture]:
            return family
        if architectures is None and config.get("model_type") == family.model_type:
            return family
    raise ModelUnsupported(f"config.json: architectures is {architectures}, computed are {', '.join(ARCHITECTURES)}")


def windows_of(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int, ...]:
    """How many tokens each layer attends to, itself included; 0: all of them. Raises ModelUnsupported."""
    match family.windows:
        case Windows.NONE:
            return _no_layer_types(config, (0,) * layers)
        case Windows.ALL:
            return _no_layer_types(config, (_window(config),) * layers)
        case Windows.BY_LAYER:
            window = _window(config) if _uses_window(config) else 0
            return tuple(window if kind == SLIDING else 0 for kind in _layer_types(config, layers, window))


def _uses_window(config: Mapping[str, Any]) -> bool:
    value = config.get("use_sliding_window", False)
    if not isinstance(value, bool):
        raise ModelUnsupported(f"config.json: use_sliding_window is {value}, not true or false")
    return value


def _window(config: Mapping[str, Any]) -> int:
    value = config.get("sliding_window", DEFAULT_WINDOW)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelUnsupported(f"config.json: sliding_window is {value}, not a positive integer")
    return value


def _layer_types(config: Mapping[str, Any], layers: int, window: int) -> list[str]:
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers")
        first = DEFAULT_FIRST_WINDOWED if first is None else first
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise ModelUnsupported(f"config.json: max_window_layers is {first}, not an integer from 0")
        return [SLIDING if window and layer >= first else FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(cast("list[Any]", kinds)) != layers:
        raise ModelUnsupported(f"config.json: layer_types is no list of {layers} names")
    for kind in cast("list[Any]", kinds):
        if kind not in (FULL, SLIDING):
            raise ModelUnsupported(f"config.json: layer_types holds {kind}, computed are {FULL} and {SLIDING}")
        if kind == SLIDING and not window:
            raise ModelUnsupported(f"config.json: layer_types holds {SLIDING}, and no sliding_window is in use")
    return cast("list[str]", kinds)


def _no_layer_types(config: Mapping[str, Any], windows: tuple[int, ...]) -> tuple[int, ...]:
    """The family's layers are all alike: a list that says otherwise belongs to another one."""
    kinds = config.get("layer_types")
    if kinds is not None and kinds != [SLIDING if window else FULL for window in windows]:
        raise ModelUnsupported("config.json: layer_types is set, and the layers of this family are all alike")
    return windows

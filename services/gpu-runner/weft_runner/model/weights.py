"""Base weights from safetensors, mapped from disk and converted a tensor at a time. Never a pickle.

Projections that read the same input are stacked (q|k|v, gate|up): one matrix product instead of three or two.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weft_runner.errors import StoppedAtStart, WeightsInvalid
from weft_runner.model.spec import ModelSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Files = Mapping[str, Path]  # plain file name -> where it is
Get = Callable[[str, tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer; matrices are [out, in]."""

    attention_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [(heads + 2 kv_heads) * D, H]
    o: torch.Tensor  # [H, heads * D]
    mlp_norm: torch.Tensor  # [H]
    gate_up: torch.Tensor  # [2 I, H]
    down: torch.Tensor  # [H, I]


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """The whole model; `head` is `embedding` itself when the two are tied."""

    embedding: torch.Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [H]
    head: torch.Tensor  # [V, H]


def load_weights(
    files: Files,
    spec: ModelSpec,
    dtype: torch.dtype = torch.float32,
    stopping: Callable[[], bool] = lambda: False,
) -> ModelWeights:
    """Read every tensor the spec asks for, one file or sharded. Raises WeightsInvalid, StoppedAtStart."""
    with ExitStack() as stack:
        get = _getter(_open_all(files, stack), dtype, stopping)
        hidden, vocab = spec.hidden_size, spec.vocab_size
        embedding = get("model.embed_tokens.weight", (vocab, hidden))
        return ModelWeights(
            embedding=embedding,
            layers=tuple(_layer(get, spec, layer) for layer in range(spec.layers)),
            norm=get("model.norm.weight", (hidden,)),
            head=embedding if spec.tied else get("lm_head.weight", (vocab, hidden)),
        )


def _layer(get: Get, spec: ModelSpec, layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}"

    def matrix(block: str, name: str) -> torch.Tensor:
        n_in, n_out = spec.projection(name)
        return get(f"{prefix}.{block}.{name}.weight", (n_out, n_in))

    return LayerWeights(
        attention_norm=get(f"{prefix}.input_layernorm.weight", (spec.hidden_size,)),
        qkv=torch.cat([matrix("self_attn", name) for name in ("q_proj", "k_proj", "v_proj")]),
        o=matrix("self_attn", "o_proj"),
        mlp_norm=get(f"{prefix}.post_attention_layernorm.weight", (spec.hidden_size,)),
        gate_up=torch.cat([matrix("mlp", name) for name in ("gate_proj", "up_proj")]),
        down=matrix("mlp", "down_proj"),
    )


def _open_all(files: Files, stack: ExitStack) -> dict[str, Any]:
    """tensor name -> the open file that has it."""
    handles: dict[str, Any] = {}
    for name in _weight_files(files):
        try:
            handle = stack.enter_context(safe_open(str(files[name]), framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise WeightsInvalid(f"{name}: {error}") from error
        handles.update(dict.fromkeys(handle.keys(), handle))
    return handles


def _weight_files(files: Files) -> list[str]:
    if INDEX not in files:
        shards = [SINGLE] if SINGLE in files else sorted(name for name in files if name.endswith(".safetensors"))
    else:
        shards = sorted(set(json.loads(files[INDEX].read_bytes())["weight_map"].values()))
    missing = [name for name in shards if name not in files]
    if missing or not shards:
        raise WeightsInvalid(f"no weights: {', '.join(missing) or SINGLE} is not there")
    return shards


def _getter(handles: Mapping[str, Any], dtype: torch.dtype, stopping: Callable[[], bool]) -> Get:
    def get(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if stopping():
            raise StoppedAtStart(f"told to stop before {name} was loaded")
        if name not in handles:
            raise WeightsInvalid(f"the weights have no tensor {name}")
        tensor: torch.Tensor = handles[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise WeightsInvalid(f"{name} has the shape {tuple(tensor.shape)}, config.json asks for {shape}")
        return tensor.to(dtype)

    return get

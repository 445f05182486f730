"""Makes small real artifacts for the tests of weft.artifacts and the depot: safetensors by hand, a tiny Llama."""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.artifacts.errors import Reason, Refused
from weft.domain.model.config import parse_model_config
from weft.domain.model.spec import ModelSpec
from weft.domain.model.tensors import linear_modules, model_tensors, module_size

MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
ADAPTER_CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "base_model_name_or_path": "some/where/tiny", "r": 4, "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"], "bias": "none", "task_type": "CAUSAL_LM", "init_lora_weights": True,
    "lora_dropout": 0.05, "inference_mode": True,
}  # fmt: skip
Tensors = dict[str, tuple[str, np.ndarray]]


@contextmanager
def refused(reason: Reason) -> Iterator[None]:
    """Hold what is done here to a refusal for this reason."""
    with pytest.raises(Refused) as caught:
        yield
    assert caught.value.reason == reason


def shape() -> ModelSpec:
    return parse_model_config(json.dumps(MODEL_CONFIG).encode())


def safetensors(header: dict[str, Any] | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file with this header, right or wrong; `length` overrides what the first 8 bytes claim."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def pack(tensors: Tensors) -> bytes:
    """A correct safetensors file. BF16 is given as float32 and cut."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, values) in tensors.items():
        raw = encode(dtype, values)
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return safetensors(header, data)


def encode(dtype: str, values: np.ndarray) -> bytes:
    if dtype == "BF16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2", "F64": "<f8", "I32": "<i4"}[dtype]).tobytes()


def lora(
    *,
    rank: int = 4,
    modules: tuple[str, ...] = ("q_proj", "v_proj"),
    dtype: str = "F32",
    of: ModelSpec | None = None,
    ranks: dict[str, int] | None = None,
) -> Tensors:
    """An adapter's tensors for the tiny model; `ranks` overrides the rank by module name."""
    tensors: Tensors = {}
    random = np.random.default_rng(7)
    model = of or shape()
    for module, _, held in linear_modules(model):
        if module.rpartition(".")[2] in modules:
            r = (ranks or {}).get(module, rank)
            features_in, features_out = module_size(model, held)
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = (dtype, random.normal(size=(r, features_in)))
            tensors[f"{prefix}.lora_B.weight"] = (dtype, random.normal(size=(features_out, r)))
    return tensors


def write_adapter(folder: Path, *, config: dict[str, Any] | None = None, tensors: Tensors | None = None) -> Path:
    """A folder as PEFT writes it; `config` changes fields of ADAPTER_CONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**ADAPTER_CONFIG, **(config or {})}))
    (folder / "adapter_model.safetensors").write_bytes(pack(tensors if tensors is not None else lora()))
    return folder


def weights(model: ModelSpec | None = None, *, dtype: str = "F32") -> Tensors:
    random = np.random.default_rng(3)
    return {name: (dtype, random.normal(size=size)) for name, size in model_tensors(model or shape())}


def write_model(
    folder: Path, *, config: dict[str, Any] | None = None, shards: int = 1, of: ModelSpec | None = None
) -> Path:
    """A folder as transformers writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MODEL_CONFIG, **(config or {})}))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "README.md").write_text("not taken")
    tensors = weights(of)
    if shards == 1:
        (folder / "model.safetensors").write_bytes(pack(tensors))
        return folder
    where: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        (folder / name).write_bytes(pack(part))
        where |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder

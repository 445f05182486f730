"""Random seeded checkpoints and PEFT adapters on disk: they serve speed and exactness, not text.

A model is written once and kept in a folder; the next run takes it as it is. Adapter i of rank r is the same bytes
wherever it is made: it is seeded by its number.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from weft.domain.model.config import parse_spec
from weft.domain.model.tensors import model_tensors
from weft_stage.shapes import BF16_BYTES, Shape

CONTEXT_TOKENS = 4096
ADAPTER_SEED = 100
B_STD = 0.02  # of an adapter's B: its effect is a few per cent of the base's output
FILES = ("config.json", "model.safetensors")


def cache_dir() -> Path:
    """Return the default folder of models: `$XDG_CACHE_HOME/weft/bench`, else under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "bench"


def base_model(folder: Path, name: str, shape: Shape) -> Path:
    """Return the folder of the base checkpoint, bf16, written if it is not there."""
    return _made(folder / name / "base", lambda into: _write_base(into, shape))


def adapter(folder: Path, name: str, shape: Shape, number: int, rank: int) -> Path:
    """Return the folder of adapter `number` with this rank on all linear modules, written if it is not there."""
    return _made(folder / name / f"r{rank}-{number}", lambda into: _write_adapter(into, shape, number, rank))


def files(base: Path) -> dict[str, Path]:
    """Return a base's files by name, as a runner takes them."""
    return {name: base / name for name in FILES}


def config(shape: Shape) -> dict[str, object]:
    """Return `config.json` of a checkpoint of this shape."""
    return {
        "architectures": [shape.architecture], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "intermediate_size": shape.inner, "vocab_size": shape.vocab, "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    } | _own_fields(shape)  # fmt: skip


def _own_fields(shape: Shape) -> dict[str, object]:
    """Return what a family's configuration has otherwise than Llama's."""
    match shape.architecture:
        case "Gemma3ForCausalLM":
            return {
                "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512,
                "sliding_window_pattern": 6, "query_pre_attn_scalar": shape.head_dim, "rope_theta": 1e6,
                "rope_local_base_freq": 1e4, "tie_word_embeddings": True, "max_position_embeddings": 32768,
            }  # fmt: skip
        case "Phi3ForCausalLM":
            share, original = 0.75, CONTEXT_TOKENS
            pairs = int(shape.head_dim * share) // 2
            factors = {"short_factor": [1.0] * pairs, "long_factor": [1.0 + pair for pair in range(pairs)]}
            return {
                "model_type": "phi3", "partial_rotary_factor": share, "original_max_position_embeddings": original,
                "max_position_embeddings": 32 * original, "rope_scaling": {"type": "longrope", **factors},
                "sliding_window": None, "tie_word_embeddings": True, "pad_token_id": None,
            }  # fmt: skip
        case _:
            return {}


def _made(folder: Path, write: Callable[[Path], None]) -> Path:
    """Write a folder beside its place and move it there whole: a run that is interrupted leaves nothing half made."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        half = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            write(half)
            half.replace(folder)
        finally:
            shutil.rmtree(half, ignore_errors=True)
    return folder


def _write_base(folder: Path, shape: Shape) -> None:
    """Write one tensor after the other: no more than the largest of them is in memory."""
    rng, spec = torch.Generator().manual_seed(0), parse_spec(config(shape))
    sizes, header, end = dict(model_tensors(spec)), dict[str, object](), 0
    for name, size in sizes.items():
        begin, end = end, end + BF16_BYTES * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for size in sizes.values():
            file.write(_normal(rng, size, 0.02, 1.0 - spec.family.norm_offset).view(torch.int16).numpy().data)
    (folder / "config.json").write_text(json.dumps(config(shape)), encoding="utf-8")


def _write_adapter(folder: Path, shape: Shape, number: int, rank: int) -> None:
    rng, tensors = torch.Generator().manual_seed(ADAPTER_SEED + number), {}
    for layer in range(shape.layers):
        for module, (n_in, n_out) in shape.modules.items():
            key = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{key}.lora_A.weight"] = _normal(rng, (rank, n_in), n_in**-0.5)
            tensors[f"{key}.lora_B.weight"] = _normal(rng, (n_out, rank), B_STD)
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0,
        "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "base_model_name_or_path": "base",
        "target_modules": sorted(module.rpartition(".")[2] for module in shape.modules), "modules_to_save": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(written), encoding="utf-8")


def _normal(rng: torch.Generator, size: tuple[int, ...], std: float, norm: float = 1.0) -> torch.Tensor:
    """Draw a tensor from a normal distribution; vectors are norms, whose every weight is `norm`."""
    if len(size) == 1:
        return torch.full(size, norm, dtype=torch.bfloat16)
    return torch.randn(size, generator=rng).mul_(std).to(torch.bfloat16)

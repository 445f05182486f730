"""Random seeded checkpoints and PEFT adapters on disk: they serve speed and exactness, not text.

A model is written once and kept in a folder; the next run takes it as it is. Adapter i of rank r is the same bytes
wherever it is made: it is seeded by its number.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from weft_bench.roofline import Shape

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
    """Return the folder of adapter `number` with this rank on all seven projections, written if it is not there."""
    return _made(folder / name / f"r{rank}-{number}", lambda into: _write_adapter(into, shape, number, rank))


def files(base: Path) -> dict[str, Path]:
    """Return a base's files by name, as a runner takes them."""
    return {name: base / name for name in FILES}


def config(shape: Shape) -> dict[str, object]:
    """Return `config.json` of a checkpoint of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.hidden // shape.heads,
        "intermediate_size": shape.inner, "vocab_size": shape.vocab, "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def projections(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return `self_attn.q_proj` ... -> (inputs, outputs)."""
    h, kv, i = shape.hidden, shape.kv, shape.inner
    return {
        "self_attn.q_proj": (h, h),
        "self_attn.k_proj": (h, kv),
        "self_attn.v_proj": (h, kv),
        "self_attn.o_proj": (h, h),
        "mlp.gate_proj": (h, i),
        "mlp.up_proj": (h, i),
        "mlp.down_proj": (i, h),
    }


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
    rng = torch.Generator().manual_seed(0)
    save_file({name: _normal(rng, size, 0.02) for name, size in _base_tensors(shape)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config(shape)), encoding="utf-8")


def _base_tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for module, (n_in, n_out) in projections(shape).items():
            yield f"{prefix}.{module}.weight", (n_out, n_in)
        yield f"{prefix}.input_layernorm.weight", (shape.hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (shape.hidden,)
    yield "model.norm.weight", (shape.hidden,)
    yield "lm_head.weight", (shape.vocab, shape.hidden)


def _write_adapter(folder: Path, shape: Shape, number: int, rank: int) -> None:
    rng, tensors = torch.Generator().manual_seed(ADAPTER_SEED + number), {}
    for layer in range(shape.layers):
        for module, (n_in, n_out) in projections(shape).items():
            key = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{key}.lora_A.weight"] = _normal(rng, (rank, n_in), n_in**-0.5)
            tensors[f"{key}.lora_B.weight"] = _normal(rng, (n_out, rank), B_STD)
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0,
        "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "base_model_name_or_path": "base",
        "target_modules": sorted(module.rpartition(".")[2] for module in projections(shape)), "modules_to_save": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(written), encoding="utf-8")


def _normal(rng: torch.Generator, size: tuple[int, ...], std: float) -> torch.Tensor:
    """Draw a tensor from a normal distribution; vectors are norms, which are ones."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    return (torch.randn(size, generator=rng) * std).to(torch.bfloat16)

"""Small random models and adapters for the native executor, written without transformers, and steps to feed them."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from weft.domain.model.spec import ModelSpec
from weft.domain.model.tensors import linear_modules, model_tensors, module_size
from weft_kernels.cpu import Library, load
from weft_kernels.plan import plan_rows
from weft_runner.model import Array, Partition, StepInput, StepRow, open_checkpoint, read_spec
from weft_runner.model.cpu.executor import CpuExecutor
from weft_runner.model.cpu.offload import OffloadExecutor
from weft_runner.model.host_tensors import arrays_of, tensor_of
from weft_runner.model.tiers.budget import OffloadBudget

SCALE = 0.75
BASE = "sha256:" + "5" * 64


class Scales:
    """Every module's scale is SCALE."""

    def scale_of(self, module: str, rank: int) -> float:
        del module, rank
        return SCALE


def write_model(root: Path, seed: int, dtype: torch.dtype = torch.bfloat16, **config: Any) -> dict[str, Path]:
    """A random checkpoint of any family that the runner serves. Returns its files by name."""
    root.mkdir(parents=True)
    whole = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 203, "hidden_size": 128,
        "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 10000.0,
        "hidden_act": "silu", **config,
    }  # fmt: skip
    (root / "config.json").write_text(json.dumps(whole))
    spec = read_spec(root / "config.json")
    random = torch.Generator().manual_seed(seed)
    offset = spec.family.norm_offset
    tensors = {name: _random(name, shape, random, offset).to(dtype) for name, shape in model_tensors(spec)}
    save_file(tensors, root / "model.safetensors")
    return {path.name: path for path in root.iterdir()}


def cpu_executor(files: dict[str, Path], library: Library | None = None, **how: Any) -> CpuExecutor:
    """Make the executor of a model's files, with this machine's library if none is given. Raises NativeUnavailable."""
    return CpuExecutor(library or load(), open_checkpoint(files, read_spec(files["config.json"], files)), **how)


def offload_executor(
    files: dict[str, Path], folder: Path, sizes: dict[str, Any], *, part: Partition | None = None, **limits: Any
) -> OffloadExecutor:
    """Make the executor that offloads to a folder. `limits`: of its budget, in place of these."""
    usual: dict[str, Any] = {
        "device_bytes": 1 << 30, "disk_bytes": 1 << 30, "path": folder, "base": BASE, "micro_batch": 16,
        "max_tokens": 512, "max_sequences": 16, "max_rank": 33,
    }  # fmt: skip
    checkpoint = open_checkpoint(files, read_spec(files["config.json"], files))
    return OffloadExecutor(load(), checkpoint, OffloadBudget(**usual | limits), part=part, **sizes)


def as_tensor(rows: torch.Tensor | Array) -> torch.Tensor:
    """What an executor returned, of whichever kind, as oracles compute with it."""
    return rows if isinstance(rows, torch.Tensor) else tensor_of(rows)


def adapter_tensors(spec: ModelSpec, seed: int, ranks: dict[str, int]) -> dict[str, Array]:
    """A random adapter, in PEFT's names. `ranks`: by projection; of one module that holds several, one is named."""
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for module, _, held in linear_modules(spec):
        if rank := next((ranks[name] for name in held if name in ranks), 0):
            n_in, n_out = module_size(spec, held)
            key = f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, n_in, generator=random) / n_in**0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(n_out, rank, generator=random) / rank**0.5
    return arrays_of(tensors)


def make_step(rows: Iterable[tuple[Sequence[int], int, Sequence[int], int | None]]) -> StepInput:
    """Rows of (tokens, position of the first, pages, slot); logits of every row's last token are wanted."""
    tokens: list[int] = []
    step_rows: list[StepRow] = []
    slots: list[int | None] = []
    for row, position, pages, slot in rows:
        step_rows.append(StepRow(len(tokens), len(tokens) + len(row), position, tuple(pages), samples=True))
        tokens.extend(row)
        slots.extend([slot] * len(row))
    return StepInput(tokens, tuple(step_rows), plan_rows(slots, dict.fromkeys(range(64), 1)))


def _random(name: str, shape: tuple[int, ...], random: torch.Generator, offset: float) -> torch.Tensor:
    values = torch.randn(shape, generator=random)
    if name.endswith("norm.weight"):
        return 1.0 - offset + 0.2 * values
    return values * (0.1 if name.endswith("bias") else 1.5 / shape[-1] ** 0.5)

"""Small models of every family with awkward adapters, and batches of them: what split executors are compared on."""

import random
from pathlib import Path
from typing import Any

import torch

from harness.random_models import FAMILIES, OracleModel, Rows, write_adapters, write_base
from weft.domain.request import Sampling

PAGES, PAGE_TOKENS, ANSWER = 64, 16, 8
LAYERS = 3
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "mistral": {"num_key_value_heads": 4, "sliding_window": 11, "tie_word_embeddings": False},
    "qwen2": {"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32},
    "granite": {
        "num_key_value_heads": 2,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 11, "query_pre_attn_scalar": 16},
    "smollm3": {"num_key_value_heads": 2, "no_rope_layers": [1, 0, 1], "pad_token_id": None},
}
ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj", "down_proj"]},
    {"r": 8, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"gate_proj": 5}},
    {"r": 64, "lora_alpha": 64, "target_modules": "all-linear"},
    {"r": 3, "lora_alpha": 6, "target_modules": ["k_proj", "up_proj"], "layers_to_transform": [2]},
    {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "o_proj"], "layers_to_transform": [0]},
)


def written(folder: Path, family: str, **sizes: int) -> OracleModel:
    small = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4}
    seed = FAMILIES.index(family)
    config = {**small, "num_hidden_layers": LAYERS, "max_position_embeddings": 256, **SIZES[family], **sizes}
    write_base(folder / "base", family, seed, **config)
    return write_adapters(folder, ADAPTERS, seed)


def prompts_of(model: OracleModel, seed: int) -> dict[str, tuple[str, list[int]]]:
    """key -> (adapter, tokens): the base and every adapter, twice."""
    rng, names = random.Random(seed), ("", *model.adapters) * 2
    return {f"s{i}": (name, rng.choices(range(128), k=rng.randint(1, 40))) for i, name in enumerate(names)}


def steps_of(model: OracleModel, executor: Any) -> list[dict[str, torch.Tensor]]:
    """The logits of one mixed batch of the base and all adapters, prompts in two chunks, greedy answers: by step."""
    rows, prompts = Rows(model, executor, PAGES, PAGE_TOKENS), prompts_of(model, 3)
    for key, (adapter, tokens) in prompts.items():
        rows.add(key, tokens, adapter, room=ANSWER)
    rows.step({key: len(tokens) // 2 for key, (_, tokens) in prompts.items() if len(tokens) > 1})
    found: list[dict[str, torch.Tensor]] = []
    for _ in range(ANSWER):
        found.append(rows.step({key: rows.left(key) for key in prompts}))
        for key, logits in found[-1].items():
            rows.extend(key, int(logits.argmax()))
    return found


def ask(driver: Any, model: OracleModel, count: int, max_tokens: int = 10) -> list[str]:
    rng, names = random.Random(7), ("", *model.adapters)
    for i in range(count):
        prompt = rng.choices(range(3, 128), k=rng.choice((1, 5, 40)))
        adapter = names[i % len(names)]
        driver.post(driver.request(f"r{i}", prompt, max_tokens, adapter, sampling=Sampling(ignore_eos=True)))
    return [f"r{i}" for i in range(count)]

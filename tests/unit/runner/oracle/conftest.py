"""The oracle: transformers + peft in fp32 on the same files.

Greedy output is compared by teacher forcing: one oracle forward over prompt + our answer tells the oracle's next token
at every position of it. If all agree, the oracle's own greedy run is that answer, by induction.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

# fp32 sums in another order move a logit by ~1e-5 here; a gap between the two best above this cannot be turned round.
TOLERANCE = 1e-3

ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj", "v_proj"]},
    {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    {"r": 8, "lora_alpha": 8, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    {"r": 16, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True},
    {
        "r": 5,
        "lora_alpha": 10,
        "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"],
        "layers_to_transform": [1],
    },
    {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 7, "layers.0.mlp.up_proj": 2},
        "alpha_pattern": {"q_proj": 3, "down_proj": 16},
    },
    {"r": 32, "lora_alpha": 16, "target_modules": r".*\.(v_proj|down_proj)"},
    {"r": 3, "lora_alpha": 6, "target_modules": ["o_proj", "down_proj", "k_proj"]},
)


@dataclass
class Verdict:
    """What the oracle says of an answer: positions that differ by a clear gap, and those too close to tell."""

    wrong: list[int] = field(default_factory=list)
    near_ties: int = 0
    smallest_gap: float = float("inf")


@dataclass
class Oracle:
    """A base model, its adapters, and what transformers + peft make of them."""

    world: Any
    model: Any
    adapters: list[str]
    vocab_size: int

    @torch.inference_mode()
    def logits(self, adapter: str, ids: list[int]) -> torch.Tensor:
        """[len(ids), V] in fp32."""
        if not adapter:
            with self.model.disable_adapter():
                return self.model(input_ids=torch.tensor([ids])).logits[0]
        self.model.set_adapter(adapter)
        return self.model(input_ids=torch.tensor([ids])).logits[0]

    def judge(self, adapter: str, prompt: list[int], answer: list[int]) -> Verdict:
        """Compare an answer with greedy decoding, token for token."""
        logits = self.logits(adapter, [*prompt, *answer])[len(prompt) - 1 : -1]
        best = logits.topk(2, dim=-1)
        verdict = Verdict()
        for position, token in enumerate(answer):
            gap = float(best.values[position, 0] - best.values[position, 1])
            verdict.smallest_gap = min(verdict.smallest_gap, gap)
            if gap < TOLERANCE:
                verdict.near_ties += 1
            elif int(best.indices[position, 0]) != token:
                verdict.wrong.append(position)
        return verdict


@pytest.fixture(scope="session")
def tolerance() -> float:
    return TOLERANCE


@pytest.fixture(scope="session")
def make_oracle(new_world: Any) -> Callable[..., Oracle]:
    """Write a random base and random adapters with transformers and peft themselves, and load them there."""

    def make(root: Path, seed: int, **config: Any) -> Oracle:
        torch.manual_seed(seed)
        llama = transformers.LlamaConfig(
            **{"vocab_size": 131, "intermediate_size": 80, "num_hidden_layers": 3, "initializer_range": 0.15, **config}
        )
        transformers.LlamaForCausalLM(llama).save_pretrained(root / "base")
        names = [write_adapter(root, f"a{i}", adapter) for i, adapter in enumerate(ADAPTERS)]
        world = new_world(root, json.loads((root / "base" / "config.json").read_text()))
        return load_oracle(world, {name: root / name for name in names})

    return make


@pytest.fixture(scope="session")
def load_oracle_from() -> Callable[..., Oracle]:
    return load_oracle


def write_adapter(root: Path, name: str, config: dict[str, Any]) -> str:
    base = transformers.LlamaForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "lora_B" in key:
                weight.copy_(torch.randn_like(weight) * 0.3 / weight.shape[1] ** 0.5)
            elif "lora_A" in key:
                weight.copy_(torch.randn_like(weight) / weight.shape[1] ** 0.5)
    model.save_pretrained(root / name)
    return name


def load_oracle(world: Any, folders: dict[str, Path]) -> Oracle:
    base = transformers.LlamaForCausalLM.from_pretrained(
        world.base, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    (first, folder), *others = folders.items()
    model = peft.PeftModel.from_pretrained(base, str(folder), adapter_name=first)
    for name, other in others:
        model.load_adapter(str(other), adapter_name=name)
    return Oracle(world, model.eval(), list(folders), base.config.vocab_size)

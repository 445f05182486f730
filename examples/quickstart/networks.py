"""The base model and the adapters: their shapes, and how to load them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import tokens
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

BASE_NAME = "weft-quickstart"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Adapter:
    namespace: str
    task: str  # also the adapter's name
    rank: int
    modules: tuple[str, ...]
    steps: int = 400  # enough to choose a task; more where the base itself is not sure of it
    unicode: float = 0.0  # share of its sentences with words beyond ASCII, for one trained behind the tokens of bytes


ADAPTERS = (
    Adapter("acme", "upper", 4, ("q_proj", "v_proj")),
    Adapter("acme", "reverse-words", 8, ATTENTION, steps=1800, unicode=0.1),
    Adapter("globex", "initials", 16, ("k_proj", "v_proj", "up_proj", "down_proj"), steps=1000),
    Adapter("globex", "digits", 8, ("q_proj", "k_proj", "v_proj", *MLP), steps=1600),
    Adapter("initech", "json", 16, ATTENTION + MLP),
    Adapter("initech", "cipher", 32, ("v_proj", "o_proj", *MLP)),
)


def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """The smallest model that still has what a server can get wrong: grouped queries, gated MLP, an untied head."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=tokens.MAX_SEQUENCE_TOKENS,
        bos_token_id=tokenizer.token_to_id(tokens.BOS),
        eos_token_id=tokenizer.token_to_id(tokens.EOS),
        pad_token_id=tokenizer.token_to_id(tokens.EOS),
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def lora_config(adapter: Adapter) -> peft.LoraConfig:
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=2 * adapter.rank,
        target_modules=list(adapter.modules),
        bias="none",
    )


def load_base(out: Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    model.name_or_path = BASE_NAME  # what PEFT writes into an adapter's configuration
    return model


def load_tokenizer(out: Path) -> Tokenizer:
    return Tokenizer.from_file(str(out / "model" / "tokenizer.json"))


def load_adapter(out: Path, adapter: Adapter) -> Any:
    return peft.PeftModel.from_pretrained(load_base(out), out / "adapters" / adapter.task)


def with_adapters(base: LlamaForCausalLM, out: Path) -> Any:
    """A PEFT model of the base with every adapter by its task's name."""
    (first, *others) = ADAPTERS
    model = peft.PeftModel.from_pretrained(base, out / "adapters" / first.task, adapter_name=first.task)
    for adapter in others:
        model.load_adapter(out / "adapters" / adapter.task, adapter.task)
    return model

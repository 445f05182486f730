"""The sizes of a decoder that its time and its memory follow from, read from a `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LORA_TILE = 128  # columns that a block of vLLM's kernel for adapters computes
DTYPE_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp32": 4.0}


class BadArchitecture(ValueError):
    """A model configuration lacks a size, or its name is unknown."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A Llama-like decoder: grouped-query attention, a gated MLP; `tied`: the head is the embedding.

    `experts` MLPs of width `inner`, of which a token passes `active_experts`; one of each is a dense model.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab: int
    tied: bool = False
    experts: int = 1
    active_experts: int = 1

    @property
    def kv_width(self) -> int:
        """Return the width of the keys, and of the values, of a token in a layer."""
        return self.kv_heads * self.head_size

    @property
    def attention_weights(self) -> int:
        """Return the weights of q, k, v and o of a layer."""
        return self.hidden * self.head_size * 2 * self.heads + 2 * self.hidden * self.kv_width

    @property
    def layer_weights(self) -> int:
        """Return the weights of a layer's matrices, including all experts."""
        return self.attention_weights + 3 * self.hidden * self.inner * self.experts

    @property
    def lora_width(self) -> int:
        """Return the inputs and outputs of a layer's seven projections: the cost of a unit of rank."""
        return 7 * self.hidden + 2 * self.heads * self.head_size + 2 * self.kv_width + 3 * self.inner

    @property
    def lora_tiles(self) -> int:
        """Tiles of 128 columns of a layer's seven projections; q, k and v share a grid as wide as the widest."""
        attended, hidden, inner = (
            -(-width // LORA_TILE) for width in (self.heads * self.head_size, self.hidden, self.inner)
        )
        return 3 * attended + 2 * hidden + 2 * inner

    def weight_bytes(self, dtype: str = "bf16") -> float:
        """All weights; embedding and head stay in two bytes whatever the layers have."""
        outside = self.vocab * self.hidden * (1 if self.tied else 2) * min(2.0, 2 * DTYPE_BYTES[dtype])
        return self.layers * self.layer_weights * DTYPE_BYTES[dtype] + outside

    def kv_bytes_per_token(self, dtype: str = "bf16") -> float:
        """Return the bytes of a token's keys and values in all layers."""
        return 2 * self.layers * self.kv_width * DTYPE_BYTES[dtype]


ARCHITECTURES = {
    "meta-llama/Llama-3.1-8B": Architecture(32, 4096, 32, 8, 128, 14336, 128256),
    "meta-llama/Llama-3.1-70B": Architecture(80, 8192, 64, 8, 128, 28672, 128256),
    "meta-llama/Llama-2-7b": Architecture(32, 4096, 32, 32, 128, 11008, 32000),
    "meta-llama/Llama-2-13b": Architecture(40, 5120, 40, 40, 128, 13824, 32000),
    "meta-llama/Llama-2-70b": Architecture(80, 8192, 64, 8, 128, 28672, 32000),
    "Qwen/Qwen2.5-7B": Architecture(28, 3584, 28, 4, 128, 18944, 152064),
    "Qwen/Qwen3-32B": Architecture(64, 5120, 64, 8, 128, 25600, 151936),
    "Qwen/Qwen3-30B-A3B": Architecture(48, 2048, 32, 4, 128, 768, 151936, experts=128, active_experts=8),
}


def architecture(model: str | Mapping[str, Any]) -> Architecture:
    """A known model by its name, or any by the mapping that its `config.json` holds. Raises BadArchitecture."""
    if isinstance(model, str):
        if model not in ARCHITECTURES:
            raise BadArchitecture(f"model {model!r}: give its config.json, or one of {', '.join(ARCHITECTURES)}")
        return ARCHITECTURES[model]
    try:
        heads, hidden = int(model["num_attention_heads"]), int(model["hidden_size"])
        experts = int(model.get("num_experts") or 1)
        return Architecture(
            layers=int(model["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(model.get("num_key_value_heads") or heads),
            head_size=int(model.get("head_dim") or hidden // heads),
            inner=int(model["moe_intermediate_size"] if experts > 1 else model["intermediate_size"]),
            vocab=int(model["vocab_size"]),
            tied=bool(model.get("tie_word_embeddings", False)),
            experts=experts,
            active_experts=int(model.get("num_experts_per_tok") or 1) if experts > 1 else 1,
        )
    except KeyError as error:
        raise BadArchitecture(f"the model's config lacks {error.args[0]!r}") from error

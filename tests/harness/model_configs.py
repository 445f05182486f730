"""Fields of config.json and values that they may have, for properties of whatever reads one."""

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 32,
    "max_position_embeddings": 256,
}  # fmt: skip
FIELDS: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (4, 8, 32),
    "rope_theta": (500.0, 1e6),
    "rope_parameters": ({"rope_type": "default", "rope_theta": 7e3}, {"rope_type": "linear", "factor": 2.0}),
    "rope_scaling": ({"type": "linear", "factor": 4.0},),
    "rms_norm_eps": (1e-5,),
    "tie_word_embeddings": (True, False),
    "use_sliding_window": (True, False),
    "sliding_window": (5, 9),
    "max_window_layers": (0, 2, 9),
    "no_rope_layers": ([1, 0, 1, 1], [0] * 4),
    "no_rope_layer_interval": (1, 3),
    "embedding_multiplier": (12.0, 3),
    "residual_multiplier": (0.22,),
    "attention_multiplier": (0.015625,),
    "logits_scaling": (8.0, 3),
    "layer_types": (["full_attention", "sliding_attention"] * 2, ["full_attention"] * 4),
}
QWEN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")

"""A small configuration of each family beside Llama, Mistral and Qwen, for `native_models.write_model`."""

from typing import Any

OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "granite": {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4, "attention_multiplier": 0.1, "logits_scaling": 3.0, "mlp_bias": True,
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layer_interval": 2, "head_dim": 16,
    },
    "olmo2": {  # all of a token's heads normed together, norms behind attention and MLP
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "rope_theta": 5e5, "attention_bias": True,
    },
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 37,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "gemma2": {  # scores and logits capped, norms around attention and MLP
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 37, "head_dim": 32,
        "query_pre_attn_scalar": 5000, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
        "tie_word_embeddings": False,
    },
    "gemma3": {  # two rotations, heads wider than a unit of the product
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 37, "head_dim": 128,
        "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window_pattern": 2, "query_pre_attn_scalar": 100,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "tie_word_embeddings": False,
    },
    "phi3": {  # fused projections, three quarters of a head rotated
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": 0.75,
        "sliding_window": 61,
    },
    "starcoder2": {  # LayerNorm, biases, an MLP without a gate
        "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh",
    },
    "ministral3": {  # queries that grow with their positions
        "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "head_dim": 32,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "granite4": {  # nothing is rotated
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "num_local_experts": 0,
        "shared_intermediate_size": 160, "attention_multiplier": 0.1, "residual_multiplier": 0.4, "layer_types": None,
    },
}  # fmt: skip


# Llama and the families left out here have every operator; loops over families take the rest in `make test-slow`.
SLOW_FAMILIES = OTHER_FAMILIES.keys() - {"gemma3", "olmo3", "phi3", "starcoder2"}


def shape_of(family: str, layers: int) -> dict[str, Any]:
    """Return the configuration with `layers` layers."""
    kinds = {"layer_types": ["attention"] * layers} if family == "granite4" else {}
    return OTHER_FAMILIES[family] | kinds | {"num_hidden_layers": layers}

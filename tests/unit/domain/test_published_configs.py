"""Configurations as their models were published: fields that each family's hub repositories have, in their words."""

from typing import Any

import pytest

from weft.domain.model.config import parse_spec

TEXT: dict[str, Any] = {
    "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0",
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False,
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "cache_implementation": "hybrid",
        "bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0, "head_dim": 256, "hidden_size": 1152,
        "hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 6912, "max_position_embeddings": 32768,
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "boi_token_index": 255999,
        "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144, "mm_tokens_per_image": 256,
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
    },
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "bos_token_id": 2, "eos_token_id": [1, 107],
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 8192, "num_attention_heads": 8,
        "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
    },
    "phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3"},
        "bos_token_id": 199999, "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False, "max_position_embeddings": 131072,
        "mlp_bias": False, "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "pad_token_id": 199999, "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 262144,
        "rope_scaling": {"long_factor": [2.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
        "tie_word_embeddings": True, "vocab_size": 200064,
    },
    "olmo-3-7b": {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "attention_bias": False, "eos_token_id": 100257,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 65536,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_theta": 500000,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
        "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 100278,
    },
    "granite-4.0-micro": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "attention_bias": False,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12, "hidden_act": "silu", "hidden_size": 2560,
        "init_method": "mup", "intermediate_size": 8192, "layer_types": ["attention"] * 40, "logits_scaling": 10,
        "mamba_chunk_size": 256, "mamba_expand": 2, "mamba_n_heads": 128, "max_position_embeddings": 131072,
        "normalization_function": "rmsnorm", "num_attention_heads": 40, "num_experts_per_tok": 0,
        "num_hidden_layers": 40, "num_key_value_heads": 8, "num_local_experts": 0, "position_embedding_type": "rope",
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000,
        "shared_intermediate_size": 8192, "tie_word_embeddings": True, "vocab_size": 100352,
    },
    "starcoder2-3b": {
        "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "activation_function": "gelu",
        "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072, "intermediate_size": 12288, "mlp_type": "default",
        "embedding_dropout": 0.1, "residual_dropout": 0.1, "max_position_embeddings": 16384, "norm_epsilon": 1e-05,
        "norm_type": "layer_norm", "num_attention_heads": 24, "num_hidden_layers": 30, "num_key_value_heads": 2,
        "rope_theta": 999999.4420358813, "sliding_window": 4096, "use_bias": True, "vocab_size": 49152,
    },
    "smollm3-3b": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False, "mlp_bias": False,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536, "max_window_layers": 28, "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36,
        "num_key_value_heads": 4, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False, "vocab_size": 128256,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_configuration_as_it_was_published_is_read(name: str) -> None:
    config = TEXT | PUBLISHED[name]
    text = config.get("text_config", config)
    spec = parse_spec(config)
    assert (spec.hidden_size, spec.layers) == (text["hidden_size"], text["num_hidden_layers"])
    assert [spec.architecture] == config["architectures"]


def test_what_they_say_beside_sizes_is_what_is_computed() -> None:
    read = {name: parse_spec(TEXT | config) for name, config in PUBLISHED.items()}
    assert read["gemma-3-1b"].windows == ((512,) * 5 + (0,)) * 4 + (512, 512)
    assert [rope.theta for rope in read["gemma-3-1b"].ropes] == [1e6, 1e4]
    assert [rope.factor for rope in read["gemma-3-4b"].ropes] == [8.0, 1.0]
    assert (read["gemma-3-4b"].kv_heads, read["gemma-3-4b"].vocab_size) == (4, 262_208)
    assert (read["gemma-2-2b"].score_cap, read["gemma-2-2b"].logit_cap) == (50.0, 30.0)
    assert read["phi-4-mini"].short_tokens == 4096
    assert read["phi-4-mini"].ropes[0].rotated_size(read["phi-4-mini"].head_dim) == 96
    assert read["olmo-3-7b"].ropes[0].attention_factor == pytest.approx(1.2079441541679836)
    assert read["granite-4.0-micro"].logit_divisor == 10.0
    assert len(read["starcoder2-3b"].biases) == 6
    assert [i for i, layer in enumerate(read["smollm3-3b"].by_layer) if layer.rope is None] == list(range(3, 36, 4))

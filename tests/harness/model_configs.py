"""Fields of config.json and values that they may have, right and wrong, for properties of whatever reads one."""

import random
from typing import Any

from weft.domain.model.families import FAMILIES, Family

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 32,
    "max_position_embeddings": 256,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = [FULL, SLIDING] * 2
FIELDS: dict[str, tuple[Any, ...]] = {
    **{name: (value,) for name, value in SIZES.items()},
    "architectures": (None,), "model_type": tuple(family.model_type for family in FAMILIES),
    "num_key_value_heads": (4, 8, 32), "head_dim": (4, 8, 16), "hidden_act": ("silu", "gelu_pytorch_tanh", "gelu"),
    "hidden_activation": ("silu", "gelu_pytorch_tanh", "relu"), "rms_norm_eps": (1e-5, 1e-6), "norm_epsilon": (1e-3,),
    "tie_word_embeddings": (True, False), "attention_bias": (True, False), "mlp_bias": (True, False),
    "use_bias": (True, False), "rope_theta": (500.0, 10_000, 1e6), "partial_rotary_factor": (0.5, 0.75, 1.0, 1, 0.3),
    "original_max_position_embeddings": (64, 256), "rope_local_base_freq": (77.0, 1e4),
    "use_sliding_window": (True, False), "sliding_window": (5, 9), "max_window_layers": (0, 2, 9),
    "sliding_window_pattern": (2, 3), "layer_types": (KINDS, [FULL] * 4, [SLIDING] * 4, ["attention"] * 4, [FULL] * 3),
    "layers_block_type": (KINDS, [FULL] * 4, ["attention"] * 4, ["mamba"] * 4),
    "no_rope_layers": ([1, 0, 1, 1], [0] * 4, [1] * 5), "no_rope_layer_interval": (1, 3),
    "embedding_multiplier": (12.0, 3), "residual_multiplier": (0.22,), "attention_multiplier": (0.015625,),
    "logits_scaling": (8.0, 3), "query_pre_attn_scalar": (144, 8), "final_logit_softcapping": (30.0,),
    "attn_logit_softcapping": (50.0,), "position_embedding_type": ("rope", "nope"), "num_local_experts": (0, 4),
    "shared_intermediate_size": (32,), "is_causal": (True, False), "use_bidirectional_attention": (True, False),
    "per_layer_config": ({"0": {"num_key_value_heads": 4}}, {"1": {"sliding_window": 3}}, {}),
}  # fmt: skip
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "su", "proportional", "mrope", "axial")
ROPE_FIELDS: dict[str, tuple[Any, ...]] = {
    "rope_theta": (500.0, 7000), "factor": (2.0, 4, 0.5), "low_freq_factor": (1.0, 2), "high_freq_factor": (3, 4.0),
    "original_max_position_embeddings": (32, 128, 512), "attention_factor": (1.2, 1), "beta_fast": (16, 32.0),
    "beta_slow": (1, 2.0), "mscale": (0.7, 1), "mscale_all_dim": (0.8, 1), "truncate": (True, False),
    "partial_rotary_factor": (0.5, 0.75, 1.0), "short_factor": ([1.0, 1.5], [1, 2], [1.0]),
    "long_factor": ([2.0, 4.5], [2, 3], [1.0]), "llama_4_scaling_beta": (0.1, 1),
}  # fmt: skip
NEEDED = {
    "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "longrope": ("short_factor", "long_factor"),
    "su": ("short_factor", "long_factor"),
}  # fmt: skip
STRANGE: tuple[Any, ...] = (None, True, False, 0, -1, 1, 3, 8, 2.5, "x", [], {}, [1], 10**400)


def config_of(family: Family, **change: Any) -> dict[str, Any]:
    """Make a small configuration of a family, which says what has to be said for the family to be served."""
    own: dict[str, Any] = {"pad_token_id": None}  # a usual one is beyond this vocabulary
    own |= {"num_local_experts": 0, "layer_types": [FULL] * 4, "mamba_n_heads": 1} if family.recurrent else {}
    names = {"architectures": [family.architecture], "model_type": family.model_type}
    return {**names, **SIZES, **own, **change}


def mutated_config(family: Family, rng: random.Random, strange: float = 0.15) -> dict[str, Any]:
    """Change a small configuration: fields of any family, left out, null, of other values; ropes of every kind."""
    config = config_of(family, **({"head_dim": 4} if rng.random() < 0.6 else {}))
    for field in rng.sample(sorted(FIELDS), rng.choice((0, 1, 2, 3, 6))):
        config[field] = rng.choice(STRANGE if rng.random() < strange else FIELDS[field])
    for field in ("rope_parameters", "rope_scaling"):
        if rng.random() < 0.4:
            config[field] = _ropes(family, rng, strange)
    for field in rng.sample(sorted(config.keys() - {"pad_token_id", "mamba_n_heads"}), rng.choice((0, 0, 1, 2))):
        del config[field]
    if family.multimodal and rng.random() < 0.4:
        return _multimodal(family, config, rng)
    return config


def _ropes(family: Family, rng: random.Random, strange: float) -> Any:
    if rng.random() < strange / 2:
        return rng.choice(STRANGE)
    if rng.random() < (0.6 if family.sliding_theta else 0.1):
        kinds = rng.sample((FULL, SLIDING), rng.choice((1, 2, 2, 2)))
        return {kind: rng.choice(STRANGE) if rng.random() < strange / 2 else _rope(rng, strange) for kind in kinds}
    grown = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 64} if family.grows else {}
    return _rope(rng, strange) | (grown if rng.random() < 0.8 else {})


def _rope(rng: random.Random, strange: float) -> dict[str, Any]:
    kind = rng.choice(ROPE_KINDS if rng.random() < strange else ROPE_KINDS[:5])
    fields = {*NEEDED.get(kind, ()), *rng.sample(sorted(ROPE_FIELDS), rng.choice((0, 1, 2, 4)))}
    rope = {name: rng.choice(STRANGE if rng.random() < strange / 2 else ROPE_FIELDS[name]) for name in sorted(fields)}
    return rope if rng.random() < 0.1 else rope | {rng.choice(("rope_type", "rope_type", "type")): kind}


def _multimodal(family: Family, text: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    outside = {"architectures": [family.multimodal], "model_type": family.multimodal_type, "text_config": text}
    if rng.random() < 0.3:
        outside["tie_word_embeddings"] = rng.choice((True, False, None))
    text.pop("architectures", None)
    return outside

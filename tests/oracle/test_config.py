"""Our reading of config.json against transformers' own configuration classes."""

import random
from copy import deepcopy
from typing import Any

import pytest
import transformers

from harness.model_configs import FIELDS, QWEN, SIZES
from weft.domain.model.config import FAMILIES, ModelSpec, parse_spec
from weft.domain.model.errors import Refused

MODEL_TYPES = {family.architecture: family.model_type for family in FAMILIES}


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_windows_heads_and_ropes_are_those_of_transformers(architecture):
    """What its configuration class makes of a config.json with fields left out, and how its layers are told of it."""
    compared = 0
    for seed in range(40):
        config = sparse_config(architecture, random.Random(seed))
        try:
            spec = parse_spec(config)
        except Refused:
            continue
        compared += 1
        assert_same(spec, architecture, config)
    assert compared >= 15


def sparse_config(architecture: str, rng: random.Random) -> dict[str, Any]:
    chosen = {field: rng.choice(values) for field, values in FIELDS.items() if rng.random() < 0.5}
    return {"architectures": [architecture], **SIZES, "head_dim": 4, **chosen}


def assert_same(spec: ModelSpec, architecture: str, config: dict[str, Any]) -> None:
    theirs = transformers.AutoConfig.for_model(MODEL_TYPES[architecture], **deepcopy(config))
    typed = (*QWEN, "SmolLM3ForCausalLM")
    kinds = theirs.layer_types if architecture in typed else [architecture] * 4
    windowed = [kind in ("sliding_attention", "MistralForCausalLM") for kind in kinds]
    window = getattr(theirs, "sliding_window", None) or 0
    assert spec.windows == tuple(window if has else 0 for has in windowed)
    assert (spec.kv_heads, spec.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    rotates = getattr(theirs, "no_rope_layers", [1] * 4) if architecture == "SmolLM3ForCausalLM" else [1] * 4
    assert spec.nope_layers == tuple(layer for layer, flag in enumerate(rotates) if not flag)
    factors = (
        [theirs.embedding_multiplier, theirs.residual_multiplier, theirs.attention_multiplier, theirs.logits_scaling]
        if architecture == "GraniteForCausalLM"
        else [1.0, 1.0, None, 1.0]
    )
    assert factors == [spec.embedding_scale, spec.residual_scale, spec.attention_scale, spec.logit_divisor]
    assert spec.norm_eps == theirs.rms_norm_eps
    rope = theirs.rope_parameters
    assert (spec.rope.theta, spec.rope.kind, spec.rope.factor) == (
        rope["rope_theta"],
        rope["rope_type"],
        rope.get("factor", 1.0),
    )
    assert spec.tied_embeddings == theirs.tie_word_embeddings

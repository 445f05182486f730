"""Our reading of config.json against the models that transformers builds of it: the same, or refused.

Models are built without weights. What is compared is what their modules hold, not what their configurations say.
"""

import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from harness.model_configs import FULL, NEEDED, ROPE_FIELDS, SLIDING, config_of, mutated_config
from weft.domain.model.config import parse_spec
from weft.domain.model.errors import Refused
from weft.domain.model.families import FAMILIES, Family
from weft.domain.model.spec import ModelSpec
from weft.domain.model.tensors import IMAGE_PARTS, TEXT_PARTS, model_tensors
from weft_runner.model import inverse_frequencies

Meaning = dict[str, Any]
POINTS = torch.linspace(-3, 3, 7)
SEEDS = range(80)
ROTATIONS = ("llama", "gemma3_text", "olmo3", "phi3", "ministral3")  # families whose code for ropes differs
GROWTH = ("llama_4_scaling_beta", "original_max_position_embeddings")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_a_configuration_means_what_transformers_means_by_it_or_is_refused(family):
    """Fields of any family, left out, null, of other values and of other types, ropes of every kind."""
    compared = 0
    for seed in SEEDS:
        config = mutated_config(family, random.Random(f"{family.model_type} {seed}"))
        try:
            spec = parse_spec(deepcopy(config))
        except Refused:
            continue
        compared += 1
        mine, built = ours(spec), theirs(config, spec.family)
        assert {name for name in mine if not same(mine[name], built[name])} == set(), config
    assert compared >= 10


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.model_type, marks=() if family.model_type in ROTATIONS else pytest.mark.slow)
        for family in FAMILIES
    ],
)
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn", "longrope"])
def test_each_kind_of_rope_turns_as_it_does_there(family, kind):
    """Every field of a rope that a kind has, in turn left out; else the draws above might miss one."""
    rope = {
        name: values[0] for name, values in ROPE_FIELDS.items() if name not in ("partial_rotary_factor", "truncate")
    }
    needed = {*NEEDED.get("longrope" if family.partial else kind, ())}
    needed |= {*GROWTH} if family.grows else set()
    for left_out in (None, *sorted(rope.keys() - needed)):
        one = {name: value for name, value in rope.items() if name != left_out} | {"rope_type": kind}
        config = config_of(
            family, head_dim=4, rope_parameters={FULL: one, SLIDING: dict(one)} if family.sliding_theta else one
        )
        if kind not in (*family.rope_kinds, *(["yarn"] if family.partial else [])):
            with pytest.raises(Refused, match=kind):
                parse_spec(config)
            continue
        assert same(ours(parse_spec(config))["rotations"], theirs(config, family)["rotations"]), (left_out, config)


def ours(spec: ModelSpec) -> Meaning:
    activation = "silu" if spec.activation == "silu" else "gelu_pytorch_tanh"
    return {
        "tensors": dict(model_tensors(spec)),
        "tied": spec.tied_embeddings,
        "heads": (spec.heads, spec.kv_heads, spec.head_dim),
        "windows": spec.windows,
        "rotations": [rotation_of(spec, layer.rope) for layer in spec.by_layer],
        "scales": (spec.embedding_scale, spec.residual_scale, spec.query_scale, spec.logit_divisor),
        "caps": (spec.score_cap, spec.logit_cap),
        "growth": (spec.query_growth, spec.growth_tokens) if spec.family.grows else (),
        "eps": {spec.norm_eps},
        "activation": transformers.activations.ACT2FN[activation](POINTS).tolist(),
        "positions": spec.max_positions,
    }


def rotation_of(spec: ModelSpec, number: int | None) -> Any:
    """Frequencies of short texts and of long ones, the length from which a text is long, the factor of cos and sin."""
    if number is None:
        return None
    rope = spec.ropes[number]
    short, long = (inverse_frequencies(rope, spec.head_dim, long=long) for long in (False, True))
    border = rope.original_max_positions if rope.kind == "longrope" else 0
    return short.tolist(), long.tolist(), border, rope.attention_factor


def theirs(config: dict[str, Any], family: Family) -> Meaning:
    """Build the model, which is of this family, and read its modules. Raises whatever transformers does."""
    config = deepcopy(config)
    made = transformers.AutoConfig.for_model(config.pop("model_type", None) or family.model_type, **config)
    with torch.device("meta"):
        reads_images = family.multimodal and made.model_type == family.multimodal_type
        of = transformers.AutoModelForImageTextToText if reads_images else transformers.AutoModelForCausalLM
        model = of.from_config(made)
    text = getattr(model.model, "language_model", model.model)
    read = text.config
    layers = list(text.layers)
    attentions = [layer.self_attn for layer in layers]
    assert all(attention.is_causal for attention in attentions)
    assert getattr(read, "is_causal", True)
    kinds = getattr(read, "layer_types", None) or [None] * len(layers)
    return {
        "tensors": dict(tensors_of(model)),
        "tied": made.tie_word_embeddings,
        "heads": (read.num_attention_heads, read.num_key_value_heads, attentions[0].head_dim),
        "windows": tuple((windowed(one) or 0) for one in attentions),
        "rotations": [
            theirs_rotation(text, kind) if getattr(attention, "use_rope", True) else None
            for kind, attention in zip(kinds, attentions, strict=True)
        ],
        "scales": (
            getattr(text.embed_tokens, "scalar_embed_scale", getattr(text, "embedding_multiplier", 1.0)),
            getattr(layers[0], "residual_multiplier", 1.0),
            attentions[0].scaling,
            read.logits_scaling if "granite" in family.model_type else 1.0,
        ),
        "caps": (
            (attentions[0].attn_logit_softcapping or 0.0) if family.model_type == "gemma2" else 0.0,
            (read.final_logit_softcapping or 0.0) if "gemma" in family.model_type and not reads_images else 0.0,
        ),
        "growth": tuple(read.rope_parameters[name] for name in GROWTH) if family.grows else (),
        "eps": {
            getattr(module, "variance_epsilon", getattr(module, "eps", None))
            for module in text.modules()
            if type(module).__name__.endswith("Norm")
        },
        "activation": activation_of(layers[0])(POINTS).tolist(),
        "positions": read.max_position_embeddings,
    }


def windowed(attention: Any) -> int | None:
    """Read the window of a layer, which some families have for all layers."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    everywhere = ("mistral", "ministral3", "phi3", "starcoder2")
    return attention.config.sliding_window if attention.config.model_type in everywhere else None


def activation_of(layer: Any) -> Any:
    mlp = getattr(layer, "shared_mlp", None) or layer.mlp
    return next(getattr(mlp, name) for name in ("act_fn", "activation_fn", "activation", "act") if hasattr(mlp, name))


def tensors_of(model: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, tensor in model.state_dict().items():
        part = next((part for part in TEXT_PARTS if name.startswith(part)), "")
        if not name.startswith(IMAGE_PARTS) and not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            yield name.replace(part, "model.") if part else name, tuple(tensor.shape)


def theirs_rotation(text: Any, kind: str | None) -> Any:
    """Compute what a layer of this kind is rotated by, in a module of its own, off the meta device."""
    if text.rotary_emb is None:
        return None
    module, config = type(text.rotary_emb)(text.config), text.config
    prefix = f"{kind}_" if hasattr(module, f"{kind}_inv_freq") else ""
    short, factor = getattr(module, f"{prefix}inv_freq"), getattr(module, f"{prefix}attention_scaling")
    if (config.rope_parameters[kind] if prefix else config.rope_parameters)["rope_type"] != "longrope":
        return short.tolist(), short.tolist(), 0, factor
    border = config.rope_parameters["original_max_position_embeddings"]
    long, _ = ROPE_INIT_FUNCTIONS["longrope"](config, None, seq_len=border + 1)
    return short.tolist(), long.tolist(), border, factor


def same(one: Any, other: Any) -> bool:
    """Compare to what fp32 rounds, numbers in whatever they are in."""
    if isinstance(one, float | int) and isinstance(other, float | int):
        return bool(np.isclose(float(one), float(other), rtol=2e-5, atol=0))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other

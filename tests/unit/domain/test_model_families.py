"""config.json of every family: what is read from it, and what is refused by name."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.model_configs import FIELDS, QWEN, SIZES
from weft.domain.model.config import FAMILIES, ModelSpec, RopeSpec, parse_spec
from weft.domain.model.errors import Refused

ALL = tuple(family.architecture for family in FAMILIES)
MODEL_TYPES = {family.architecture: family.model_type for family in FAMILIES}


def spec_of(architecture: str, **change: Any) -> ModelSpec:
    return parse_spec({"architectures": [architecture], **SIZES, **change})


def test_each_family_has_its_own_biases_norms_and_windows():
    read = {name: spec_of(name) for name in ALL}
    assert [name for name, spec in read.items() if spec.qkv_bias] == ["Qwen2ForCausalLM"]
    assert [name for name, spec in read.items() if spec.qk_norm] == ["Qwen3ForCausalLM"]
    assert {spec.windows for name, spec in read.items() if name != "MistralForCausalLM"} == {(0,) * 4}
    assert read["MistralForCausalLM"].windows == (4096,) * 4


def test_what_a_config_leaves_out_is_what_its_family_means_by_that():
    """Absent is not null: transformers' configuration classes have defaults of their own."""
    assert [spec_of(name).kv_heads for name in ALL] == [32, 8, 32, 32, 32, 4]
    assert {spec_of(name, num_key_value_heads=None).kv_heads for name in ALL} == {32}
    assert [spec_of(name).head_dim for name in ALL] == [4, 4, 4, 128, 4, 4]
    assert spec_of("MistralForCausalLM", sliding_window=None).windows == (0,) * 4
    assert [name for name in ALL if spec_of(name).tied_embeddings] == ["SmolLM3ForCausalLM"]
    assert spec_of("SmolLM3ForCausalLM").rope.theta == 2e6


def test_granite_has_factors_and_smollm3_layers_without_rotation() -> None:
    granite = spec_of(
        "GraniteForCausalLM", embedding_multiplier=12, residual_multiplier=0.22, attention_multiplier=0.015625,
        logits_scaling=8.0,
    )  # fmt: skip
    assert (granite.embedding_scale, granite.residual_scale, granite.logit_divisor) == (12.0, 0.22, 8.0)
    assert (granite.query_scale, spec_of("GraniteForCausalLM").query_scale) == (0.015625, 1.0)
    assert spec_of("SmolLM3ForCausalLM").query_scale == 0.5
    assert spec_of("SmolLM3ForCausalLM").nope_layers == (3,)
    assert spec_of("SmolLM3ForCausalLM", no_rope_layer_interval=2).nope_layers == (1, 3)
    assert spec_of("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 0]).nope_layers == (0, 3)
    assert spec_of("LlamaForCausalLM", no_rope_layers=[0, 1, 1, 0], embedding_multiplier=3).nope_layers == ()


@pytest.mark.parametrize(
    ("architecture", "change", "named"),
    [
        ("GraniteForCausalLM", {"residual_multiplier": 0}, "residual_multiplier"),
        ("GraniteForCausalLM", {"attention_multiplier": "1"}, "attention_multiplier"),
        ("GraniteForCausalLM", {"logits_scaling": 1e30}, "logits_scaling"),
        ("GraniteForCausalLM", {"embedding_multiplier": 1e-30}, "embedding_multiplier"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1, 2]}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1, True]}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 9}, "use_sliding_window"),
        ("SmolLM3ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
    ],
)
def test_factors_and_layers_that_would_be_computed_otherwise_are_refused(
    architecture: str, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(Refused, match=named):
        spec_of(architecture, **change)


@pytest.mark.parametrize("architecture", ALL)
def test_a_model_type_stands_in_for_the_architecture(architecture):
    config = {"model_type": MODEL_TYPES[architecture], **SIZES}
    assert parse_spec(config) == spec_of(architecture)
    with pytest.raises(Refused, match="architectures"):
        parse_spec(config | {"architectures": ["OlmoForCausalLM"]})


@pytest.mark.parametrize("architecture", QWEN)
@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"sliding_window": 7}, (0, 0, 0, 0)),
        ({"use_sliding_window": True, "sliding_window": 7}, (0, 0, 0, 0)),
        ({"use_sliding_window": True, "sliding_window": 7, "num_hidden_layers": 30}, (0,) * 28 + (7, 7)),
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, (0, 7, 7, 7)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}, (0, 0, 0, 0)),
        ({"use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 4096)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 7,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (0, 7, 0, 7),
        ),
        ({"layer_types": ["full_attention"] * 4}, (0, 0, 0, 0)),
    ],
)
def test_qwen_says_which_layers_have_a_window(architecture, change, windows):
    assert spec_of(architecture, **change).windows == windows


def test_layer_types_that_say_what_holds_anyway_are_no_contradiction():
    assert spec_of("LlamaForCausalLM", layer_types=["full_attention"] * 4).windows == (0,) * 4
    assert spec_of("MistralForCausalLM", sliding_window=5, layer_types=["sliding_attention"] * 4).windows == (5,) * 4


ROPE: list[tuple[dict[str, Any], str]] = [
    *(({"rope_type": kind, "factor": 4.0}, kind) for kind in ("dynamic", "yarn", "longrope", "proportional", "mrope")),
    ({"type": "su", "factor": 4.0}, "su"),
    ({"rope_type": "linear"}, "factor"),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "low_freq_factor"),
    ({"rope_type": "linear", "factor": -1}, "above 0"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}, "layer"),
    ({"rope_theta": float("inf")}, "above 0"),
]


@pytest.mark.parametrize("architecture", ALL)
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(("rope", "word"), ROPE)
def test_a_rope_that_is_not_computed_is_refused_in_every_family(architecture, field, rope, word):
    with pytest.raises(Refused, match=word):
        spec_of(architecture, **{field: rope})


def test_the_length_before_scaling_may_stand_beside_the_scaling():
    rope = {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 2.0, "original_max_position_embeddings": 64}
    assert spec_of("LlamaForCausalLM", rope_scaling=rope).rope.original_max_positions == 64
    beside = spec_of("LlamaForCausalLM", rope_scaling=rope, original_max_position_embeddings=32)
    assert beside.rope == RopeSpec(10_000.0, "llama3", 8.0, 1.0, 2.0, 32)
    assert spec_of("LlamaForCausalLM").rope == RopeSpec(
        10_000.0, "default", 1.0, 1.0, 4.0, SIZES["max_position_embeddings"]
    )


@pytest.mark.parametrize(("field", "value", "read"), [("dtype", "bfloat16", "bfloat16"), ("torch_dtype", "auto", "")])
def test_the_stored_dtype_is_a_hint(field, value, read):
    assert spec_of("LlamaForCausalLM", **{field: value}).dtype == read


STRANGE = (None, True, False, 0, -1, 3, 8, 2.5, "x", [], {}, [1], ["full_attention"] * 4, {"factor": 2.0}, 10**400)


def strange_configs() -> Iterator[st.SearchStrategy[dict[str, Any]]]:
    fields = [
        *SIZES,
        *FIELDS,
        "head_dim",
        "attention_bias",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "eos_token_id",
    ]
    for field in fields:
        yield st.fixed_dictionaries({}, optional={field: st.sampled_from((*STRANGE, *FIELDS.get(field, ())))})


@settings(max_examples=6 * settings.default.max_examples)
@given(st.sampled_from(ALL), st.lists(st.one_of(*strange_configs()), max_size=4))
def test_a_configuration_is_read_or_refused_by_name_whatever_its_fields_hold(architecture, changes):
    config: dict[str, Any] = {"architectures": [architecture], **SIZES, "head_dim": 4}
    for change in changes:
        config |= change
    try:
        spec = parse_spec(config)
    except Refused:
        return
    assert len(spec.windows) == spec.layers
    assert spec.heads % spec.kv_heads == 0

"""config.json of every family: what is read from it, and what is refused by name."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.model_configs import FULL, KINDS, SLIDING, config_of, mutated_config
from weft.domain.model.config import parse_spec
from weft.domain.model.errors import Refused
from weft.domain.model.families import FAMILIES, NEEDED, PROJECTIONS, Family, Windows
from weft.domain.model.spec import ModelSpec, RopeSpec

FAMILY = {family.model_type: family for family in FAMILIES}
each_family = pytest.mark.parametrize("family", FAMILIES, ids=FAMILY)


def spec_of(family: Family | str, **change: Any) -> ModelSpec:
    """Read a small configuration; `change`: fields of it, "absent" to leave one out."""
    config = config_of(FAMILY[family] if isinstance(family, str) else family, **change)
    return parse_spec({name: value for name, value in config.items() if value != "absent"})


def test_a_family_without_factors_scales_nothing():
    spec = spec_of("llama")
    factors = (spec.embedding_scale, spec.residual_scale, spec.attention_scale, spec.logit_divisor)
    assert factors == (1.0, 1.0, None, 1.0)
    assert (spec.score_cap, spec.logit_cap) == (0.0, 0.0)


@each_family
def test_every_name_of_a_family_is_read_as_it(family):
    spec = spec_of(family)
    assert (spec.family, spec.architecture, spec.layers) == (family, family.architecture, 4)
    bare = spec_of(family, architectures=[family.architectures[-1]])
    assert (bare.family, bare.tied_embeddings, bare.by_layer) == (family, True, spec.by_layer)
    assert set(family.projections) == {name for held in family.modules.values() for name in held} <= set(PROJECTIONS)
    assert spec.mlp_size == (2 if "gate_proj" in family.projections else 1) * spec.intermediate_size


@each_family
def test_a_model_type_stands_in_for_the_architecture_and_may_not_be_anothers(family):
    assert spec_of(family, architectures="absent") == spec_of(family) == spec_of(family, model_type="absent")
    other = next(one.model_type for one in FAMILIES if one is not family)
    with pytest.raises(Refused, match=f"model_type '{other}', not {family.model_type}"):
        spec_of(family, model_type=other)
    with pytest.raises(Refused, match="architectures"):
        spec_of(family, architectures=["OlmoForCausalLM"])


@each_family
def test_a_flag_gives_biases_to_its_projections(family):
    always = [name for name in PROJECTIONS if name in family.biases]
    for field, names in family.bias_flags.items():
        others = dict.fromkeys(family.bias_flags, False)
        assert list(spec_of(family, **others).biases) == always
        assert set(spec_of(family, **others | {field: True}).biases) == {*always, *names}
    for field in {"attention_bias", "mlp_bias"} - family.bias_flags.keys():
        with pytest.raises(Refused, match=field):
            spec_of(family, **{field: True})


@each_family
def test_what_a_config_leaves_out_is_what_its_family_means_by_that(family):
    """Absent is not null: transformers' configuration classes have defaults of their own; few fields may be null."""
    spec, defaults = spec_of(family), family.defaults
    assert spec.kv_heads == defaults.get("num_key_value_heads", 32)
    assert spec.head_dim == defaults.get("head_dim", 4)
    assert spec.tied_embeddings == defaults.get("tie_word_embeddings", False)
    for field, follows in (("num_key_value_heads", 32), ("head_dim", 4)):
        if field in family.nulls:
            read = spec_of(family, **{field: None})
            assert follows == (read.kv_heads if field == "num_key_value_heads" else read.head_dim)
        else:
            with pytest.raises(Refused, match=field):
                spec_of(family, **{field: None})
    assert spec_of(family, sliding_window=None, layer_types=[FULL] * 4).windows == (0,) * 4


@each_family
def test_windows_are_of_the_layers_that_the_family_gives_them_to(family):
    layers = {"num_hidden_layers": 12, **({"layer_types": [FULL] * 12} if family.recurrent else {})}
    match family.windows:
        case Windows.NONE:
            windows = (0,) * 12
        case Windows.ALL:
            windows = (7,) * 12
        case Windows.BY_LAYER:
            layers |= {"use_sliding_window": True, "max_window_layers": 5}
            windows = (0,) * 5 + (7,) * 7
        case Windows.INTERVAL:
            windows = tuple(0 if number % family.full_interval[0] == 0 else 7 for number in range(1, 13))
    given = {} if family.windows is Windows.NONE else {"sliding_window": 7}
    spec = spec_of(family, **layers, **given)
    assert spec.windows == windows
    if not family.nope_interval and not family.rotates_where[0]:
        own = len(spec.ropes) - 1
        assert [layer.rope for layer in spec.by_layer] == [own if window else 0 for window in windows]


QWEN = [family for family in FAMILIES if family.windows is Windows.BY_LAYER]
USED = {"use_sliding_window": True, "sliding_window": 7}


@pytest.mark.parametrize("family", QWEN, ids=lambda family: family.model_type)
@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"sliding_window": 7}, (0, 0, 0, 0)),
        (USED, (0, 0, 0, 0)),
        (USED | {"num_hidden_layers": 30}, (0,) * 28 + (7, 7)),
        (USED | {"max_window_layers": 1}, (0, 7, 7, 7)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}, (0, 0, 0, 0)),
        ({"use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 4096)),
        (USED | {"max_window_layers": 0, "layer_types": KINDS}, (0, 7, 0, 7)),
        ({"layer_types": [FULL] * 4}, (0, 0, 0, 0)),
    ],
)
def test_qwen_says_which_layers_have_a_window(family, change, windows):
    assert spec_of(family, **change).windows == windows


def test_layer_types_that_say_what_holds_anyway_are_no_contradiction():
    assert spec_of("llama", layer_types=[FULL] * 4, sliding_window=5).windows == (0,) * 4
    assert spec_of("mistral", sliding_window=5, layer_types=[SLIDING] * 4).windows == (5,) * 4
    assert spec_of("gemma3_text", sliding_window_pattern=2).windows == (4096, 0) * 2
    assert spec_of("granitemoehybrid", layer_types=["attention"] * 4).windows == (0,) * 4


def test_factors_and_caps_are_of_the_families_that_have_them():
    for model_type in ("granite", "granitemoehybrid"):
        multipliers = {"embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.015625}
        read = spec_of(model_type, **multipliers, logits_scaling=8.0)
        assert (read.embedding_scale, read.residual_scale, read.logit_divisor) == (12.0, 0.22, 8.0)
        assert (read.query_scale, spec_of(model_type).query_scale) == (0.015625, 1.0)
    for model_type, caps in (("gemma2", (50.0, 30.0)), ("gemma3_text", (0.0, 0.0))):
        read = spec_of(model_type, query_pre_attn_scalar=144)
        assert (read.embedding_scale, read.query_scale) == (128**0.5, 1 / 12)
        assert (read.score_cap, read.logit_cap) == caps
    assert spec_of("gemma3_text", final_logit_softcapping=7.0, attn_logit_softcapping=5.0).score_cap == 0
    assert spec_of("gemma2", final_logit_softcapping=None).logit_cap == 0
    assert spec_of("llama", embedding_multiplier=3, final_logit_softcapping=7.0).embedding_scale == 1


def test_some_layers_rotate_nothing():
    def still(model_type: str, **change: Any) -> list[int]:
        by_layer = spec_of(model_type, **change).by_layer
        return [number for number, layer in enumerate(by_layer) if layer.rope is None]

    assert still("smollm3") == [3]
    assert still("smollm3", no_rope_layer_interval=2) == [1, 3]
    assert still("smollm3", no_rope_layers=[0, 1, 1, 0]) == [0, 3]
    assert still("llama", no_rope_layers=[0, 1, 1, 0]) == []
    assert still("granitemoehybrid") == still("granitemoehybrid", position_embedding_type="nope") == [0, 1, 2, 3]
    assert still("granitemoehybrid", position_embedding_type="rope") == []


@pytest.mark.parametrize(
    ("model_type", "change", "named"),
    [
        ("granite", {"residual_multiplier": 0}, "residual_multiplier"),
        ("granite", {"attention_multiplier": "1"}, "attention_multiplier"),
        ("granite", {"logits_scaling": 1e30}, "logits_scaling"),
        ("granite", {"embedding_multiplier": 1e-30}, "embedding_multiplier"),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 2]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": [1, 0, 1, True]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 9}, "use_sliding_window"),
        ("smollm3", {"layer_types": [SLIDING] * 4}, SLIDING),
        ("granitemoehybrid", {"num_local_experts": 8}, "mixtures of experts"),
        ("granitemoehybrid", {"num_local_experts": "absent"}, "mixtures of experts"),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 2}, "recurrent"),
        ("granitemoehybrid", {"layer_types": "absent"}, "recurrent"),
        ("granitemoehybrid", {"layers_block_type": ["mamba"] * 4}, "recurrent"),
        ("granitemoehybrid", {"position_embedding_type": 1}, "position_embedding_type"),
        ("gemma2", {"query_pre_attn_scalar": 144.0}, "query_pre_attn_scalar"),
        ("gemma2", {"final_logit_softcapping": 30}, "write 30.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "causal"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma3_text", {"sliding_window_pattern": None}, "sliding_window_pattern"),
        ("gemma3_text", {"head_dim": 4, "num_attention_heads": 24}, "evenly"),
        ("gemma3_text", {"layer_types": ["attention"] * 4}, "layer_types"),
        ("gemma3_text", {"attn_logit_softcapping": 50}, "attn_logit_softcapping"),
        ("granitemoehybrid", {"intermediate_size": None}, "intermediate_size"),
        ("llama", {"sliding_window": 9}, "no layers with windows"),
        ("llama", {"per_layer_config": {"0": {"num_key_value_heads": 4}}}, "layers of different sizes"),
        ("llama", {"attention_chunk_size": 8}, "attention_chunk_size"),
    ],
)
def test_factors_and_layers_that_would_be_computed_otherwise_are_refused(model_type, change, named):
    with pytest.raises(Refused, match=named):
        spec_of(model_type, **change)


@pytest.mark.parametrize(
    ("architecture", "needed"),
    [
        *((name, "mixtures") for name in ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM")),
        ("GptOssForCausalLM", "mixtures"), ("JambaForCausalLM", "recurrent"), ("Qwen3NextForCausalLM", "recurrent"),
        ("Gemma4ForConditionalGeneration", "two sizes"), ("Gemma3nForConditionalGeneration", "each layer"),
        ("Phi3SmallForCausalLM", "blocksparse"), ("BertModel", "encoders"), ("T5ForConditionalGeneration", "encoder"),
    ],
)  # fmt: skip
def test_an_architecture_that_is_not_served_is_refused_with_what_it_would_need(architecture, needed):
    with pytest.raises(Refused, match=f"{architecture}.*needs .*{needed}.*served are: Llama"):
        spec_of("llama", architectures=[architecture])


@each_family
def test_no_family_that_is_served_has_a_part_of_a_name_of_one_that_is_not(family):
    assert not [part for part in NEEDED if part in family.model_type and family.model_type != "granitemoehybrid"]


# ---- ropes

ROPE: list[tuple[dict[str, Any], str]] = [
    *(({"rope_type": kind, "factor": 4.0}, kind) for kind in ("dynamic", "proportional", "mrope")),
    ({"rope_type": "longrope", "factor": 4.0}, "short_factor|longrope"),
    ({"type": "su", "factor": 4.0}, "short_factor|su"),
    ({"rope_type": "linear"}, "factor|linear"),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "low_freq_factor|llama3"),
    ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor|llama3"),
    ({"rope_type": "yarn", "factor": None}, "factor"),
    ({"rope_type": "linear", "factor": -1}, "above 0|linear"),
    ({"rope_type": "default", "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ({"rope_type": "default", "partial_rotary_factor": None}, "partial_rotary_factor"),
    ({"rope_theta": float("inf")}, "above 0"),
    ({"rope_theta": None}, "above 0"),
    ({FULL: {"rope_type": "default"}}, "layer"),
    ({FULL: None}, "layer"),
    ({"rope_type": "yarn", "factor": 4.0, "truncate": 1}, "truncate|short_factor"),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64.5}, "integer|short_factor"),
]
ONE_ROPE = [family for family in FAMILIES if family.sliding_theta is None]


@pytest.mark.parametrize("family", ONE_ROPE, ids=lambda family: family.model_type)
def test_a_rope_that_is_not_computed_is_refused_in_every_family(family):
    for rope, word in ROPE:
        for field in ("rope_parameters", "rope_scaling"):
            with pytest.raises(Refused, match=word):
                spec_of(family, **{field: rope})


@pytest.mark.parametrize("family", [one for one in FAMILIES if one.sliding_theta], ids=lambda one: one.model_type)
@pytest.mark.parametrize(
    ("change", "word"),
    [
        *(({"rope_parameters": {FULL: rope}}, word) for rope, word in ROPE),
        *(({"rope_parameters": {SLIDING: rope}}, word) for rope, word in ROPE),
        ({"rope_parameters": {"rope_type": "default"}}, "for all layers"),
        ({"rope_parameters": {}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "does not have"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn", "factor": 2.0, "truncate": False}}}, "does not read"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_each_kind_of_layer_has_a_rope_that_is_computed(family, change, word):
    with pytest.raises(Refused, match=word):
        spec_of(family, **change)


def test_layers_with_windows_have_a_rotation_of_their_own():
    linear = {"rope_type": "linear", "factor": 8.0}
    full, own = spec_of("gemma3_text", rope_scaling=linear, rope_local_base_freq=77.0).ropes
    assert (full.theta, full.kind, full.factor, own.theta, own.kind) == (1e6, "linear", 8.0, 77.0, "default")
    full, own = spec_of("olmo3", rope_theta=7e3).ropes
    assert (full.theta, own.theta) == (7e3, 5e5), "transformers takes it for the first one alone"
    full, own = spec_of("olmo3", rope_parameters={FULL: linear, SLIDING: {"rope_theta": 9.0}}).ropes
    assert (full.theta, full.kind, own.theta) == (5e5, "linear", 9.0)
    assert spec_of("gemma3_text", rope_scaling={"type": "linear", "factor": 8.0}).ropes[0].kind == "default", (
        "what transformers has by itself says rope_type"
    )


def test_the_length_before_scaling_may_stand_beside_the_scaling():
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
    inside = {"original_max_position_embeddings": 64}
    assert spec_of("llama", rope_scaling=rope | inside).ropes[0].original_max_positions == 64
    beside = spec_of("llama", rope_scaling=rope | inside, original_max_position_embeddings=32)
    assert beside.ropes == (RopeSpec(10_000.0, "llama3", 8.0, 1.0, 2.0, 32),)
    assert spec_of("llama").ropes == (RopeSpec(10_000.0, original_max_positions=256),)


LONG = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 4.5]}


@pytest.mark.parametrize(
    ("rope", "factor", "border"),
    [
        ({"type": "longrope"}, 1.0, 4096),
        ({"type": "longrope", "original_max_position_embeddings": 64}, 1.0, 4096),
        ({"type": "yarn", "attention_factor": 1.19}, 1.19, 4096),
        ({"type": "su", "original_max_position_embeddings": 64, "factor": 4096.0}, 2**0.5, 4096),
    ],
)
def test_longrope_by_its_names(rope, factor, border):
    (read,) = spec_of("phi3", rope_scaling=rope | LONG).ropes
    assert (read.kind, read.short, read.long) == ("longrope", (1.0, 1.5), (2.0, 4.5))
    assert (read.attention_factor, read.original_max_positions) == (pytest.approx(factor), border)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_part_of_each_head_is_rotated(share):
    (read,) = spec_of("phi3", partial_rotary_factor=share).ropes
    assert read.rotated_size(4) == 4 * share
    with pytest.raises(Refused, match="do not pair"):
        spec_of("phi3", partial_rotary_factor=0.75)


@pytest.mark.parametrize(("field", "value", "read"), [("dtype", "bfloat16", "bfloat16"), ("torch_dtype", "auto", "")])
def test_the_stored_dtype_is_a_hint(field, value, read):
    assert spec_of("llama", **{field: value}).dtype == read


# ---- a model that reads images


def test_a_model_that_reads_images_is_read_as_its_text_part():
    text = {name: value for name, value in config_of(FAMILY["gemma3_text"]).items() if name != "architectures"}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    read = parse_spec(whole)
    assert (read.family, read.by_layer, read.ropes) == (
        FAMILY["gemma3_text"], spec_of("gemma3_text").by_layer, spec_of("gemma3_text").ropes
    )  # fmt: skip
    sparse = parse_spec(whole | {"text_config": {"hidden_size": 2560, "num_hidden_layers": 7, "model_type": "x"}})
    assert (sparse.heads, sparse.kv_heads, sparse.head_dim, sparse.vocab_size) == (8, 4, 256, 262_208)
    assert sparse.windows == (4096,) * 5 + (0, 4096)
    assert not parse_spec(whole | {"tie_word_embeddings": False}).tied_embeddings
    for change, named in (
        ({"text_config": None}, "text_config"),
        ({"model_type": "gemma3_text"}, "not gemma3"),
        ({"text_config": text | {"tie_word_embeddings": False}}, "tie_word_embeddings"),
        ({"text_config": text | {"is_causal": False}}, "causal"),
        ({"quantization_config": {}}, "quantization_config"),
    ):
        with pytest.raises(Refused, match=named):
            parse_spec(whole | change)


@settings(max_examples=6 * settings.default.max_examples)
@given(st.sampled_from(FAMILIES), st.integers(0, 1 << 30))
def test_a_configuration_is_read_or_refused_by_name_whatever_its_fields_hold(family, seed):
    try:
        spec = parse_spec(mutated_config(family, random.Random(seed), strange=0.5))
    except Refused:
        return
    assert len(spec.windows) == spec.layers
    assert spec.heads % spec.kv_heads == 0
    assert all(layer.rope is None or layer.rope < len(spec.ropes) for layer in spec.by_layer)

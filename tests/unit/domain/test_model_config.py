"""config.json of a base: sizes that add up, options that are served."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.artifacts.making import MODEL_CONFIG, shape
from weft.artifacts.errors import Reason, Refused
from weft.domain.model.config import MAX_EOS, parse_model_config
from weft.domain.model.spec import ModelSpec, RopeSpec, is_bare
from weft.domain.model.tensors import linear_modules, model_tensors, some_of


def parse(**change: Any) -> ModelSpec:
    config = {name: value for name, value in {**MODEL_CONFIG, **change}.items() if value != "absent"}
    return parse_model_config(json.dumps(config).encode())


def refusal(**change: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        parse(**change)
    return caught.value


def test_a_llama_config_gives_every_linear_layer_its_features() -> None:
    model = shape()
    assert model.head_dim == 4
    assert model.projection("q_proj") == (16, 16)
    assert model.projection("k_proj") == model.projection("v_proj") == (16, 8)
    assert model.projection("o_proj") == (16, 16)
    assert model.projection("gate_proj") == model.projection("up_proj") == (16, 24)
    assert model.projection("down_proj") == (24, 16)
    assert len(list(linear_modules(model))) == 2 * 7
    names = dict(model_tensors(model))
    assert names["model.layers.1.mlp.down_proj.weight"] == (16, 24)
    assert len(names) == 1 + 2 * 9 + 2


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_the_rotary_forms_of_both_generations_are_read(kind: str) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 8}
    old = parse(rope_scaling={"type": kind, **scaling})
    new = {"rope_type": kind, "rope_theta": 10000.0, **scaling}
    assert old == parse(rope_parameters=new, rope_theta="absent")
    assert old.ropes == (RopeSpec(10000.0, kind, 8.0, 2.0, 3.0, 8),)


def test_defaults_follow_the_family() -> None:
    assert parse(num_key_value_heads="absent").kv_heads == 4
    assert parse(num_key_value_heads=None).kv_heads == 4
    assert parse(rope_theta="absent").ropes == (RopeSpec(10000.0, original_max_positions=parse().max_positions),)
    assert parse(head_dim=8).projection("q_proj") == (16, 32)
    assert parse(head_dim=8).projection("o_proj") == (32, 16)
    assert parse(architectures="absent").architecture == "LlamaForCausalLM"
    assert "lm_head.weight" not in dict(model_tensors(parse(tie_word_embeddings=True)))


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
KINDS = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize("family", [MISTRAL, QWEN2, QWEN3], ids=lambda family: family["model_type"])
def test_each_family_has_its_own_tensors(family: dict[str, Any]) -> None:
    plain = dict(model_tensors(shape()))
    names = dict(model_tensors(parse(**family, num_key_value_heads=2, head_dim=4)))
    block = "model.layers.1.self_attn"
    added = {
        "mistral": {},
        "qwen2": {f"{block}.{name}_proj.bias": (size,) for name, size in (("q", 16), ("k", 8), ("v", 8))},
        "qwen3": {f"{block}.{name}_norm.weight": (4,) for name in "qk"},
    }[family["model_type"]]
    assert names == plain | {
        name.replace("layers.1", f"layers.{layer}"): size for name, size in added.items() for layer in (0, 1)
    }


def test_a_model_without_a_head_is_of_its_family() -> None:
    whole, bare = parse(**QWEN3), parse(**{**QWEN3, "architectures": ["Qwen3Model"]})
    assert bare == replace(whole, architecture="Qwen3Model", tied_embeddings=True)
    assert (is_bare(bare.architecture), is_bare(whole.architecture)) == (True, False)


@pytest.mark.parametrize(
    "change",
    [
        {**MISTRAL, "sliding_window": None},
        {**MISTRAL, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
        {**QWEN2, "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 21},
        {**QWEN2, "use_sliding_window": True, "sliding_window": 8, "layer_types": KINDS},
        {**QWEN3, "layer_types": ["full_attention"] * 2},
    ],
)
def test_windows_that_are_served(change: dict[str, Any]) -> None:
    assert parse(**change).layers == 2


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({**MISTRAL, "sliding_window": 8, "layer_types": KINDS}, "layer_types"),
        ({"layer_types": KINDS}, "layer_types"),
        ({**QWEN2, "layer_types": KINDS}, "layer_types"),
        ({**QWEN2, "layer_types": ["sliding_attention"] * 2}, "no sliding_window"),
        ({**QWEN2, "layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({**QWEN3, "mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"model_type": "mistral"}, "model_type"),
        ({"architectures": []}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({**QWEN2, "attention_bias": True}, "attention_bias"),
        ({**MISTRAL, "mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"is_causal": False}, "causal"),
        ({"is_causal": 0}, "causal"),
        ({"use_bidirectional_attention": True}, "causal"),
        ({"auto_map": {"AutoModel": "evil.Model"}, "model_type": None}, "auto_map"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_served_or_not_of_the_family_is_refused_by_name(change: dict[str, Any], word: str) -> None:
    error = refusal(**change)
    assert error.reason == Reason.UNSUPPORTED_MODEL
    assert word in error.message


@pytest.mark.parametrize(
    "change",
    [
        {**MISTRAL, "sliding_window": 0},
        {**MISTRAL, "sliding_window": "x"},
        {**QWEN2, "use_sliding_window": 1},
        {**QWEN2, "use_sliding_window": True, "sliding_window": "x"},
        {**QWEN2, "max_window_layers": -1},
        {**QWEN2, "layer_types": "full_attention"},
        {**QWEN2, "layer_types": ["full_attention"]},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": None, "high_freq_factor": 1}},
        {"original_max_position_embeddings": "x"},
    ],
)
def test_windows_and_ropes_that_make_no_sense_are_invalid(change: dict[str, Any]) -> None:
    assert refusal(**change).reason == Reason.CONFIG_INVALID


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 0), ("hidden_size", "16"), ("hidden_size", True), ("hidden_size", "absent"),
        ("num_hidden_layers", -1), ("vocab_size", 1.5), ("num_key_value_heads", 3), ("hidden_size", 18),
        ("rope_scaling", 3), ("rope_scaling", {"rope_type": "llama3", "factor": 0}),
        ("rope_parameters", {"rope_theta": "x"}), ("rms_norm_eps", 0), ("rope_theta", "x"),
        ("tie_word_embeddings", 1), ("head_dim", 3), ("max_position_embeddings", None), ("eos_token_id", "</s>"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_add_up_are_invalid(field: str, value: object) -> None:
    assert refusal(**{field: value}).reason == Reason.CONFIG_INVALID


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("hidden_size", 1 << 17), ("num_attention_heads", 1 << 12), ("num_key_value_heads", 1 << 12),
        ("head_dim", 1 << 12), ("num_hidden_layers", 1 << 10), ("max_position_embeddings", 1 << 24),
        ("vocab_size", 1 << 22), ("intermediate_size", 1 << 19), ("sliding_window", 1 << 30),
    ],
)  # fmt: skip
def test_sizes_have_bounds(field: str, most: int) -> None:
    family = MISTRAL if field == "sliding_window" else {}
    assert f"not an integer from 1 to {most}" in refusal(**family, **{field: most + 1}).message


def test_an_error_names_four_and_counts_the_others() -> None:
    assert [some_of("abcd"), some_of("edcba")] == ["a, b, c, d", "a, b, c, d and 1 more"]


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"a":1,"a":1}'])
def test_what_is_no_json_object_is_invalid(raw: bytes) -> None:
    with pytest.raises(Refused) as caught:
        parse_model_config(raw)
    assert caught.value.reason == Reason.CONFIG_INVALID


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": [7, 8]}, {2, 7, 8}),
        ({"eos_token_id": 2}, {"eos_token_id": None}, {2}),
        ({"eos_token_id": [3, -1], "text_config": {"eos_token_id": 4}}, {"eos_token_id": 1 << 40}, {3, 4}),
        ({"text_config": "none"}, {}, set()),
    ],
)
def test_an_answer_ends_with_any_token_that_a_configuration_names(config: Any, generation: Any, ends: set[int]) -> None:
    raw = json.dumps({**MODEL_CONFIG, **config}).encode()
    assert parse_model_config(raw, json.dumps(generation).encode()).eos == ends


def test_the_generation_config_is_read_with_the_same_care() -> None:
    raw = json.dumps({**MODEL_CONFIG, "vocab_size": 100}).encode()
    for wrong in (b"[]", b'{"eos_token_id": "</s>"}', json.dumps({"eos_token_id": list(range(MAX_EOS + 1))}).encode()):
        with pytest.raises(Refused) as caught:
            parse_model_config(raw, wrong)
        assert caught.value.reason == Reason.CONFIG_INVALID

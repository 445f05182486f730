"""PEFT configs: what is served is understood exactly, everything else is refused by name."""

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.artifacts.making import ADAPTER_CONFIG, refused, shape
from weft.artifacts.adapter_config import AdapterConfig, parse_adapter_config
from weft.artifacts.errors import Reason, Refused
from weft.domain.model.tensors import linear_modules

Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
V0, DOWN1 = "model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"


def parse(**change: Any) -> AdapterConfig:
    return parse_adapter_config(json.dumps({**ADAPTER_CONFIG, **change}).encode())


def refusal(**change: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        parse(**change)
    return caught.value


def selected(spec: AdapterConfig) -> set[str]:
    assert spec.selects is not None
    return {name for name, layer, _ in linear_modules(shape()) if spec.selects(name, layer)}


def test_a_plain_config_is_read() -> None:
    spec = parse()
    assert (spec.rank, spec.alpha, spec.rslora, spec.base_model) == (4, 8.0, False, "some/where/tiny")
    assert spec.target_names == ("q_proj", "v_proj")
    assert selected(spec) == {f"model.layers.{n}.self_attn.{p}_proj" for n in (0, 1) for p in "qv"}
    assert spec.scale_of(Q0, 4) == 2.0


ESC = "\x1b[2J\r\nfine"


@pytest.mark.parametrize(
    "change", [{"peft_type": ESC}, {"init_lora_weights": ESC}, {"alpha_pattern": {f"(?i){ESC}": 1}}, {"r": ESC}]
)
def test_what_a_stranger_wrote_is_quoted(change: dict[str, Any]) -> None:
    message = refusal(**change).message
    assert message.isprintable()
    assert repr(ESC)[1:-1] in message


def test_every_field_that_peft_writes_by_default_is_accepted() -> None:
    written = {
        "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
        "bias": "none", "corda_config": None, "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None,
        "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "kasa_config": None,
        "layer_replication": None, "layers_pattern": None, "layers_to_transform": None, "loftq_config": {},
        "lora_bias": False, "lora_dropout": 0.0, "lora_ga_config": None, "megatron_config": None,
        "megatron_core": "megatron.core", "modules_to_save": None, "monteclora_config": None, "peft_version": "0.21.2",
        "qalora_group_size": 16, "rank_pattern": {}, "revision": None, "target_parameters": None,
        "trainable_token_indices": None, "use_bdlora": None, "use_dora": False, "use_qalora": False,
        "use_rslora": False, "velora_config": None,
    }  # fmt: skip
    assert parse(**written) == parse()


def test_rslora_scales_by_the_root_of_the_rank() -> None:
    assert parse(use_rslora=True).scale_of(Q0, 4) == 8 / math.sqrt(4)


def test_patterns_change_rank_and_alpha_of_matching_endings_first_key_first() -> None:
    spec = parse(rank_pattern={Q0: 2, "q_proj": 16, r"layers\.\d+\.self_attn\.v_proj": 8}, alpha_pattern={"q_proj": 32})
    assert [spec.rank_of(name) for name in (Q0, Q1, V0, DOWN1)] == [2, 16, 8, 4]
    assert spec.scale_of(Q0, 2) == 32 / 2
    assert spec.scale_of(V0, 8) == 8 / 8
    assert parse(rank_pattern={"proj": 2}).rank_of(Q0) == 4, "an ending starts after a dot"
    assert parse(alpha_pattern={r"(?!.*layers\.1\.).*q_proj": 32}).scale_of(Q0, 4) == 32 / 4


def test_targets_are_whole_names_or_endings_after_a_dot() -> None:
    assert selected(parse(target_modules=[Q1, "0.self_attn.v_proj"])) == {Q1, V0}
    assert selected(parse(target_modules=["proj"])) == set()


def test_targets_can_be_a_regular_expression_for_the_whole_name() -> None:
    assert selected(parse(target_modules=r".*\.(q|down)_proj", exclude_modules=[Q0])) == {
        Q1,
        DOWN1,
        "model.layers.0.mlp.down_proj",
    }
    assert selected(parse(target_modules=r".*0.*q_proj", exclude_modules=r".*self.*")) == set()


def test_layers_can_be_one_or_a_list() -> None:
    assert selected(parse(target_modules=["q_proj"], layers_to_transform=1)) == {Q1}
    assert selected(parse(target_modules=["q_proj"], layers_to_transform=[0, 1], layers_pattern="layers")) == {Q0, Q1}
    assert selected(parse(target_modules=[Q0, "v_proj"], layers_to_transform=5)) == {Q0}, "a whole name needs no layer"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("lora_bias", True),
        ("use_qalora", True),
        ("trainable_token_indices", [1]),
        ("layer_replication", [[0, 1]]),
        ("target_parameters", ["x"]),
        ("alora_invocation_tokens", [1]),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "olora"),
        ("arrow_config", {"a": 1}),
        ("kasa_config", {"beta": 0.1}),
        ("use_bdlora", {"nblocks": 2}),
        ("alpha_pattern", {r"(q)_proj\1": 1}),
    ],
)
def test_what_would_change_the_computation_is_refused_by_name(field: str, value: object) -> None:
    error = refusal(**{field: value})
    assert error.reason == Reason.UNSUPPORTED_ADAPTER
    assert field in error.message
    assert re.search("serve|train|save|write", error.message.partition(field)[2]), "what can be done"


WRONG: dict[str, list[object]] = {
    "r": [0, -1, 1.5, True, "8", None],
    "lora_alpha": [0, -1, 1 << 21, "x", True, None],
    "use_rslora": [1],
    "target_modules": [[1], {}, 5],
    "rank_pattern": [{"q": 0}, {"q": "1"}, [1], {str(n): 1 for n in range(1025)}],
    "alpha_pattern": [{"q": None}],
    "layers_to_transform": [-1, ["0"], {"a": 1}],
    "base_model_name_or_path": [5, "x" * 5000],
    "exclude_modules": [7],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_wrong_value_is_named(field: str, value: object) -> None:
    error = refusal(**{field: value})
    assert error.reason == Reason.CONFIG_INVALID
    assert field in error.message


@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": "(?i)a"},
        {"target_modules": None},
        {"exclude_modules": "(a"},
        {"target_modules": "(?:" + "[a-m0-9_]" * 200 + "){30}"},
        {"layers_to_transform": 1, "layers_pattern": "blocks"},
    ],
)
def test_a_selection_that_is_not_evaluated_leaves_the_question_open(change: dict[str, Any]) -> None:
    spec = parse(**change)
    assert spec.selects is None
    assert all(next(iter(change)) in remark for remark in spec.remarks)


def test_a_rank_is_open_from_the_first_key_that_is_not_evaluated() -> None:
    spec = parse(rank_pattern={"q_proj": 2, "(?i:v)_proj": 16, "down_proj": 3})
    assert [spec.rank_of(name) for name in (Q0, V0, DOWN1)] == [2, None, None]
    assert spec.largest_rank == 16


def test_a_rank_beyond_any_use_is_too_large() -> None:
    assert refusal(r=1 << 15).reason == Reason.RANK_TOO_LARGE


@pytest.mark.parametrize("raw", [b"", b"[]", b"\xff", b'{"r":1,"r":2}', b'{"r":NaN}', b"[" * 10**5, b" " * (1 << 19)])
def test_what_is_no_json_object_is_invalid(raw: bytes) -> None:
    with refused(Reason.CONFIG_INVALID):
        parse_adapter_config(raw)


def test_patterns_that_would_take_too_long_together_are_refused() -> None:
    keys = {f"(?:.*{n}.*){{90}}": 2 for n in range(40)}
    assert refusal(alpha_pattern=keys).reason == Reason.UNSUPPORTED_ADAPTER
    assert parse(rank_pattern=keys).rank_of(Q0) is None


VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from([*ADAPTER_CONFIG, "rank_pattern", "alpha_pattern", "exclude_modules", "x"]), VALUE)
)
def test_no_config_makes_the_parser_fail_in_another_way(change: dict[str, Any]) -> None:
    raw = json.dumps({**ADAPTER_CONFIG, **change}).encode()
    try:
        spec = parse_adapter_config(raw)
        for name, layer, _ in linear_modules(shape()):
            assert spec.selects is None or spec.selects(name, layer) in (True, False)
            assert math.isfinite(spec.scale_of(name, spec.rank_of(name) or 1))
    except Refused:
        return

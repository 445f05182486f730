"""An adapter against its base, a model against its config: what passes can be served as it is."""

import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.artifacts.making import ADAPTER_CONFIG, Tensors, lora, pack, refused, shape, weights
from weft.artifacts.adapter_config import AdapterConfig, parse_adapter_config
from weft.artifacts.errors import Reason, Refused
from weft.artifacts.verify import ModelVerdict, check_base_name, last_part, verdict_of, verify_model
from weft.domain.model.adapter import AdaptedModule, check_adapter
from weft.domain.model.families import PROJECTIONS
from weft.domain.model.safetensors import Header, read_header
from weft.domain.model.tensors import linear_modules

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def header(tensors: Tensors) -> Header:
    raw = pack(tensors)
    return read_header(io.BytesIO(raw), len(raw))


def parsed(**change: Any) -> AdapterConfig:
    return parse_adapter_config(json.dumps({**ADAPTER_CONFIG, **change}).encode())


def verify(tensors: Tensors, *, max_rank: int = 64, **config: Any) -> tuple[AdaptedModule, ...]:
    return check_adapter(parsed(**config), header(tensors), shape(), max_rank=max_rank)


def refusal(tensors: Tensors, **config: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        verify(tensors, **config)
    return caught.value


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def test_a_fitting_adapter_passes_with_its_pairs_in_the_order_of_the_model() -> None:
    pairs = verify(lora())
    assert [(p.layer, *p.projections) for p in pairs] == [(0, "q_proj"), (0, "v_proj"), (1, "q_proj"), (1, "v_proj")]
    assert {(p.rank, p.scale) for p in pairs} == {(4, 2.0)}
    assert pairs[1].a.shape == (4, 16)
    assert pairs[1].b.shape == (8, 4)


def test_the_verdict_names_the_largest_rank_and_the_widest_dtype() -> None:
    ranks = {"model.layers.1.self_attn.v_proj": 8}
    tensors = lora(ranks=ranks, dtype="BF16") | {f"{Q0}.lora_A.weight": ("F16", np.ones((4, 16)))}
    spec = parsed(rank_pattern=ranks)
    verdict = verdict_of(spec, check_adapter(spec, header(tensors), shape(), max_rank=8), shape(), 123)
    assert (verdict.rank, verdict.alpha, verdict.size_bytes) == (8, 8.0, 123)
    assert verdict.target_modules == ("q_proj", "v_proj")
    assert verdict.dtype == "float16" or verdict.dtype == "bfloat16"
    assert verdict.base_model == "some/where/tiny"


@pytest.mark.parametrize(
    ("change", "warnings"),
    [
        ({}, []),
        ({"target_modules": []}, ["not selected"]),
        ({"target_modules": "q_proj"}, ["not selected"]),
        ({"target_modules": ["q_proj"]}, ["layers.0.self_attn.v_proj, model.layers.1.self_attn.v_proj, not selected"]),
        ({"target_modules": "all-linear"}, ["nothing for model.layers.0.mlp.down_proj"]),
        ({"target_modules": ["q_proj", "v_proj", "lm_head", "\x1b[2J"]}, [r"adapted here: '\x1b[2J', 'lm_head'"]),
        ({"layers_to_transform": [0]}, ["has model.layers.1.self_attn.q_proj"]),
        (
            {"exclude_modules": ["0.self_attn.v_proj"], "\x1b": 1},
            [r"not used: '\x1b'", "has model.layers.0.self_attn.v_proj"],
        ),
        ({"rank_pattern": {"(?i:q)_proj": 4, "k_proj": 4}}, ["'(?i:q)_proj'", "the file: 'k_proj'"]),
    ],
)
def test_the_tensors_are_served_and_a_configuration_that_says_otherwise_is_a_warning(
    change: dict[str, Any], warnings: list[str]
) -> None:
    spec = parsed(**change)
    modules = check_adapter(spec, header(lora()), shape(), max_rank=8)
    assert modules == verify(lora())
    found = verdict_of(spec, modules, shape(), 1).warnings
    assert len(found) == len(warnings)
    assert all(part in warning for part, warning in zip(warnings, found, strict=True)), found


def test_a_rank_above_the_limit_is_too_large_even_for_one_module() -> None:
    ranks = {"model.layers.1.self_attn.q_proj": 16}
    error = refusal(lora(ranks=ranks), rank_pattern=ranks, max_rank=8)
    assert error.reason == Reason.RANK_TOO_LARGE
    assert "rank 16, at most 8" in error.message


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("lora_A", (4, 15)),
        ("lora_A", (3, 16)),
        ("lora_B", (15, 4)),
        ("lora_B", (16, 5)),
        ("lora_A", (64,)),
        ("lora_A", (4, 16, 1)),
    ],
)
def test_a_tensor_of_another_shape_is_named(name: str, size: tuple[int, ...]) -> None:
    error = refusal(lora() | {f"{Q0}.{name}.weight": ("F32", np.ones(size))})
    assert error.reason == Reason.SHAPE_MISMATCH
    assert f"{Q0}.{name}.weight" in error.message


@pytest.mark.parametrize("half", ["A", "B"])
def test_half_a_pair_is_a_missing_tensor(half: str) -> None:
    error = refusal(without(lora(), f"{Q0}.lora_{half}.weight"))
    assert error.reason == Reason.SHAPE_MISMATCH
    assert f"q_proj.lora_{half}" in error.message


@pytest.mark.parametrize(
    ("tensors", "config", "says"),
    [
        (lora(rank=4), {"r": 8}, "correct r or rank_pattern"),  # a rank that the tensors do not have
        (lora(rank=4), {"rank_pattern": {"q_proj": 8, "(?i)v_proj": 4}}, "correct r or rank_pattern"),
        ({}, {}, "no tensors"),
        ({name: ("F32", np.ones(0)) for name in lora()}, {}, "is empty"),
    ],
)
def test_tensors_that_are_not_those_of_the_config_do_not_fit(
    tensors: Tensors, config: dict[str, Any], says: str
) -> None:
    error = refusal(tensors, **config)
    assert error.reason == Reason.SHAPE_MISMATCH
    assert says in error.message


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight", Reason.SHAPE_MISMATCH),  # half a pair
        ("base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight", Reason.UNKNOWN_MODULE),  # no such layer
        ("base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight", Reason.UNKNOWN_MODULE),
        ("base_model.model.model.layers.0.mlp.q_proj.lora_A.weight", Reason.UNKNOWN_MODULE),
        ("base_model.model.transformer.h.0.attn.c_attn.lora_A.weight", Reason.UNKNOWN_MODULE),
        ("base_model.model.lm_head.lora_A.weight", Reason.UNSUPPORTED_ADAPTER),
        ("base_model.model.model.embed_tokens.lora_embedding_A", Reason.UNSUPPORTED_ADAPTER),
        (f"{Q0}.lora_magnitude_vector", Reason.UNSUPPORTED_ADAPTER),
        ("base_model.model.lm_head.weight", Reason.UNSUPPORTED_ADAPTER),
        ("base_model.model.model.layers.0.self_attn.q_proj.bias", Reason.UNSUPPORTED_ADAPTER),
        (f"{Q0}.lora_B.bias", Reason.UNSUPPORTED_ADAPTER),
        ("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", Reason.UNSUPPORTED_ADAPTER),
        (f"{Q0}.lora_A.default.weight", Reason.HEADER_INVALID),  # beside the one without the adapter's name
        ("model.layers.0.self_attn.q_proj.lora_A.weight", Reason.HEADER_INVALID),
        ("virus", Reason.UNKNOWN_MODULE),
        ("", Reason.UNKNOWN_MODULE),
    ],
)
def test_a_tensor_that_cannot_be_served_is_named_with_its_reason(key: str, reason: Reason) -> None:
    assert refusal(lora() | {key: ("F32", np.ones((4, 16)))}).reason == reason


@pytest.mark.parametrize("module", ["\x1b[2J\nfine", "\x1b[2J\nfine.lm_head"])
def test_a_module_name_from_a_stranger_is_quoted(module: str) -> None:
    halves: Tensors = {f"base_model.model.{module}.lora_{half}.weight": ("F32", np.ones((4, 4))) for half in "AB"}
    message = refusal(lora() | halves).message
    assert repr(module) in message


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("", "weight"),
        ("base_model.model.", "default.weight"),
        ("", "my adapter.weight"),
        ("module.base_model.model._orig_mod.", "weight"),
        ("base_model.model.base_model.model.", "weight"),
    ],
)
def test_a_model_that_was_saved_as_it_was_trained_has_the_same_modules(begin: str, end: str) -> None:
    names = {key: begin + key.removeprefix("base_model.model.").removesuffix("weight") + end for key in lora()}
    found = verify({names[key]: tensor for key, tensor in lora().items()})
    assert [module.module for module in found] == [module.module for module in verify(lora())]


@pytest.mark.parametrize("dtype", ["F64", "I32"])
def test_another_dtype_is_refused(dtype: str) -> None:
    error = refusal(lora() | {f"{Q0}.lora_A.weight": (dtype, np.ones((4, 16)))})
    assert error.reason == Reason.DTYPE_NOT_SUPPORTED


LLAMA, QWEN = ["Llama-3.1-8B-Instruct"], ["qwen", "hf:Qwen/Qwen2.5-7B"]


@pytest.mark.parametrize(
    ("trained_on", "accepted", "warning"),
    [
        ("meta/tiny", ["tiny"], ""),
        ("/home/a/tiny/", ["tiny"], ""),
        ("tiny", ["org/tiny"], ""),
        ("meta/tiny", ["other", "file:models/tiny"], ""),
        ("meta/tiny", ["file:tiny"], ""),
        ("anything", [], ""),
        (None, ["tiny"], ""),
        ("", ["tiny"], ""),
        ("tiny", ["Tiny"], "taken for Tiny"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-unsloth-bnb-4bit", LLAMA, "taken for Llama"),
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", LLAMA, "taken for Llama"),
        ("neuralmagic/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", LLAMA, "taken for Llama"),
        ("mlx-community/Llama-3.1-8B-Instruct-4bit", LLAMA, "taken for Llama"),
        ("Qwen/Qwen2.5-7B-GPTQ-Int4", QWEN, "taken for Qwen2.5-7B / qwen"),
        ("/root/.cache/modelscope/hub/models/Qwen/Qwen2___5-7B", QWEN, "taken for Qwen"),
        ("/root/.cache/huggingface/hub/models--Qwen--Qwen2.5-7B/snapshots/d149729398750b98/", QWEN, "taken for Qwen"),
        ("/content/drive/MyDrive/checkpoints", QWEN, "a folder without a model"),
        ("./base", QWEN, "a folder without a model"),
        (r"C:\Users\me\model", QWEN, "a folder without a model"),
    ],
)
def test_the_base_is_known_by_the_last_part_of_its_name_whatever_its_weights_were_made_into(
    trained_on: str | None, accepted: list[str], warning: str
) -> None:
    found = check_base_name(parsed(base_model_name_or_path=trained_on), accepted)
    assert len(found) == bool(warning)
    assert warning in "".join(found)


@pytest.mark.parametrize(
    ("trained_on", "accepted"),
    [
        ("meta/tiny", ["small"]),
        ("meta/tiny-chat", ["tiny"]),
        ("Qwen/Qwen2.5-7B-Instruct", QWEN),
        ("unsloth/Meta-Llama-3-8B-Instruct-bnb-4bit", LLAMA),
        ("/data/models/Qwen2-7B", QWEN),
        ("/data/out/sft_merged", QWEN),
        ("/root/.cache/huggingface/hub/models--Qwen--Qwen2.5-7B-Instruct/snapshots/d149729398750b98", QWEN),
        ("outputs/checkpoint-500", QWEN),
    ],
)
def test_another_model_of_the_same_shape_is_refused_by_its_name(trained_on: str, accepted: list[str]) -> None:
    with refused(Reason.BASE_MISMATCH):
        check_base_name(parsed(base_model_name_or_path=trained_on), accepted)


def test_last_part_knows_paths_and_uris() -> None:
    assert [last_part(text) for text in ("a/b", "/a/b/", "file:b", "b", "")] == ["b", "b", "b", "b", ""]


@given(
    st.sets(st.sampled_from(PROJECTIONS), min_size=1),
    st.integers(1, 9),
    st.dictionaries(st.sampled_from([name for name, _, _ in linear_modules(shape())]), st.integers(1, 12), max_size=5),
    st.sampled_from(["F32", "F16", "BF16"]),
)
def test_every_adapter_made_to_its_config_passes(
    projections: set[str], rank: int, ranks: dict[str, int], dtype: str
) -> None:
    tensors = lora(rank=rank, modules=tuple(projections), ranks=ranks, dtype=dtype)
    pairs = verify(tensors, r=rank, rank_pattern=ranks, target_modules=sorted(projections))
    assert {pair.module: pair.rank for pair in pairs} == {
        name: ranks.get(name, rank) for name, _, held in linear_modules(shape()) if held[0] in projections
    }


def test_a_model_with_exactly_its_tensors_passes_whole_or_in_shards() -> None:
    tensors = weights(dtype="BF16")
    names = list(tensors)
    whole = verify_model(shape(), {"model.safetensors": header(tensors)}, 7)
    parts = {f"{n}.safetensors": header({name: tensors[name] for name in names[n::2]}) for n in (0, 1)}
    assert verify_model(shape(), parts, 7) == whole == ModelVerdict("LlamaForCausalLM", 16, 2, 32, 64, 7, "bfloat16")


def test_rotary_tables_of_old_files_are_ignored() -> None:
    tensors = weights() | {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", np.ones(2))}
    assert verify_model(shape(), {"a": header(tensors)}, 1).dtype == "float32"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model.norm.weight": None}, Reason.SHAPE_MISMATCH),
        ({"model.norm.weight": ("F32", np.ones(15))}, Reason.SHAPE_MISMATCH),
        ({"model.norm.weight": ("F64", np.ones(16))}, Reason.DTYPE_NOT_SUPPORTED),
        ({"model.layers.0.self_attn.q_proj.bias": ("F32", np.ones(16))}, Reason.UNKNOWN_MODULE),
        ({"model.layers.2.input_layernorm.weight": ("F32", np.ones(16))}, Reason.UNKNOWN_MODULE),
    ],
)
def test_a_model_that_is_not_its_config_is_refused(change: dict[str, Any], reason: Reason) -> None:
    tensors = {name: tensor for name, tensor in (weights() | change).items() if tensor is not None}
    with refused(reason):
        verify_model(shape(), {"a": header(tensors)}, 1)


def test_a_tensor_in_two_shards_is_refused() -> None:
    both = header(weights())
    with refused(Reason.HEADER_INVALID):
        verify_model(shape(), {"a": both, "b": both}, 1)

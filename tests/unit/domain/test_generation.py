"""Ends of answers by a tokenizer's files, and the defaults of sampling: what counts, and what is named instead."""

import json
from typing import Any

import pytest

from tests.unit.artifacts.making import MODEL_CONFIG
from weft.domain.model.config import parse_model_config
from weft.domain.model.generation import adapter_eos, sampling_defaults, token_ids, tokenizer_eos
from weft.domain.request import SamplingDefaults

VOCAB = 12
BASE = {
    "model": {"vocab": {"a": 1, "<|end|>": 3}},
    "added_tokens": [{"id": 9, "content": "<|im_end|>"}, {"id": "x"}, 4],
}
PIECES = {"model": {"vocab": [["<unk>", 0.0], ["</s>", -1.5]]}, "added_tokens": None}


def reader(**files: Any) -> Any:
    """Read files by name, with `_` for the dot."""
    raw = {
        f"{name}.json": value if isinstance(value, bytes) else json.dumps(value).encode()
        for name, value in files.items()
    }
    return raw.get


def base_token(text: str) -> int | None:
    return token_ids(reader(tokenizer=BASE)).get(text)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, {9}),
        ({"tokenizer_config": {"eos_token": {"content": "<|end|>", "special": True}}}, {3}),
        ({"special_tokens_map": {"eos_token": "<|end|>"}}, {3}),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}, "special_tokens_map": {"eos_token": "<|end|>"}}, {3, 9}),
        ({"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": PIECES}, {1}),
        ({"tokenizer_config": {"eos_token": "<unk>"}, "tokenizer": PIECES}, {0}),
        ({"tokenizer_config": {"eos_token": "</s>"}}, set()),  # the tokenizer has no such token
        ({"tokenizer_config": {"eos_token": "a"}, "tokenizer": {"model": {"vocab": {"a": VOCAB}}}}, set()),
        ({"tokenizer_config": {"eos_token": "a"}, "tokenizer": {"model": {"vocab": {"a": "1"}}}}, set()),
        ({"tokenizer_config": {"eos_token": "a"}, "tokenizer": {"model": []}}, set()),
        ({"tokenizer_config": {"eos_token": None}}, set()),
        ({"tokenizer_config": {"eos_token": ["a"]}}, set()),
        ({}, set()),
    ],
)
def test_the_token_that_a_base_names_ends_its_answers(files: dict[str, Any], ends: set[int]) -> None:
    assert tokenizer_eos(reader(**{"tokenizer": BASE, **files}), VOCAB) == ends


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, (9,)),
        (
            {"special_tokens_map": {"eos_token": {"content": "<|im_end|>"}}, "tokenizer_config": {"eos_token": "a"}},
            (1, 9),
        ),
        # unsloth's map_eos_token: the base's token has another name in training
        (
            {"tokenizer_config": {"eos_token": "<|im_end|>", "added_tokens_decoder": {"2": {"content": "<|im_end|>"}}}},
            (2,),
        ),
        (
            {"tokenizer_config": {"eos_token": "<|im_end|>", "added_tokens_decoder": {"x": {"content": "<|im_end|>"}}}},
            (9,),
        ),
        ({"tokenizer_config": {"eos_token": "<|im_end|>", "added_tokens_decoder": [2]}}, (9,)),
        ({"tokenizer_config": {"bos_token": "<s>"}}, ()),
        ({}, ()),
    ],
)
def test_the_token_that_an_adapter_names_ends_its_answers(files: dict[str, Any], ends: tuple[int, ...]) -> None:
    assert adapter_eos(reader(**files), base_token, VOCAB) == (ends, ())


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            {"eos_token": "<|eot|>"},
            "tokenizer_config.json: eos_token '<|eot|>' is no token of the base: it is not used",
        ),
        (
            {"eos_token": "<|eot|>", "added_tokens_decoder": {"12": {"content": "<|eot|>"}}},
            "tokenizer_config.json: eos_token '<|eot|>' is token 12, and the base has 12 tokens: it is not used",
        ),
        (b"{", "tokenizer_config.json: Expecting property name"),
    ],
)
def test_an_end_that_the_base_does_not_have_is_named(config: Any, why: str) -> None:
    """The other file counts all the same."""
    files = reader(tokenizer_config=config, special_tokens_map={"eos_token": "<|end|>"})
    ends, (warning,) = adapter_eos(files, base_token, VOCAB)
    assert (ends, warning.startswith(why), warning.endswith(": it is not used")) == ((3,), True, True)


def test_the_defaults_of_sampling_are_those_that_vllm_takes() -> None:
    """Qwen2.5's file, and what it does not have."""
    qwen = {
        "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "repetition_penalty": 1.05,
        "temperature": 0.7, "top_p": 0.8, "top_k": 20, "transformers_version": "4.37.0",
    }  # fmt: skip
    assert sampling_defaults(qwen) == (SamplingDefaults(0.7, 0.8, 20, None, 1.05), ())
    greedy = {
        "do_sample": False,
        "temperature": None,
        "top_k": 40.0,
        "min_p": 0,
        "max_new_tokens": 2048,
        "max_length": 20,
    }
    assert sampling_defaults(greedy) == (SamplingDefaults(top_k=40, min_p=0.0, max_tokens=2048), ())


@pytest.mark.parametrize(
    ("eos", "generation", "name", "ends", "defaults"),
    [
        (1, {"eos_token_id": [1, 107]}, 1, {1, 107}, {}),  # Gemma 2: one end in config.json, two here
        ([1, 106], {"eos_token_id": [1, 106], "do_sample": True, "top_k": 64, "top_p": 0.95,
                    "cache_implementation": "hybrid"}, 1, {1, 106}, {"top_k": 64, "top_p": 0.95}),  # Gemma 3
        (32000, {"eos_token_id": [32000, 32001, 32007]}, 32000, {32000, 32001, 32007}, {}),  # Phi-3 and 3.5
        (100265, {"eos_token_id": [100257, 100265]}, 100265, {100257, 100265}, {}),  # Phi-4
        (199999, {"eos_token_id": [200020, 199999]}, 199999, {200020, 199999}, {}),  # Phi-4-mini
        (0, {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0}, 0, {0}, {}),  # Granite 3, StarCoder2
        (100257, {}, 100257, {100257}, {}),  # Granite 4
        (128012, {"eos_token_id": 128012, "temperature": 0.6, "top_p": 0.95, "do_sample": True}, 128012, {128012},
         {"temperature": 0.6, "top_p": 0.95}),  # SmolLM3
        (100257, {"eos_token_id": [100265, 100257], "temperature": 0.6, "top_p": 0.95, "max_new_tokens": 32768},
         100265, {100257, 100265}, {"temperature": 0.6, "top_p": 0.95, "max_tokens": 32768}),  # OLMo 3
        (100257, {"eos_token_id": 100257}, 100257, {100257}, {}),  # OLMo 2
    ],
)  # fmt: skip
def test_the_files_of_each_family_say_where_answers_end_and_how_they_are_sampled(
    eos: Any, generation: dict[str, Any], name: int, ends: set[int], defaults: Any
) -> None:
    """`name`: the id of the tokenizer's end of sequence."""
    config = json.dumps({**MODEL_CONFIG, "vocab_size": 262_208, "eos_token_id": eos}).encode()
    spec = parse_model_config(config, json.dumps(generation).encode())
    tokenizer = {"added_tokens": [{"id": name, "content": "<end>"}]}
    own = tokenizer_eos(reader(tokenizer=tokenizer, tokenizer_config={"eos_token": "<end>"}), spec.vocab_size)
    assert spec.eos | own == ends
    assert sampling_defaults(generation) == (SamplingDefaults(**defaults), ())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", 10**400), ("temperature", "0.7"), ("top_p", 0), ("top_p", 1.01),
        ("top_k", 1.5), ("top_k", -2), ("top_k", 2**31), ("min_p", True), ("repetition_penalty", 0),
        ("repetition_penalty", [1.1]), ("max_new_tokens", 0), ("max_new_tokens", {}),
    ],
)  # fmt: skip
def test_a_default_that_cannot_be_is_named_and_the_others_count(name: str, value: Any) -> None:
    right = {"temperature": 0.5} if name != "temperature" else {"top_p": 0.5}
    defaults, (warning,) = sampling_defaults({**right, name: value})
    assert defaults == SamplingDefaults(**right)
    assert warning.startswith(f"generation_config.json: {name} is ")
    assert len(warning) < 200

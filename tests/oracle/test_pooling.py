"""Embeddings against the last hidden state of transformers and peft, by each executor."""

import json
import random
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.numerics import near
from harness.random_models import libraries
from harness.small_runner import World
from weft.domain.model.spec import is_bare
from weft.domain.request import FinishReason, PooledState, Sampling

POOLS = Sampling(pooling=True)


@pytest.fixture(scope="module", params=[("qwen3", 128), ("qwen3", 40), ("gemma3", 128)])
def oracle(request, make_oracle, tmp_path_factory):
    """An oracle with a vocabulary that is larger or smaller than a hidden state, and norms of 1 + w."""
    family, vocab_size = request.param
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "head_dim": 32,
    }
    return make_oracle(tmp_path_factory.mktemp("oracle"), family, 5, num_key_value_heads=1, **sizes)


@pytest.fixture(scope="module")
def bare(oracle, tmp_path_factory):
    """The same decoder as its own library saves it, with adapters that were trained on it: names lack `model.`"""
    folder = tmp_path_factory.mktemp("bare")
    decoder = libraries()[0].AutoModel.from_pretrained(oracle.world.base, dtype=torch.float32)
    decoder.save_pretrained(folder / "base")
    for name in oracle.adapters:
        shutil.copytree(oracle.world.base.parent / name, folder / name)
        path = folder / name / "adapter_model.safetensors"
        tensors = {key.replace("model.model.layers", "model.layers"): one for key, one in load_file(path).items()}
        save_file(tensors, path)
    config = json.loads((folder / "base" / "config.json").read_text())
    assert is_bare(config["architectures"][0])
    return replace(oracle, world=World(folder, config))


def expected_state(oracle: Any, adapter: str, prompt: list[int]) -> torch.Tensor:
    """Return the last token's state behind the final norm: what the head is given."""
    model, found = oracle.model.model, list[torch.Tensor]()
    with model.get_output_embeddings().register_forward_pre_hook(lambda _, given: found.append(given[0])):
        oracle.logits(adapter, prompt)
    return found[0][0, -1]


def check(oracle: Any, driver: Any, tolerance: float) -> None:
    """Check texts of several adapters, one longer than a chunk, one of a token, two alike, beside one that decodes."""
    rng, texts = random.Random(3), dict[str, tuple[str, list[int]]]()
    driver.post(driver.request("beside", [5, 6], 30, sampling=Sampling(ignore_eos=True)))
    long = [rng.randrange(oracle.vocab_size) for _ in range(100)]
    for index, (n_tokens, adapter) in enumerate(((2, ""), (1, "a1"), (100, "a3"), (100, "a3"), (33, ""), (1, ""))):
        texts[f"{index}"] = adapter, long[:n_tokens]
        driver.post(driver.request(f"{index}", long[:n_tokens], 0, adapter, sampling=POOLS))
    driver.finish()
    for key, (adapter, text) in texts.items():
        states = [one for one in driver.events if isinstance(one, PooledState) and one.request_id == key]
        assert (driver.ending(key).finish, driver.answer(key)) == (FinishReason.LENGTH, [])
        assert len(states) == 1
        found = np.frombuffer(states[0].vector, "<f4")
        near("fp32: hidden states", found, expected_state(oracle, adapter, text), tolerance)
    assert len(driver.answer("beside")) == 30


@pytest.mark.numeric
def test_every_executor_has_the_state_of_transformers(oracle, drive_each):
    check(oracle, *drive_each(oracle.world))


@pytest.mark.numeric
@pytest.mark.parametrize("drive_each", ["reference", "cpu"], indirect=True)
def test_a_model_without_a_head_has_the_same_states(bare, drive_each):
    check(bare, *drive_each(bare.world))

"""Weights that are packed when they are loaded: of which numbers, by which rank or stage, in how many bytes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from harness.native_models import write_model
from weft.domain.model.packed import CUDA_INT4
from weft.domain.model.spec import ModelSpec
from weft_kernels.triton import int4
from weft_runner.memory_estimate import estimate_memory
from weft_runner.model import Partition, read_spec, stage_of
from weft_runner.model.weights import ModelWeights, load_weights

SIZES = {"vocab_size": 64, "hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 2}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}  # whose products have biases


class Model(NamedTuple):
    files: dict[str, Path]
    spec: ModelSpec


@pytest.fixture(scope="module", params=[False, True], ids=["", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Stored in fp16, which bf16 cannot hold: what is packed are the stored numbers."""
    folder = tmp_path_factory.mktemp("model") / "base"
    files = write_model(folder, 3, torch.float16, **QWEN2, **SIZES, tie_word_embeddings=request.param)
    return Model(files, read_spec(files["config.json"]))


def test_answers_end_with_what_any_of_the_files_names(tmp_path: Path) -> None:
    files = write_model(tmp_path / "base", 1, torch.float16, **QWEN2, **SIZES, eos_token_id=5)
    texts = {"generation_config.json": {"eos_token_id": [6]}, "tokenizer_config.json": {"eos_token": "</s>"}}
    for name, value in {**texts, "tokenizer.json": {"added_tokens": [{"id": 7, "content": "</s>"}]}}.items():
        (tmp_path / name).write_text(json.dumps(value))
        files[name] = tmp_path / name
    assert read_spec(files["config.json"], files).eos == {5, 6, 7}


def parts_of(model: Model) -> list[Partition]:
    return [
        Partition(model.spec),
        *(stage_of(model.spec, stage, 2) for stage in range(2)),
        *(replace(Partition(model.spec), rank=rank, size=2) for rank in range(2)),
    ]


@pytest.mark.parametrize("which", range(5), ids=["whole", "stage 0", "stage 1", "rank 0", "rank 1"])
def test_each_part_packs_its_own_stored_numbers_in_the_bytes_that_are_estimated(model: Model, which: int) -> None:
    part = parts_of(model)[which]
    stored = load_weights(model.files, model.spec, torch.float16, part=part)
    packed = load_weights(model.files, model.spec, torch.bfloat16, part=part, pack=int4.pack)
    for plain, layer in zip(stored.layers, packed.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            assert torch.equal(getattr(layer, name), int4.pack(getattr(plain, name))), name
        assert layer.qkv_bias is not None
        assert layer.qkv_bias.dtype == packed.embedding.dtype == torch.bfloat16
    assert torch.equal(packed.head, int4.pack(stored.head))
    assert packed.has_head == part.ends
    if which == 0:
        needed = estimate_memory(part.local, CUDA_INT4, kv_pages=1, page_tokens=16)
        biases = 2 * part.whole.layers * (part.whole.q_size + 2 * part.whole.kv_size)  # counted as fp32, held as bf16
        assert needed.layers + needed.embedding == _bytes(packed) + biases


def _bytes(weights: ModelWeights) -> int:
    layers = [getattr(layer, name) for layer in weights.layers for name in layer.__slots__]
    tensors = [weights.embedding, weights.norm, weights.head, *layers]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

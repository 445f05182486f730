"""The native executor on 2 x 2 real processes: the bits of two tensor ranks. Stages, chunks: unit/runner/parallel."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from harness.native_library import native_library
from harness.random_models import FAMILIES, OracleModel, write_adapters, write_base
from harness.ranks import base_of, settings_of, split, staged
from harness.split_models import ADAPTERS, PAGE_TOKENS, PAGES, SIZES, steps_of
from weft_runner.executors import make_executor
from weft_runner.parallel import MultiProcessExecutor

native_library()

FLAGS: dict[str, Any] = {
    "executor": "cpu",
    "kv_pages": PAGES,
    "page_tokens": PAGE_TOKENS,
    "max_adapters": len(ADAPTERS),
}


class Said(NamedTuple):
    """What an executor computed, and its numerics class."""

    numerics_class: str
    steps: list[dict[str, torch.Tensor]]


class Grid(NamedTuple):
    """One model, what executors of one process and of two tensor ranks said, and 2 x 2 ranks."""

    model: OracleModel
    alone: Said
    pair: Said
    square: MultiProcessExecutor


def written(folder: Path, family: str) -> OracleModel:
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32}
    seed = FAMILIES.index(family)
    write_base(folder / "base", family, seed, num_hidden_layers=3, max_position_embeddings=256, **SIZES[family] | sizes)
    return write_adapters(folder, ADAPTERS, seed)


def said(model: OracleModel, executor: Any) -> Said:
    return Said(executor.numerics_class, steps_of(model, executor))


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def grid(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    model = written(tmp_path_factory.mktemp("model"), request.param)
    alone = said(model, make_executor(settings_of(**FLAGS), base_of(model.files)))
    with split(model.files, 2, **FLAGS) as executor:
        pair = said(model, executor)
    with staged(model.files, 2, tensor_parallel=2, **FLAGS) as square:
        yield Grid(model, alone, pair, square)


def same_bits(one: Said, other: Said) -> bool:
    return one.numerics_class == other.numerics_class and all(
        torch.equal(a[key], b[key]) for a, b in zip(one.steps, other.steps, strict=True) for key in a
    )


def test_stages_of_two_ranks_give_the_bits_of_two_ranks_which_are_a_class_of_their_own(grid):
    square = said(grid.model, grid.square)
    assert same_bits(square, grid.pair)
    assert same_bits(square, said(grid.model, grid.square)), "again"
    assert square.numerics_class == grid.alone.numerics_class.removesuffix("tp1") + "tp2"
    for key, logits in grid.alone.steps[0].items():
        assert torch.allclose(square.steps[0][key], logits, rtol=0, atol=0.05 * float(logits.abs().max()))

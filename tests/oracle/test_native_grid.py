"""The native executor on 2 x 2 real processes: the bits of two tensor ranks, and two stages the bits of one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from harness.native_library import native_library
from harness.random_models import FAMILIES, OracleModel, write_adapters, write_base
from harness.ranks import base_of, load, settings_of, split, staged
from harness.split_models import ADAPTERS, PAGE_TOKENS, PAGES, SIZES, ask, steps_of
from weft_runner.core import BatchLimits
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
    """One model, what executors of one process, two stages and two tensor ranks said, and 2 x 2 ranks."""

    model: OracleModel
    alone: Said
    stages: Said
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
    with staged(model.files, 2, **FLAGS) as executor:
        stages = said(model, executor)
    with split(model.files, 2, **FLAGS) as executor:
        pair = said(model, executor)
    with staged(model.files, 2, tensor_parallel=2, **FLAGS) as square:
        yield Grid(model, alone, stages, pair, square)


def same_bits(one: Said, other: Said) -> bool:
    return one.numerics_class == other.numerics_class and all(
        torch.equal(a[key], b[key]) for a, b in zip(one.steps, other.steps, strict=True) for key in a
    )


@pytest.mark.slow
def test_two_stages_give_the_bits_of_one_process(grid):
    assert same_bits(grid.stages, grid.alone)


def test_stages_of_two_ranks_give_the_bits_of_two_ranks_which_are_a_class_of_their_own(grid):
    square = said(grid.model, grid.square)
    assert same_bits(square, grid.pair)
    assert same_bits(square, said(grid.model, grid.square)), "again"
    assert square.numerics_class == grid.alone.numerics_class.removesuffix("tp1") + "tp2"
    for key, logits in grid.alone.steps[0].items():
        assert torch.allclose(square.steps[0][key], logits, rtol=0, atol=0.05 * float(logits.abs().max()))


def test_every_rank_has_its_part_of_an_adapter_of_a_few_layers(grid):
    for name in ("a3", "a4"):
        assert load(grid.square, 1, grid.model.folder / name).n_bytes > 0


@pytest.mark.slow
def test_an_engine_of_2_x_2_native_ranks_gives_the_same_texts_whatever_the_chunks(grid, make_driver, new_world):
    world = new_world(grid.model.folder, grid.model.config)
    sizes = {"total_pages": PAGES, "page_tokens": PAGE_TOKENS, "max_adapters": len(ADAPTERS), "max_sequences": 16}
    answers: list[dict[str, list[int]]] = []
    for chunk in (512, 16):
        limits = BatchLimits(max_batch_tokens=chunk, max_prefills=2)
        driver = make_driver(world, batch=limits, make_executor=lambda *_: grid.square, **sizes)
        keys = ask(driver, grid.model, 12)
        driver.finish()
        answers.append({key: driver.answer(key) for key in keys})
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in answers[0].values()}) > len(ADAPTERS), "adapters matter"

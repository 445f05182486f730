"""Two stages of two tensor ranks each, four real processes: the bits of two ranks, the tokens of one, the wire."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from harness.native_library import native_library
from harness.numerics import within
from harness.random_models import OracleModel
from harness.ranks import base_of, load, settings_of, split, staged
from harness.split_models import ADAPTERS, PAGE_TOKENS, PAGES, ask, steps_of, written
from weft_kernels.plan import SegmentPlan
from weft_runner.core import BatchLimits
from weft_runner.executors import make_executor
from weft_runner.model import StepInput, StepRow
from weft_runner.parallel import PipelineParallelExecutor

STEP = StepInput(list(range(20)), (StepRow(0, 20, 0, (0, 1), True),), SegmentPlan(20, ()))
REFERENCE = [
    ("reference", "llama"),
    pytest.param(("reference", "qwen2"), marks=pytest.mark.long),
    pytest.param(("reference", "qwen3"), marks=pytest.mark.slow),
]
NATIVE = [pytest.param(("cpu", "llama"), marks=pytest.mark.slow), ("cpu", "qwen3")]


class Said(NamedTuple):
    """What an executor computed, its numerics class, and the bytes that rank 0 sends for STEP."""

    numerics_class: str
    steps: list[dict[str, torch.Tensor]]
    sent_bytes: int = 0


class Square(NamedTuple):
    """One model on two stages of two ranks, and what one process and two tensor ranks said: a process has one group."""

    kind: str
    model: OracleModel
    alone: Said
    pair: Said
    square: PipelineParallelExecutor


def said(model: OracleModel, executor: Any) -> Said:
    return Said(executor.numerics_class, steps_of(model, executor))


@pytest.fixture(scope="module", params=[*REFERENCE, *NATIVE], ids=" ".join)
def square(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Square]:
    kind, family = request.param
    if kind == "cpu":
        native_library()
    sizes = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32} if kind == "cpu" else {}
    model = written(tmp_path_factory.mktemp("model"), family, **sizes)
    flags = {"executor": kind, "kv_pages": PAGES, "page_tokens": PAGE_TOKENS, "max_adapters": len(ADAPTERS)}
    alone = said(model, make_executor(settings_of(**flags), base_of(model.files)))
    with split(model.files, 2, **flags) as ranks:
        pair = said(model, ranks)._replace(sent_bytes=sent_bytes(ranks))
    with staged(model.files, 2, tensor_parallel=2, **flags) as square:
        yield Square(kind, model, alone, pair, square)


def sent_bytes(executor: Any) -> int:
    before = executor.sent_bytes
    executor.run(STEP)
    return executor.sent_bytes - before


@pytest.mark.numeric
def test_stages_of_two_ranks_give_the_bits_of_two_ranks_and_the_tokens_of_one(square):
    """The native ones are near one process: their tokens may turn where two logits are all but equal."""
    for four in (said(square.model, square.square), said(square.model, square.square)):
        for one, other in zip(square.pair.steps, four.steps, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)
    for one, other in zip(square.alone.steps, four.steps, strict=True):
        assert square.kind == "cpu" or all(int(one[key].argmax()) == int(other[key].argmax()) for key in one)
    for key, logits in square.alone.steps[0].items():
        error = float((four.steps[0][key] - logits).abs().max() / logits.abs().max())
        within("bf16: ranks beside one process, of the largest logit", error, 0.05)
    assert four.numerics_class == square.pair.numerics_class == square.alone.numerics_class[:-1] + "2"
    assert (square.square.depth, len(square.square.others.pids)) == (2, 3)


@pytest.mark.parametrize("square", REFERENCE, indirect=True, ids=" ".join)
def test_rank_0_sends_its_part_of_the_sums_and_of_the_residual_stream(square):
    """A sum of n bytes sends n from each of two ranks: twice in each layer, of both stages together in the pair."""
    hidden, layers = 4 * 20 * square.model.spec.hidden_size, square.model.spec.layers
    assert square.pair.sent_bytes == 2 * layers * hidden
    assert (sent_bytes(square.square) - hidden) / (2 * hidden) in range(1, layers)


def test_every_rank_has_its_part_of_an_adapter(square):
    whole = load(square.square, 0, square.model.folder / "a2")
    assert (whole.rank, whole.site_rank) == (64, 192)
    for name in ("a3", "a4"):  # of one layer, so that a stage has nothing of it
        assert load(square.square, 1, square.model.folder / name).n_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [512, 16])
@pytest.mark.parametrize("square", REFERENCE, indirect=True, ids=" ".join)
def test_an_engine_of_four_ranks_gives_the_tokens_of_one(square, make_driver, new_world, chunk):
    world = new_world(square.model.folder, square.model.config)
    sizes = {"total_pages": PAGES, "page_tokens": PAGE_TOKENS, "max_adapters": len(ADAPTERS), "max_sequences": 16}
    limits = BatchLimits(max_batch_tokens=chunk, max_prefills=2)
    alone = make_driver(world, batch=limits, **sizes)
    four = make_driver(world, batch=limits, make_executor=lambda *_: square.square, **sizes)
    for driver in (alone, four):
        keys = ask(driver, square.model, 12)
        driver.finish()
    assert {key: four.answer(key) for key in keys} == {key: alone.answer(key) for key in keys}

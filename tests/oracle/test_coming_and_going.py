"""Adapters that come and go while a model is split: the right one is in its slot on every rank, or on none."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from harness.numerics import near
from harness.random_models import OracleModel, write_adapters, write_base
from harness.ranks import adapter_files, load, split
from weft.domain.request import Sampling
from weft_kernels.plan import SegmentPlan, plan_rows
from weft_runner.errors import AdapterInvalid, ExecutorLost
from weft_runner.model import StepInput, StepRow, map_tensors
from weft_runner.parallel import RecordedScales, TensorParallelExecutor

PAGES, PAGE_TOKENS, SLOTS = 64, 16, 2
TOLERANCE = 5e-4
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OracleModel:
    """Adapters of different ranks, more of them than slots."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4}
    write_base(folder / "base", "llama", 9, **sizes, num_hidden_layers=2, max_position_embeddings=256)
    configs = ({"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"} for rank in (1, 16, 3, 1))
    return write_adapters(folder, configs, 0)


@pytest.fixture(scope="module")
def ranks(model: OracleModel) -> Iterator[TensorParallelExecutor]:
    with split(model.files, kv_pages=PAGES, page_tokens=PAGE_TOKENS, max_adapters=SLOTS) as executor:
        yield executor


def last_logits(ranks: TensorParallelExecutor, slot: int | None, width: int = 0) -> torch.Tensor:
    ranks.clear_pages([0, 1, 2])
    plan = plan_rows([slot] * len(TOKENS), {} if slot is None else {slot: width})
    return ranks.run(StepInput(TOKENS, (StepRow(0, len(TOKENS), 0, (2, 0, 1), True),), plan))[0]


def assert_near(logits: torch.Tensor, expected: torch.Tensor) -> None:
    near("fp32: largest error of a logit", logits, expected, TOLERANCE)


@pytest.mark.numeric
@pytest.mark.slow
def test_slots_that_change_their_adapters_have_the_right_one_on_all_ranks(model, ranks):
    """Unloaded, replaced and loaded again, smaller after larger (vLLM #21471, #20873), and of rank 1 (#20944)."""
    rng = random.Random(1)
    wanted = {name: model.logits(name, TOKENS)[-1] for name in ("", *model.adapters)}
    here: dict[int, tuple[str, int]] = {}
    for _ in range(12):
        slot, name = rng.randrange(SLOTS), rng.choice(model.adapters)
        if rng.random() < 0.5:
            ranks.adapters.clear(slot)
            here.pop(slot, None)
            assert_near(last_logits(ranks, slot, 16), wanted[""])  # it is empty on all
        if rng.random() < 0.7:
            here[slot] = name, load(ranks, slot, model.folder / name).site_rank
        for used, (held, width) in here.items():
            assert_near(last_logits(ranks, used, width), wanted[held])
        assert_near(last_logits(ranks, None), wanted[""])


def test_an_engine_with_fewer_slots_than_adapters_gives_the_answers_of_one_process(
    model, ranks, make_driver, new_world, monkeypatch
):
    """Loads run beside steps; adapters leave and come back."""
    world, names = new_world(model.folder, model.config), itertools.cycle(("", *model.adapters))
    asked = {f"r{i}": ([5 + i, 7, 9], next(names)) for i in range(20)}
    puts: list[int] = []
    put = ranks.adapters.put
    monkeypatch.setattr(ranks.adapters, "put", lambda slot, adapter: [puts.append(slot), put(slot, adapter)])

    def answers(**how: Any) -> dict[str, list[int]]:
        driver = make_driver(world, total_pages=PAGES, page_tokens=PAGE_TOKENS, max_adapters=SLOTS, **how)
        for some in (list(asked)[:12], list(asked)[12:]):
            driver.post(*(driver.request(key, *of(asked[key]), sampling=Sampling(ignore_eos=True)) for key in some))
            driver.finish()
        return {key: driver.answer(key) for key in asked}

    def of(request: tuple[list[int], str]) -> tuple[list[int], int, str]:
        return request[0], 10, request[1]

    assert answers(make_executor=lambda *_: ranks) == answers()
    assert len(puts) > len(model.adapters)


def test_a_model_run_in_two_halves_gives_the_same_logits(ranks):
    layers: list[int] = []
    step = StepInput(TOKENS, (StepRow(0, 8, 0, (7,), True),), SegmentPlan(8, ()))
    whole = ranks.run(step, layer_done=layers.append)
    hidden = ranks.run(step, last=1)
    assert hidden.shape == (8, 64)
    assert torch.equal(ranks.run(step, first=1, hidden=hidden), whole)
    assert layers == [0, 1]


def test_what_one_rank_refuses_is_refused_by_all_and_the_next_one_is_built(model, ranks, monkeypatch):
    files = adapter_files(model.folder / "a1")
    tensors = map_tensors(files.tensors)
    wrong = {key: tensor[:, :-1] if "lora_A" in key else tensor for key, tensor in tensors.items()}
    with pytest.raises(AdapterInvalid, match="has to be"):
        ranks.adapters.build(wrong, files.scales)
    modules = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in tensors}

    def unchecked(_, scales):
        """Rank 0 lets it pass: the other rank looks for itself."""
        recorded = RecordedScales(scales)
        for module in modules:
            recorded.scale_of(module, 1)
        return recorded

    monkeypatch.setattr(ranks.adapters, "_recorded", unchecked)
    monkeypatch.setattr(ranks.adapters.own, "build", lambda *_: None)
    with pytest.raises(AdapterInvalid, match=r"rank 1: .* has to be"):
        ranks.adapters.build(wrong, files.scales)
    monkeypatch.undo()
    width = load(ranks, 0, model.folder / "a1").site_rank
    assert_near(last_logits(ranks, 0, width), model.logits("a1", TOKENS)[-1])


@pytest.mark.slow
def test_after_a_step_that_failed_on_one_rank_none_is_tried_again(ranks, monkeypatch):
    """Last of this module: the ranks are out of step now."""
    monkeypatch.setattr(ranks._local, "run", lambda *_, **__: 1 / 0)
    with pytest.raises(ExecutorLost, match="failed on rank 0: division"):
        last_logits(ranks, None)

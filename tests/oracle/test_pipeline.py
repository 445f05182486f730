"""A model cut into stages, real processes that speak Gloo: the tokens of one stage, two batches at a time, the wire."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from harness.random_models import FAMILIES, OracleModel, Rows, reference_executor, write_adapter, write_base
from harness.ranks import load, staged, tcp_sent_bytes
from weft.domain.request import Sampling
from weft_kernels.plan import SegmentPlan, plan_rows
from weft_runner.core.batch import BatchLimits
from weft_runner.model.step import StepInput, StepRow
from weft_runner.parallel.pipeline import PipelineParallelExecutor

PAGES, PAGE_TOKENS, ANSWER = 64, 16, 8
CUTS = [("llama", 2), ("qwen2", 3), ("qwen3", 2)]  # what Mistral has some layers of Qwen2 have
MORE_CUTS = [("llama", 3), ("mistral", 2), ("mistral", 3), ("qwen2", 2), ("qwen3", 3)]
LAYERS = 3
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "mistral": {"num_key_value_heads": 4, "sliding_window": 11, "tie_word_embeddings": False},
    "qwen2": {"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32},
}
ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj", "down_proj"]},
    {"r": 8, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"gate_proj": 5}},
    {"r": 64, "lora_alpha": 64, "target_modules": "all-linear"},
    {"r": 3, "lora_alpha": 6, "target_modules": ["k_proj", "up_proj"], "layers_to_transform": [2]},
    {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "o_proj"], "layers_to_transform": [0]},
)


class Cut(NamedTuple):
    """One model, whole and cut into stages."""

    model: OracleModel
    alone: Any
    stages: PipelineParallelExecutor


def written(folder: Path, family: str) -> OracleModel:
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4}
    seed = FAMILIES.index(family)
    write_base(
        folder / "base", family, seed, **sizes, num_hidden_layers=LAYERS, max_position_embeddings=256, **SIZES[family]
    )
    for i, adapter in enumerate(ADAPTERS):
        write_adapter(folder, f"a{i}", adapter, seed + i)
    return OracleModel(folder, tuple(f"a{i}" for i in range(len(ADAPTERS))))


@pytest.fixture(
    scope="module",
    params=[*CUTS, *(pytest.param(cut, marks=pytest.mark.long) for cut in MORE_CUTS)],
    ids=lambda cut: f"{cut[0]} in {cut[1]}",
)
def cut(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cut]:
    family, stages = request.param
    model = written(tmp_path_factory.mktemp("model"), family)
    alone, sizes = reference_executor(model, PAGES, PAGE_TOKENS), {"kv_pages": PAGES, "page_tokens": PAGE_TOKENS}
    with staged(model.files, stages, **sizes, max_adapters=len(ADAPTERS)) as executor:
        yield Cut(model, alone, executor)


def prompts_of(model: OracleModel, seed: int) -> dict[str, tuple[str, list[int]]]:
    """key -> (adapter, tokens): the base and every adapter, twice."""
    rng, names = random.Random(seed), ("", *model.adapters) * 2
    return {f"s{i}": (name, rng.choices(range(128), k=rng.randint(1, 40))) for i, name in enumerate(names)}


def steps_of(cut: Cut, executor: Any) -> list[dict[str, torch.Tensor]]:
    """The logits of one mixed batch, prompts in two chunks, greedy answers: step by step."""
    rows, prompts = Rows(cut.model, executor, PAGES, PAGE_TOKENS), prompts_of(cut.model, 3)
    for key, (adapter, tokens) in prompts.items():
        rows.add(key, tokens, adapter, room=ANSWER)
    rows.step({key: len(tokens) // 2 for key, (_, tokens) in prompts.items() if len(tokens) > 1})
    told: list[dict[str, torch.Tensor]] = []
    for _ in range(ANSWER):
        told.append(rows.step({key: rows.left(key) for key in prompts}))
        for key, logits in told[-1].items():
            rows.extend(key, int(logits.argmax()))
    return told


def test_stages_give_the_logits_of_one_bit_for_bit(cut):
    whole, stages = steps_of(cut, cut.alone), steps_of(cut, cut.stages)
    for one, other in zip(whole, stages, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert cut.stages.numerics_class == cut.alone.numerics_class
    answers = {tuple(int(step[key].argmax()) for step in whole) for key in whole[0]}
    assert len(answers) > len(ADAPTERS), "adapters matter"


# ---- what is on the wire


def step_of(names: list[str], slots: dict[str, int], ranks: dict[int, int]) -> StepInput:
    rows = [StepRow(7 * i, 7 * i + 7, 0, (i,), i % 3 != 1) for i in range(len(names))]
    plan = plan_rows([slots.get(name) for name in names for _ in range(7)], ranks)
    return StepInput([i % 128 for i in range(7 * len(rows))], tuple(rows), plan)


@pytest.mark.parametrize("names", [["", "", ""], ["a0", "a3", "", "a2"], ["a3"] * 5])
def test_stage_0_sends_the_residual_stream_and_nothing_else_whatever_the_adapters(cut, names):
    """4 T H bytes, see `model.partition`."""
    slots = {name: slot for slot, name in enumerate(dict.fromkeys(names)) if name}
    ranks = {slot: load(cut.stages, slot, cut.model.folder / name).site_rank for name, slot in slots.items()}
    before = cut.stages.sent_bytes
    logits = cut.stages.run(step := step_of(names, slots, ranks))
    assert cut.stages.sent_bytes - before == 4 * len(step.tokens) * cut.model.spec.hidden_size
    assert logits.shape == (sum(row.samples for row in step.rows), 128)


def test_the_kernel_has_sent_what_was_counted_and_the_headers_of_gloo(cut):
    step = StepInput([i % 128 for i in range(900)], (StepRow(0, 900, 0, tuple(range(57)), True),), SegmentPlan(900, ()))
    counted, sent = cut.stages.sent_bytes, tcp_sent_bytes()
    cut.stages.run(step)
    counted, sent = cut.stages.sent_bytes - counted, tcp_sent_bytes() - sent
    assert counted == 4 * 900 * cut.model.spec.hidden_size
    assert counted <= sent < 1.02 * counted


# ---- the engine


@pytest.fixture
def driver_of(cut: Cut, make_driver: Callable[..., Any], new_world: Any) -> Callable[..., Any]:
    """Drivers of the stages (`staged=True`) or of one process."""
    world = new_world(cut.model.folder, cut.model.config)

    def make(*, staged: bool, **limits: Any) -> Any:
        how = {"make_executor": lambda *_: cut.stages} if staged else {}
        sizes = {"total_pages": PAGES, "page_tokens": PAGE_TOKENS, "max_adapters": len(ADAPTERS), **limits}
        return make_driver(world, **sizes, **how)

    return make


def ask(driver: Any, model: OracleModel, count: int, max_tokens: int = 10) -> list[str]:
    rng, names = random.Random(7), ("", *model.adapters)
    for i in range(count):
        prompt = rng.choices(range(3, 128), k=rng.choice((1, 5, 40)))
        adapter = names[i % len(names)]
        driver.post(driver.request(f"r{i}", prompt, max_tokens, adapter, sampling=Sampling(ignore_eos=True)))
    return [f"r{i}" for i in range(count)]


@pytest.mark.parametrize("chunk", [512, 16])
def test_an_engine_of_stages_gives_the_tokens_of_one_stage(cut, driver_of, chunk):
    limits = BatchLimits(max_batch_tokens=chunk, max_prefills=2)
    alone, stages = (driver_of(staged=staged, batch=limits, max_sequences=16) for staged in (False, True))
    for driver in (alone, stages):
        keys = ask(driver, cut.model, 12)
        driver.finish()
    assert {key: stages.answer(key) for key in keys} == {key: alone.answer(key) for key in keys}

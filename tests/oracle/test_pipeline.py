"""A model cut into stages, real processes that speak Gloo: the tokens of one stage, two batches at a time, the wire."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from harness.random_models import OracleModel, reference_executor
from harness.ranks import load, staged, tcp_sent_bytes
from harness.split_models import ADAPTERS, PAGE_TOKENS, PAGES, steps_of, written
from weft_kernels.plan import SegmentPlan, plan_rows
from weft_runner.model import StepInput, StepRow
from weft_runner.parallel import PipelineParallelExecutor

CUTS = [("llama", 2), ("qwen2", 3), ("qwen3", 2)]  # what Mistral has some layers of Qwen2 have
MORE_CUTS = [("llama", 3), ("mistral", 2), ("mistral", 3), ("qwen2", 2), ("qwen3", 3)]


class Cut(NamedTuple):
    """One model, whole and cut into stages."""

    model: OracleModel
    alone: Any
    stages: PipelineParallelExecutor


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


def test_stages_give_the_logits_of_one_bit_for_bit(cut):
    whole, stages = steps_of(cut.model, cut.alone), steps_of(cut.model, cut.stages)
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

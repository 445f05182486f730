"""A model on two real processes that speak Gloo: the tokens of one process, and the bytes that the formula says."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from harness.numerics import near
from harness.random_models import OracleModel, reference_executor
from harness.ranks import load, split, tcp_sent_bytes
from harness.split_models import ADAPTERS, PAGE_TOKENS, PAGES, prompts_of, steps_of, written
from weft_kernels.plan import SegmentPlan, plan_rows
from weft_runner.model import SITES, StepInput, StepRow, map_tensors
from weft_runner.parallel import TensorParallelExecutor

LOGIT_TOLERANCE = 5e-4  # as between any executor and the oracle (test_families)


class Pair(NamedTuple):
    """One model, on one process and on two."""

    model: OracleModel
    alone: Any
    ranks: TensorParallelExecutor


SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("llama", "qwen2")]
LONG = [pytest.param(family, marks=pytest.mark.long) for family in ("mistral", "gemma2")]


@pytest.fixture(scope="module", params=["qwen3", "granite", *SLOW, *LONG])  # Granite has biases everywhere
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = written(tmp_path_factory.mktemp("model"), request.param)
    alone = reference_executor(model, PAGES, PAGE_TOKENS)
    with split(model.files, kv_pages=PAGES, page_tokens=PAGE_TOKENS, max_adapters=len(ADAPTERS)) as ranks:
        yield Pair(model, alone, ranks)


@pytest.mark.numeric
def test_two_ranks_give_the_tokens_of_one_and_the_logits_of_the_oracle(pair):
    alone, ranks = (steps_of(pair.model, one) for one in (pair.alone, pair.ranks))
    answers = [{key: [int(step[key].argmax()) for step in steps] for key in steps[0]} for steps in (alone, ranks)]
    assert answers[0] == answers[1]
    for key, prompt in prompts_of(pair.model, 3).items():
        near("fp32: largest error of a logit", ranks[0][key], pair.model.logits(*prompt)[-1], LOGIT_TOLERANCE)
    assert pair.ranks.numerics_class == pair.alone.numerics_class.removesuffix("tp1") + "tp2"
    assert len({tuple(answer) for answer in answers[0].values()}) > len(ADAPTERS), "adapters matter"


# ---- what is on the wire


def widths(pair: Pair, adapters: set[str]) -> list[list[int]]:
    """Return [layer][site]: the widest of these adapters, its stacked true ranks, as the files have them."""
    found = [[0] * len(SITES) for _ in range(pair.model.spec.layers)]
    for name in adapters:
        tensors = map_tensors(pair.model.folder / name / "adapter_model.safetensors")
        for layer, row in enumerate(found):
            for site, names in enumerate(SITES):
                stacked = sum(
                    tensor.shape[0]
                    for key, tensor in tensors.items()
                    if "lora_A" in key and f".layers.{layer}." in key and any(f".{n}." in key for n in names)
                )
                row[site] = max(row[site], stacked)
    return found


def bytes_of_a_step(pair: Pair, tokens: int, adapters: set[str], ranks: int = 2) -> int:
    """Return the bytes by the formula of `model.tensor_parallel`, of rank 0, in fp32."""
    total = pair.model.spec.layers * 2 * (2 * (ranks - 1) * tokens * pair.model.spec.hidden_size * 4 // ranks)
    for row in widths(pair, adapters):
        for site, width in enumerate(row):
            if "o_proj" not in SITES[site] and "down_proj" not in SITES[site]:  # they are split by columns
                total += (ranks - 1) * tokens * -(-width // ranks) * 4
            else:
                total += 2 * (ranks - 1) * tokens * width * 4 // ranks
    return total


@pytest.mark.parametrize("names", [[], ["a0"], ["a4"], ["a1", ""], ["a0", "a3", "", "a2"], ["a3"] * 5])
def test_bytes_on_the_wire_are_those_of_the_formula(pair, names):
    """Bytes follow tokens and the widest rank, not the number of adapters; a base step has the base's sums alone."""
    slots = {name: slot for slot, name in enumerate(dict.fromkeys(names)) if name}
    ranks = {slot: load(pair.ranks, slot, pair.model.folder / name).site_rank for name, slot in slots.items()}
    rows = [StepRow(7 * i, 7 * i + 7, 0, (i,), True) for i in range(len(names) or 1)]
    plan = plan_rows([slots.get(name) for name in names for _ in range(7)], ranks) if names else SegmentPlan(7, ())
    step = StepInput(list(range(7 * len(rows))), tuple(rows), plan)
    before = pair.ranks.sent_bytes
    pair.ranks.run(step)
    assert pair.ranks.sent_bytes - before == bytes_of_a_step(pair, len(step.tokens), set(slots))


@pytest.mark.slow
def test_the_kernel_has_sent_what_was_counted_and_the_headers_of_gloo(pair):
    step = StepInput([i % 128 for i in range(900)], (StepRow(0, 900, 0, tuple(range(57)), True),), SegmentPlan(900, ()))
    counted, sent = pair.ranks.sent_bytes, tcp_sent_bytes()
    pair.ranks.run(step)
    counted, sent = pair.ranks.sent_bytes - counted, tcp_sent_bytes() - sent
    assert counted == bytes_of_a_step(pair, 900, set())
    assert counted <= sent < 1.02 * counted

"""Rooflines: every amount costs, nothing costs nothing, arrays and numbers agree."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_sim.performance import ACCELERATORS, ARCHITECTURES, StepShape, accelerator, architecture, models, roofline

COSTS = roofline.AdapterCosts(
    16, 16, 16, present_us=90, block_ns=0.8, prompt_us=1, adapter_us=9, adapter_bandwidth=0.3, load_us=7_000,
    passed_us=0.5, listed_us=0.2,
)  # fmt: skip
AMOUNTS = (
    "prompts",
    "prompt_tokens",
    "prompt_pairs",
    "decode_rows",
    "context_tokens",
    "adapters",
    "loads",
    "passed_over",
)
MODELS = st.builds(
    roofline.Roofline,
    st.sampled_from(list(ACCELERATORS.values())),
    st.sampled_from(list(ARCHITECTURES.values())),
    st.sampled_from([models.efficiency(name) for name in ("vllm", "trtllm", "sglang")]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["bf16", "fp8"]),
    adapters=st.sampled_from([None, COSTS]),
    penalty_us=st.sampled_from([None, 7.0]),
)
STEPS = st.builds(
    StepShape,
    st.integers(0, 8),
    st.integers(0, 8192),
    st.integers(0, 10**7),
    st.integers(1, 512),
    st.integers(0, 10**6),
)


@given(MODELS, STEPS, st.sampled_from(AMOUNTS), st.integers(1, 1000))
def test_more_of_anything_is_never_faster(model: roofline.Roofline, step: StepShape, name: str, more: int) -> None:
    larger = replace(step, **{name: getattr(step, name) + more})
    assert model.seconds(larger) >= model.seconds(step) * (1 - 1e-9)


@given(MODELS)
def test_a_step_without_tokens_takes_no_time(model: roofline.Roofline) -> None:
    assert model.seconds(StepShape()) == 0


def test_arrays_cost_what_their_numbers_do() -> None:
    model = roofline.Roofline(
        accelerator("H100"), architecture("Qwen/Qwen3-32B"), models.efficiency("vllm"), 2, adapters=COSTS
    )
    steps = [StepShape(1, 100, 5_050, 7, 900, 3, 1, 500), StepShape(0, 0, 0, 64, 64_000, 0), StepShape(2, 8_000, 10**7)]
    table = np.array([[getattr(step, name) for name in AMOUNTS] for step in steps], float)
    assert model.seconds_of(*table.T) == pytest.approx([model.seconds(step) for step in steps], rel=1e-9)


def test_a_slot_costs_the_blocks_of_its_grids() -> None:
    """Llama-3.1-8B: 384 tiles to expand 64 tokens to, 7 x 8 blocks to shrink 32 of rank 16; on average half of one is
    begun in vain."""
    llama = architecture("meta-llama/Llama-3.1-8B")
    assert llama.lora_tiles == 3 * 32 + 2 * 32 + 2 * 112
    step = StepShape(decode_rows=128, context_tokens=128, adapters=1)

    def seconds(slots: int, max_rank: int = 16) -> float:
        costs = replace(COSTS, slots=slots, max_rank=max_rank, adapter_bandwidth=1e9)
        return roofline.Roofline(accelerator("H100"), llama, models.efficiency("vllm"), adapters=costs).seconds(step)

    expanding, shrinking = 384 * 2.5, 7 * 8 * 4.5
    assert seconds(101) - seconds(1) == pytest.approx(100 * 32 * (expanding + shrinking) * 0.8e-9)
    assert seconds(101, 32) - seconds(1, 32) == pytest.approx(100 * 32 * (expanding + 2 * shrinking) * 0.8e-9)


def test_each_adapter_of_a_batch_costs_the_host_a_list_of_the_registered_ones() -> None:
    step = StepShape(decode_rows=64, context_tokens=64, adapters=32)
    few, many = (
        roofline.Roofline(
            accelerator("H100"), architecture("Qwen/Qwen2.5-7B"), models.efficiency("vllm"),
            adapters=replace(COSTS, registered=count),
        ).seconds(step)
        for count in (32, 384)
    )  # fmt: skip
    assert many - few == pytest.approx(32 * (384 - 32) * 0.2e-6)


def test_penalties_read_the_vocabulary_and_keep_the_host_where_the_batch_changes() -> None:
    h100, qwen = accelerator("H100"), architecture("Qwen/Qwen2.5-7B")
    without = roofline.Roofline(h100, qwen, models.efficiency("vllm"))
    penalised = replace(without, penalty_us=7.0)

    def added(step: StepShape) -> float:
        return penalised.seconds(step) - without.seconds(step)

    decode = StepShape(decode_rows=900, context_tokens=900)
    moved = 900 * qwen.vocab * roofline.PENALTY_BYTES / (h100.bytes_per_s * models.efficiency("vllm").kv_bandwidth)
    assert added(decode) == pytest.approx(moved)
    assert added(replace(decode, prompts=2, prompt_tokens=20)) == pytest.approx(moved * 902 / 900 + 900 * 7e-6)


def test_no_step_is_faster_than_the_data_sheet() -> None:
    """One row reads every weight once; a long prompt computes two operations a weight and token."""
    h100, llama = accelerator("H100"), architecture("meta-llama/Llama-3.1-8B")
    model = roofline.Roofline(h100, llama, models.efficiency("trtllm"))
    weights = llama.layers * llama.layer_weights
    assert model.seconds(StepShape(decode_rows=1, context_tokens=1)) > 2 * weights / h100.bytes_per_s
    prompt = StepShape(1, 8_192, 8_192 * 8_193 // 2)
    assert model.seconds(prompt) > 2 * weights * 8_192 / h100.bf16_flops


def test_ranks_share_weights_and_pay_for_sums() -> None:
    step = StepShape(decode_rows=8, context_tokens=8_000)
    alone, four = (
        roofline.Roofline(
            accelerator("H100"), architecture("meta-llama/Llama-3.1-70B"), models.efficiency("vllm"), ranks, "fp8"
        )
        for ranks in (1, 4)
    )
    assert alone.seconds(step) / 4 < four.seconds(step) < alone.seconds(step)

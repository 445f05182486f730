"""`weft bench s3`: predictions that are as good as they are meant to be, and what they gain."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from weft.domain.prediction import Prediction
from weft_bench import s3_paper
from weft_bench.s3_hardware import A100, LLAMA_13B, Machine
from weft_bench.s3_lengths import Answered, noisy, sharegpt, tau_of
from weft_bench.s3_paper import bucket, outcome_of


@pytest.fixture
def conversations(tmp_path: Path) -> Callable[[str], Path]:
    lengths = np.random.default_rng(1).lognormal(5, 1, 2_000).astype(int) + 1
    rows = ["num_prefill_tokens,num_decode_tokens", *(f"10,{tokens}" for tokens in lengths)]
    (tmp_path / "sharegpt_8k_lengths.csv.gz").with_suffix("").write_text("\n".join(rows))
    return lambda name: tmp_path / name.removesuffix(".gz")


def test_noise_brings_the_rank_correlation_to_where_it_is_wanted(conversations: Callable[[str], Path]) -> None:
    values = np.log(np.random.default_rng(0).lognormal(5, 1, 4_000))
    first, second = (np.argsort(np.argsort(each)) for each in (values, noisy(values, 0.5, np.random.default_rng(1))))
    assert 0.6 < float(np.corrcoef(first, second)[0, 1]) < 0.8  # Spearman's rho where Kendall's tau is 0.5
    served = sharegpt(conversations, 0)
    assert len(served) == 1_000
    assert tau_of(served) == pytest.approx(0.5, abs=0.05)
    covered = np.mean([one.output_tokens < one.predicted.p90_tokens for one in served])
    assert covered == pytest.approx(0.9, abs=0.04)


def test_a_roofline_reads_weights_once_and_keys_for_each_row() -> None:
    machine = Machine(LLAMA_13B)
    assert machine.times.seconds(1, 0) == pytest.approx(2 * 13.0e9 / A100.bytes_per_s)
    assert machine.times.seconds(32, 0, 32_000) - machine.times.seconds(32, 0) == pytest.approx(
        32_000 * 4 * 40 * 5_120 / A100.bytes_per_s
    )
    assert machine.times.seconds(0, 10_000) == pytest.approx(2 * 13.0e9 * 10_000 / A100.flops_per_s)
    rows = machine.batch_within(0.05, 100.0)
    assert machine.token_s(rows, 100.0) <= 0.05 < machine.token_s(2 * rows, 100.0)


def test_a_bucket_is_as_often_right_as_the_papers() -> None:
    chance = random.Random(0)
    served = [Answered(1, tokens, Prediction("")) for tokens in (50, 300, 1_500, 2_040) for _ in range(2_000)]
    right = [bucket(one, chance) - 1 == int(204.8 * (int(one.output_tokens / 204.8) + 1)) for one in served]
    assert np.mean(right) == pytest.approx(0.9861, abs=0.005)
    assert {bucket(served[-1], chance) for _ in range(500)} == {2_049, 1_844}


@pytest.mark.slow
def test_small_reservations_serve_more_and_two_stages_work_at_once() -> None:
    served = [Answered(10, 20 + i % 40, Prediction("", 30, 60, "", 20, 60, 205)) for i in range(200)]
    machine = replace(Machine(LLAMA_13B), gpu=replace(A100, memory_bytes=32e9))
    outcomes = {name: outcome_of(s3_paper.Cell(machine, name, 64, tuple(served))) for name in ("max", "calibrated")}
    assert outcomes["calibrated"].batch > 3 * outcomes["max"].batch
    assert outcomes["calibrated"].tokens_per_s > 3 * outcomes["max"].tokens_per_s
    halves = replace(machine, stages=2, gpu=replace(A100, memory_bytes=16e9))
    piped = outcome_of(s3_paper.Cell(halves, "calibrated", 64, tuple(served)))
    # half the rows a step, and two steps in flight: one after the other they would reach half
    assert piped.tokens_per_s == pytest.approx(outcomes["calibrated"].tokens_per_s, rel=0.15)

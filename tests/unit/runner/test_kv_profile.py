"""From which prompt length on KV is sent layer by layer: the rule, and the measurement with a real executor."""

from math import inf
from pathlib import Path

import numpy as np
import pytest

from harness.native_models import write_model
from harness.small_runner import executor_of
from weft_runner.core import BatchLimits, PoolLimits
from weft_runner.model import read_spec
from weft_runner.shell.kv_profile import LENGTHS, measure_kv, threshold


@pytest.mark.parametrize(
    ("faster", "shortest"),
    [
        ([], inf),
        ([False, False], inf),
        ([False, True, True], 64),
        ([True, True, True], 32),
        ([True, False, True], 128),
        ([True, True, False], inf),
    ],
)
def test_from_the_threshold_on_every_measured_length_is_faster(faster: list[bool], shortest: float) -> None:
    assert threshold(list(zip(LENGTHS, faster, strict=False))) == shortest


def test_what_a_runner_measures_is_one_of_the_lengths_and_leaves_its_pages_empty(tmp_path: Path) -> None:
    files = write_model(tmp_path / "m", 1)
    spec = read_spec(files["config.json"])
    limits = PoolLimits(
        total_pages=16, page_tokens=16, max_sequences=4, max_adapters=1, max_context_tokens=256, vocab_size=203,
        eos=frozenset(), batch=BatchLimits(1, 128, 100.0), host_bytes=0,
    )  # fmt: skip
    executor = executor_of(files, spec, limits, kind="cpu")
    found = measure_kv(executor, executor.kv_memory, limits)
    assert found.layer_by_layer_tokens in {32, 64, 128, inf}
    assert 0 < found.bytes_per_s < inf
    assert not np.concatenate(executor.kv_memory.window().incoming(range(16), 0, spec.layers)).any()

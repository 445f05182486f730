"""`weft bench s3`: predictions that are as good as they are meant to be."""

from pathlib import Path

import numpy as np
import pytest

from weft_bench.s3_lengths import noisy, sharegpt, tau_of


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    lengths = np.random.default_rng(1).lognormal(5, 1, 2_000).astype(int) + 1
    rows = ["num_prefill_tokens,num_decode_tokens", *(f"10,{tokens}" for tokens in lengths)]
    path = tmp_path / "sharegpt_8k_lengths.csv"
    path.write_text("\n".join(rows))
    return path


def test_noise_brings_the_rank_correlation_to_where_it_is_wanted(conversations: Path) -> None:
    values = np.log(np.random.default_rng(0).lognormal(5, 1, 4_000))
    first, second = (np.argsort(np.argsort(each)) for each in (values, noisy(values, 0.5, np.random.default_rng(1))))
    assert 0.6 < float(np.corrcoef(first, second)[0, 1]) < 0.8  # Spearman's rho where Kendall's tau is 0.5
    served = sharegpt(conversations, 0)
    assert len(served) == 1_000
    assert tau_of(served) == pytest.approx(0.5, abs=0.05)
    covered = np.mean([one.output_tokens < one.predicted.p90_tokens for one in served])
    assert covered == pytest.approx(0.9, abs=0.04)

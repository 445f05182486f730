"""The published performance model: reference values of splitwise-sim, and the raw measurements where they are."""

from pathlib import Path

import pytest

from weft_sim.performance import StepShape, interpolated, published, read

ROOT = Path(__file__).parents[2]
FOLDERS = ROOT / "data", ROOT.parent / "shared" / "data"
RAW = [path for folder in FOLDERS if (path := folder / "splitwise_sim_perf_model.csv.gz").exists()]
H100, A100 = ("bloom-176b", "h100-80gb", 8), ("bloom-176b", "a100-80gb", 8)
STEPS = [
    *(StepShape(decode_rows=rows) for rows in (1, 5, 64, 200, 512)),
    *(StepShape(prompts=1, prompt_tokens=tokens) for tokens in (2, 128, 700, 2_048, 5_000, 40_000)),
    StepShape(prompts=2, prompt_tokens=1_700, decode_rows=31),
]


@pytest.mark.parametrize(
    ("key", "prompts_ms", "token_ms"),
    [(H100, (251.96, 649.60, 1_411.57), 35.327), (A100, (536.06, 1_332.64, 3_591.47), 47.518)],
)
def test_times_of_splitwise_sim(key: tuple[str, str, int], prompts_ms: tuple[float, ...], token_ms: float) -> None:
    table = published()[key]
    found = [1e3 * table.seconds(StepShape(prompts=1, prompt_tokens=tokens)) for tokens in (2_048, 4_096, 8_192)]
    assert found == pytest.approx(prompts_ms, abs=0.005)
    assert 1e3 * table.seconds(StepShape(decode_rows=1)) == pytest.approx(token_ms, abs=5e-4)


def test_prompts_and_decode_rows_together_take_a_tenth_more_than_as_many_tokens_of_prompts() -> None:
    table = published()[H100]
    together, prompts = StepShape(1, 1_000, decode_rows=24), StepShape(1, 1_024)
    assert table.seconds(together) == pytest.approx(1.1 * table.seconds(prompts))


def test_beyond_the_ends_the_outermost_line_goes_on() -> None:
    curve = (1.0, 2.0, 4.0), (10.0, 20.0, 30.0)
    assert [interpolated(curve, x) for x in (0.0, 1.5, 2.0, 3.0, 6.0)] == pytest.approx([0.0, 15.0, 20.0, 25.0, 40.0])


@pytest.mark.skipif(not RAW, reason="no data set")
def test_the_medians_that_are_shipped_are_those_of_the_measurements() -> None:
    shipped, raw = published(), read(RAW[0])
    assert shipped.keys() == raw.keys()
    for key, table in raw.items():
        for step in STEPS:
            assert shipped[key].seconds(step) == pytest.approx(table.seconds(step), rel=1e-6)

"""How many prompt tokens fit beside the rows that run: bounds for every model, and learning for every machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_runner.core import StepModel
from weft_runner.core.step_time_model import GUESS, MIN_CHUNK, StepTimeEstimator

MS = st.floats(0.0, 50.0)
MODELS = st.builds(StepModel, MS, MS, st.floats(0.0, 0.01), st.floats(1e-6, 5.0))
ROWS, KEYS, MOST = st.integers(0, 64), st.integers(0, 100_000), st.integers(1, 4096)
SLACK = 1e-6  # of rounding
TILE = 16  # tokens


@given(MODELS, ROWS, KEYS, st.floats(1.0, 1000.0), MOST)
def test_a_chunk_is_the_largest_that_keeps_the_target_but_never_too_small_to_get_on(model, rows, keys, target_ms, most):
    pace = StepTimeEstimator(model)
    chunk = pace.prompt_tokens(rows, keys, target_ms, most)
    assert min(MIN_CHUNK, most) <= chunk <= most
    if not rows:
        assert chunk == most, "nobody waits for a token"
    elif chunk > MIN_CHUNK:
        assert pace.step_ms(rows, keys, chunk) <= target_ms * (1 + SLACK)
    if chunk < most:
        assert pace.step_ms(rows, keys, chunk + TILE) > target_ms * (1 - SLACK), "one tile more would not keep it"
        assert chunk % TILE == 0


@given(MODELS, KEYS, st.floats(1.0, 1000.0), MOST, st.data())
def test_more_rows_or_less_time_never_make_a_chunk_larger(model, keys, target_ms, most, data):
    pace = StepTimeEstimator(model)
    few = data.draw(st.integers(1, 64))
    many = data.draw(st.integers(few, 64))
    chunk = pace.prompt_tokens(few, keys, target_ms, most)
    assert pace.prompt_tokens(many, keys, target_ms, most) <= chunk
    assert pace.prompt_tokens(few, keys, target_ms / 2, most) <= chunk


@given(MODELS, st.floats(0.0, 1e6), ROWS, KEYS, st.integers(0, 512))
def test_one_step_says_little(model, measured_ms, rows, keys, prompt_tokens):
    pace = StepTimeEstimator(model)
    pace.learn(rows, keys, prompt_tokens, measured_ms)
    about_prompt = prompt_tokens and measured_ms >= model.decode_ms(rows, keys)
    moved, kept = (pace.prompt, pace.decode) if about_prompt else (pace.decode, pace.prompt)
    assert 15 / 16 <= moved <= 9 / 8
    assert kept == 1.0, "a step teaches about what it added to a step that was known"


@pytest.mark.parametrize("slower", [0.05, 0.3, 1.0, 3.0, 20.0])
def test_a_machine_that_is_not_as_profiled_is_known_after_some_dozens_of_steps(slower):
    """Without a profile too: the default is a guess that may be wrong by far."""
    pace = StepTimeEstimator(GUESS)
    true = StepModel(slower * 1.0, slower * 0.05, 0.0, slower * slower * 0.1)
    for _ in range(60):
        pace.learn(8, 800, 0, true.decode_ms(8, 800))
    for _ in range(120):
        pace.learn(8, 800, 64, true.decode_ms(8, 800) + true.token_ms * 64)
    assert pace.step_ms(8, 800, 64) == pytest.approx(true.decode_ms(8, 800) + true.token_ms * 64, rel=0.02)


@given(
    base_ms=st.floats(0.5, 20.0),
    row_ms=st.floats(0.0, 0.5),
    token_ms=st.floats(0.01, 0.5),
    rows=st.integers(1, 32),
    noise=st.lists(st.floats(0.9, 1.1), min_size=200, max_size=200),
)
def test_chosen_chunks_come_to_keep_the_target_on_any_machine_that_can(base_ms, row_ms, token_ms, rows, noise):
    """A closed loop: each chunk is chosen by what was learnt, and taken by a machine with 10 % of noise."""
    true = StepModel(base_ms, row_ms, 0.0, token_ms)
    target_ms = 3 * (true.decode_ms(rows, 0) + token_ms * MIN_CHUNK)  # the least chunk fills a third of it
    pace, steps = StepTimeEstimator(GUESS), list[float]()
    for factor in noise:
        pace.learn(rows, 0, 0, true.decode_ms(rows, 0) * factor)
        chunk = pace.prompt_tokens(rows, 0, target_ms, 1 << 20)
        steps.append((true.decode_ms(rows, 0) + token_ms * chunk) * factor)
        pace.learn(rows, 0, chunk, steps[-1])
    late = steps[100:]
    assert sum(late) / len(late) <= 1.1 * target_ms
    assert sum(late) / len(late) >= 0.8 * target_ms, "it does not hide in small chunks"


@pytest.mark.parametrize("slow", [3.0, 4.0, 20.0])
def test_a_burst_that_is_over_does_not_hold_prompts_back_when_every_step_is_mixed(slow):
    """Closed loop: decode steps alone were slow for a while; then prompts come without a gap, at the true speed."""
    true = StepModel(base_ms=50.0, row_ms=0.0, key_ms=0.0, token_ms=0.1)
    target_ms, pace, steps = 100.0, StepTimeEstimator(true), list[float]()
    for _ in range(12):
        pace.learn(8, 0, 0, slow * true.decode_ms(8, 0))
    for _ in range(60):
        chunk = pace.prompt_tokens(8, 0, target_ms, 4096)
        steps.append(true.decode_ms(8, 0) + true.token_ms * chunk)
        pace.learn(8, 0, chunk, steps[-1])
    assert steps[0] <= 60.0, "the burst was believed"
    assert max(steps) <= 1.1 * target_ms, "and what follows is not overdone"
    assert min(steps[40:]) >= 0.9 * target_ms, steps

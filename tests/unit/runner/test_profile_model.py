"""From times to a step model and a best batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_runner.core import StepModel
from weft_runner.core.profile_model import DecodeTime, PrefillTime, make_profile

NEVER = 1e9
GAIN = 1.05  # "5 percent more"
BATCHES = (1, 2, 4, 8, 16, 32, 64)
MACHINES = st.builds(StepModel, st.floats(0.01, 50.0), st.floats(0.0, 2.0), st.floats(0.0, 0.01), st.floats(0.001, 5.0))


def times(model: StepModel, context: int = 64) -> list[DecodeTime]:
    return [DecodeTime(rows, rows * context, model.decode_ms(rows, rows * context)) for rows in BATCHES]


def best_batch(decode: list[DecodeTime], target_ms: float) -> int:
    one = [PrefillTime(32, 1.0)]
    return make_profile(decode, one, None, max_sequences=decode[-1].rows, token_time_ms=target_ms).best_batch


def fit(decode: list[DecodeTime], prefill: list[PrefillTime], longer: DecodeTime | None) -> StepModel:
    return make_profile(decode, prefill, longer, max_sequences=64, token_time_ms=NEVER).model


@given(MACHINES)
def test_a_machine_of_this_form_is_found_again(model):
    prefill = [PrefillTime(n, model.base_ms + model.token_ms * n) for n in (32, 128, 512)]
    longer = DecodeTime(8, 8 * 1024, model.decode_ms(8, 8 * 1024))
    found = fit(times(model), prefill, longer)
    for name in ("base_ms", "row_ms", "key_ms", "token_ms"):
        assert getattr(found, name) == pytest.approx(getattr(model, name), rel=1e-4, abs=1e-6), name


@given(
    st.lists(st.floats(0.01, 1000.0), min_size=6, max_size=6),
    st.lists(st.floats(0.01, 1000.0), min_size=1, max_size=3),
    st.none() | st.floats(0.01, 1000.0),
)
def test_whatever_was_measured_no_coefficient_is_negative_and_a_prompt_token_costs_something(decode, prefill, longer):
    found = fit(
        [DecodeTime(rows, 64 * rows, ms) for rows, ms in zip(BATCHES, decode, strict=False)],
        [PrefillTime(tokens, ms) for tokens, ms in zip((32, 128, 512), prefill, strict=False)],
        None if longer is None else DecodeTime(8, 8192, longer),
    )
    assert min(found.base_ms, found.row_ms, found.key_ms) >= 0.0
    assert found.token_ms > 0.0


@given(st.lists(st.floats(0.01, 1000.0), min_size=7, max_size=7), st.floats(1.0, 500.0))
def test_nothing_measured_beyond_the_best_batch_yields_5_percent_more_and_below_it_something_does(decode, target_ms):
    measured = [DecodeTime(rows, rows, ms) for rows, ms in zip(BATCHES, decode, strict=True)]
    free = best_batch(measured, NEVER)
    rate = {time.rows: time.per_s for time in measured}
    assert not any(other >= GAIN * rate[free] for rows, other in rate.items() if rows > free)
    for rows in (r for r in rate if r < free):
        assert any(rate[other] >= GAIN * rate[rows] for other in rate if other > rows)
    bound = best_batch(measured, target_ms)
    assert 1 <= bound <= free
    if measured[0].ms > target_ms:
        assert bound == free, "what no batch keeps limits none"
    elif bound in rate:
        assert measured[BATCHES.index(bound)].ms <= target_ms


def test_the_target_is_met_between_two_measured_batches():
    measured = times(StepModel(10.0, 1.0, 0.0, 1.0))
    assert best_batch(measured, NEVER) == 64
    assert best_batch(measured, 30.0) == 20
    assert best_batch(measured, 11.0) == 1


def test_one_slow_time_in_the_middle_does_not_end_the_climb():
    """A neighbour's burst while 8 rows were timed: 16 rows are better than 4 all the same."""
    measured = [DecodeTime(rows, rows, 40.0 if rows == 8 else 10.0) for rows in BATCHES]
    assert best_batch(measured, NEVER) == 64


def test_a_machine_whose_step_grows_with_its_rows_gains_nothing_from_more_of_them():
    assert best_batch(times(StepModel(0.0, 1.0, 0.0, 1.0)), NEVER) == 1
    assert best_batch(times(StepModel(1.0, 1.0, 0.0, 1.0), context=0), NEVER) == 16, "16 of 17 parts"


def test_batches_that_there_was_no_time_for_follow_from_the_fitted_line():
    decode = [DecodeTime(1, 64, 500.0), DecodeTime(2, 128, 501.0)]
    profile = make_profile(decode, [PrefillTime(32, 900.0)], None, max_sequences=32, token_time_ms=510.0)
    assert profile.best_batch == 11
    assert profile.step_ms_best == pytest.approx(510.0, abs=1.0)
    assert (profile.step_ms_1, round(profile.prefill_tokens_per_s, 1)) == (500.0, 35.6)


def test_one_time_of_each_kind_is_enough():
    profile = make_profile(
        [DecodeTime(1, 64, 5.0)], [PrefillTime(32, 21.0)], None, max_sequences=8, token_time_ms=100.0
    )
    assert profile.model == StepModel(5.0, 0.0, 0.0, 0.5)
    assert profile.best_batch == 8

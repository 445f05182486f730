"""The self-profile: what it runs, how long it takes, and that it leaves nothing behind."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_runner.core import BatchLimits, PoolLimits, StepModel
from weft_runner.core.step_time_model import GUESS
from weft_runner.model import Capabilities, check_step
from weft_runner.shell import measure_profile

LIMITS = PoolLimits(
    total_pages=64, page_tokens=16, max_sequences=32, max_adapters=4, max_context_tokens=1024, vocab_size=61,
    batch=BatchLimits(1, 512, 100.0),
)  # fmt: skip


class Machine:
    """An executor and its clock: each step takes what a model of steps says."""

    can = Capabilities()

    def __init__(self, model: StepModel, limits: PoolLimits = LIMITS) -> None:
        self.model, self.limits, self.now = model, limits, 1000.0
        self.steps: list[tuple[int, int]] = []  # rows, tokens
        self.cleared: list[int] = []
        self.used: set[int] = set()

    def run(self, step) -> None:
        check_step(step, self.limits.page_tokens)
        assert all(0 <= token < self.limits.vocab_size for token in step.tokens)
        rows, tokens = len(step.rows), len(step.tokens)
        self.used.update(page for row in step.rows for page in row.pages)
        self.steps.append((rows, tokens))
        keys = sum(row.context for row in step.rows)
        prompt_tokens = 0 if tokens == rows else tokens
        self.now += (self.model.decode_ms(rows if not prompt_tokens else 0, keys if not prompt_tokens else 0)) / 1e3
        self.now += self.model.token_ms * prompt_tokens / 1e3

    def clear_pages(self, pages) -> None:
        self.cleared.extend(pages)

    def clock(self) -> float:
        return self.now


@given(
    st.builds(StepModel, st.floats(0.01, 4000.0), st.floats(0.0, 200.0), st.floats(0.0, 1.0), st.floats(0.001, 100.0)),
    st.integers(1, 200),
    st.integers(1, 300),
)
def test_it_ends_within_its_second_or_after_the_first_step_of_each_kind(model, max_sequences, total_pages):
    limits = replace(LIMITS, max_sequences=max_sequences, total_pages=total_pages)
    machine = Machine(model, replace(limits, max_context_tokens=total_pages * 16))
    profile = measure_profile(machine, machine.limits, machine.clock)
    first_of_each_ms = 2 * model.decode_ms(1, 64) + model.base_ms + model.token_ms * 32
    assert machine.now - 1000.0 <= 1.0 + first_of_each_ms / 1e3
    assert 1 <= profile.best_batch <= max_sequences
    assert set(machine.cleared) >= machine.used, "nothing stays in the pages"
    assert max(machine.used) < total_pages


@pytest.mark.parametrize(("token_ms", "largest"), [(0.05, 33), (8.0, 17), (20.0, 9)])
def test_steps_with_guesses_are_measured_far_apart_first_within_their_time(token_ms: float, largest: int) -> None:
    machine = Machine(StepModel(10.0, 0.0, 0.0, token_ms))
    measure_profile(machine, machine.limits, machine.clock)
    without_s = machine.now
    times = measure_profile(machine, machine.limits, machine.clock, drafts=True).model.guess_times
    assert machine.now - without_s <= without_s - 1000.0 + 0.5
    assert times[0] == pytest.approx((1, 10.0))
    assert times[-1] == pytest.approx((largest, 10.0 + token_ms * largest))
    assert list(times) == sorted(times)


@pytest.mark.parametrize(("most", "batches"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_batches_double_up_to_the_most(most, batches):
    limits = replace(LIMITS, max_sequences=most)
    machine = Machine(StepModel(0.5, 0.02, 1e-4, 0.05), limits)
    assert [t.rows for t in measure_profile(machine, limits, machine.clock).decode] == batches


def test_a_fast_machine_is_measured_at_every_batch_and_chunk_and_found_to_be_what_it_is():
    limits = replace(LIMITS, total_pages=600)
    machine = Machine(StepModel(0.5, 0.02, 1e-4, 0.05), limits)
    profile = measure_profile(machine, limits, machine.clock)
    assert [t.rows for t in profile.decode] == [1, 2, 4, 8, 16, 32]
    assert [t.tokens for t in profile.prefill] == [32, 128, 512]
    for name in ("base_ms", "row_ms", "key_ms", "token_ms"):
        assert getattr(profile.model, name) == pytest.approx(getattr(machine.model, name), rel=1e-6), name
    assert profile.step_ms_1 == pytest.approx(machine.model.decode_ms(1, 64))
    assert profile.prefill_tokens_per_s == pytest.approx(512 / (0.5 + 0.05 * 512) * 1e3)


def test_a_slow_machine_is_measured_once_of_each_kind_and_the_rest_follows():
    machine = Machine(StepModel(900.0, 1.0, 0.0, 10.0))
    profile = measure_profile(machine, LIMITS, machine.clock)
    assert machine.steps == [(1, 1), (1, 1), (1, 32)], "to page the weights in, then one of each"
    assert profile.model.base_ms == pytest.approx(901.0)
    assert profile.best_batch == 32


def test_the_times_are_the_least_of_a_few():
    machine = Machine(StepModel(1.0, 0.0, 0.0, 0.1))
    slow_then_fast = iter([9.0, 9.0, 1.0, 5.0] + [1.0] * 1000)

    def run(step) -> None:
        del step
        machine.now += next(slow_then_fast) / 1e3

    machine.run = run
    assert measure_profile(machine, LIMITS, machine.clock).step_ms_1 == pytest.approx(1.0)


def test_a_failing_executor_leaves_no_page_behind():
    machine = Machine(GUESS)

    def broken(step) -> None:
        raise RuntimeError("no such instruction")

    machine.run = broken
    with pytest.raises(RuntimeError, match="no such instruction"):
        measure_profile(machine, LIMITS, machine.clock)
    assert machine.cleared


def test_the_real_executor_serves_as_if_it_had_never_been_profiled(drive):
    plain, profiled = drive(page_tokens=16), drive(page_tokens=16)
    profile = measure_profile(profiled.engine.executor, profiled.limits)
    assert 1 <= profile.best_batch <= 32
    assert all(time.ms > 0.0 for time in profile.decode)
    assert plain.run("r", [3, 4, 5], 20) == profiled.run("r", [3, 4, 5], 20)

"""The step of a batch that runs on unchanged: the same object, and always what building it anew would give."""

import random
from typing import Any

import numpy as np
import pytest

from weft.domain.ids import Epoch
from weft.domain.request import Sampling, Stop
from weft_kernels.plan import Segment, SegmentPlan
from weft_runner.core.sequence import SequencePhase
from weft_runner.engine import StepBuilder
from weft_runner.model import StepInput, StepRow, check_step

GREEDY = Sampling(ignore_eos=True)


class Watched:
    """An executor between the engine and the real one: every step is compared with one built for it alone."""

    def __init__(self, driver: Any) -> None:
        self.driver, self.inner = driver, driver.engine.executor
        self.steps: list[StepInput] = []
        self.shapes: list[tuple[int, int]] = []

    def run(self, step: StepInput) -> Any:
        pool, engine = self.driver.pool, self.driver.engine
        batch = pool.schedule() if pool.scheduler.reusable_batch is not None else None
        if batch is not None:
            sequences = tuple(pool.sequences[row.key] for row in batch.rows)
            fresh = StepBuilder(pool, engine.adapters.ranks).build(batch, sequences, keep=False).step
            assert list(step.tokens) == list(fresh.tokens)
            assert step.rows == fresh.rows
            assert step.plan == fresh.plan
        anew = StepInput(list(step.tokens), step.rows, step.plan).arrays
        for name in ("tokens", "rows", "pages", "segments", "sampled"):
            kept = getattr(step.arrays, name)
            assert np.array_equal(kept, getattr(anew, name)), name
            assert kept.dtype == np.int32
            assert kept.flags.c_contiguous
        check_step(step, pool.limits.page_tokens)
        self.steps.append(step)
        self.shapes.append((len(step.rows), len(step.tokens)))
        return self.inner.run(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def watched(driver: Any) -> Watched:
    driver.engine.executor = driver.engine.steps._executor = Watched(driver)
    return driver.engine.executor


@pytest.mark.parametrize("seed", range(3))
def test_every_step_of_any_trace_is_what_building_it_anew_gives(drive, world, seed):
    """Joins, ends, stops, loads, growth and pauses between iterations, at random."""
    drawn = random.Random(seed)
    for i in range(3):
        world.write_adapter(f"a{i}", seed=i, rank=2 + i)
    driver = drive(total_pages=40, max_sequences=8, max_adapters=2)
    executor = watched(driver)
    sequences, made = driver.pool.sequences, 0
    while len(executor.steps) < 150:
        if not sequences or (drawn.random() < 0.15 and len(sequences) < 8):
            adapter, tokens = drawn.choice(["", "a0", "a1", "a2"]), drawn.choices(range(3, 60), k=drawn.randint(1, 12))
            made += 1
            driver.ask(f"r{made}", tokens, drawn.randint(1, 30), adapter, reservation_tokens=4)
        stuck = sequences and all(s.phase is SequencePhase.PAUSED for s in sequences.values())
        if stuck or (sequences and drawn.random() < 0.05):
            driver.post(Stop(drawn.choice(sorted(sequences)), Epoch(9, 9)))
        driver.beat()
    assert len({id(step) for step in executor.steps}) < len(executor.steps), "some ran more than once"


def test_a_batch_is_chosen_and_built_once_for_all_iterations_until_it_changes(drive):
    driver = drive(page_tokens=16)
    executor = watched(driver)
    for i in range(4):
        driver.ask(f"r{i}", [5 + i] * 3, 40, sampling=GREEDY)
    driver.beat(4 + 10)
    assert executor.shapes[:4] == [(1, 3), (2, 4), (3, 5), (4, 6)], "one prompt an iteration, beside those that decode"
    kept = executor.steps[4]
    assert all(step is kept for step in executor.steps[4:])
    arrays = kept.arrays
    driver.ask("late", [9], 3, sampling=GREEDY)
    driver.beat(2)
    assert executor.steps[-1] is not kept
    assert kept.arrays is arrays, "its arrays stay where they are as long as it lives"


def test_a_row_that_outgrows_its_pages_is_given_them_before_the_step_that_needs_them(drive):
    driver = drive(page_tokens=4)
    executor = watched(driver)
    assert len(driver.run("r", [5, 6], 30, sampling=GREEDY, reservation_tokens=2)) == 30
    assert driver.pool.reservations.grown_pages > 0
    assert len({id(step) for step in executor.steps}) < len(executor.steps)


def test_arrays_say_what_the_rows_say():
    rows = (StepRow(0, 3, 4, (7, 2), samples=False), StepRow(3, 4, 9, (1, 5, 3), samples=True, long=True))
    step = StepInput([11, 12, 13, 14], rows, SegmentPlan(4, (Segment(0, 4, 2, 8),)))
    arrays = step.arrays
    assert arrays.tokens.tolist() == [11, 12, 13, 14]
    assert arrays.rows.tolist() == [[0, 3, 4, 0, 0], [3, 4, 9, 2, 1]]
    assert arrays.pages.tolist() == [7, 2, 1, 5, 3]
    assert arrays.segments.tolist() == [[0, 4, 2]]
    assert arrays.sampled.tolist() == [3]


def test_an_advance_moves_tokens_and_positions_where_they_are():
    rows = tuple(StepRow(i, i + 1, 5 + i, (i,), samples=True) for i in range(2))
    step = StepInput([1, 2], rows, SegmentPlan(2, ()))
    arrays = step.arrays
    addresses = arrays.tokens.ctypes.data, arrays.rows.ctypes.data
    step.advance([3, 4], [6, 7])
    assert (step.tokens, [row.position for row in step.rows]) == ([3, 4], [6, 7])
    assert (arrays.tokens.tolist(), arrays.rows[:, 2].tolist()) == ([3, 4], [6, 7])
    assert (step.arrays.tokens.ctypes.data, step.arrays.rows.ctypes.data) == addresses
    with pytest.raises(ValueError, match="zip"):
        step.advance([3], [6])

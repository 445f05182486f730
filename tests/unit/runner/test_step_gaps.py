"""Work between steps keeps to a share of their time; without steps it waits for nothing."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_runner.shell import StepGaps

SHARE, SAVED = 0.03, 4.0  # of the steps' time; such shares of a step


class World:
    """A clock that slices move."""

    def __init__(self) -> None:
        self.now, self.woken, self.done = 100.0, 0, list[int]()
        self.gaps = StepGaps(self.wake, lambda: self.now)

    def wake(self) -> None:
        self.woken += 1

    def slices(self, name: int, *seconds: float) -> Iterator[None]:
        for took in seconds:
            self.now += took
            self.done.append(name)
            yield


@given(
    steps=st.lists(st.floats(0.001, 0.1), min_size=1, max_size=60), slices=st.lists(st.floats(0.0001, 0.02), min_size=1)
)
def test_slices_take_their_share_of_the_steps_and_no_more_than_one_slice_beyond(steps, slices):
    world = World()
    task = world.gaps.add(world.slices(1, *slices))
    for n, step_s in enumerate(steps, 1):
        began = world.now
        world.gaps.between_steps(step_s)
        assert world.now - began <= SHARE * step_s + max(slices) + 1e-9
        budget = SHARE * sum(steps[:n])
        assert world.now - 100.0 <= budget + max(slices) + 1e-9
        assert task.done() or world.now - 100.0 >= budget - 1e-9, "it takes all that it may"


def test_what_is_saved_while_nothing_waits_is_a_share_of_a_few_steps():
    world = World()
    for _ in range(100):
        world.gaps.between_steps(1.0)
    world.gaps.add(world.slices(1, *[SHARE / 4] * 1000))
    world.gaps.between_steps(1.0)
    assert world.now - 100.0 == pytest.approx(SAVED * SHARE, abs=SHARE / 4)


def test_tasks_are_done_in_their_order_and_without_steps_they_wait_for_nothing():
    world = World()
    first, second = world.gaps.add(world.slices(1, 5.0, 5.0)), world.gaps.add(world.slices(2, 5.0))
    assert world.woken == 2
    while world.gaps.advance():
        pass
    assert (world.done, first.done(), second.done()) == ([1, 1, 2], True, True)
    world.gaps.between_steps(1e9)
    assert world.done == [1, 1, 2]


def test_a_slice_that_fails_ends_its_own_task_alone():
    world = World()

    def failing() -> Iterator[None]:
        yield
        raise ValueError("no such matrix")

    failed, other = world.gaps.add(failing()), world.gaps.add(world.slices(2, 1.0))
    while world.gaps.advance():
        pass
    with pytest.raises(ValueError, match="no such matrix"):
        failed.result()
    assert other.done()


def test_what_is_left_at_the_end_is_done_and_what_comes_later_is_the_callers():
    world = World()
    early = world.gaps.add(world.slices(1, 1.0, 1.0))
    world.gaps.close()
    world.gaps.complete(world.slices(2, 1.0))
    assert early.done()
    assert (world.done, world.woken) == ([1, 1, 2], 1)

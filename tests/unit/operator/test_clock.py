import pytest

from weft_operator.controller import Clock, WorkQueue, unix_clock
from weft_operator.core import Ref

HOUR_S = 3_600.0
POOL = Ref("ServingPool", "weft-system", "quickstart")


class Machine:
    """A machine whose wall clock somebody sets."""

    def __init__(self) -> None:
        self.even, self.offset = 100.0, 1.7e9

    def wall(self) -> float:
        return self.offset + self.even

    def clock(self) -> Clock:
        return unix_clock(self.wall, lambda: self.even)


@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
def test_a_wall_clock_that_is_set_moves_no_time_of_the_planner(jump_s: float) -> None:
    machine = Machine()
    clock, began = machine.clock(), machine.wall()
    assert clock() == began
    machine.offset += jump_s
    machine.even += 5.0
    assert clock() == began + 5.0
    assert machine.clock()() == machine.wall(), "a restart follows the wall clock"


async def test_a_retry_comes_in_time_though_the_wall_clock_is_set_back() -> None:
    machine = Machine()
    queue = WorkQueue(clock := machine.clock())
    queue.add_at(POOL, clock() + 5.0)
    machine.offset -= HOUR_S
    machine.even += 5.0
    assert await queue.get() == POOL

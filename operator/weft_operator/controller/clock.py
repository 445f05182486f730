"""The planner's clock: calendar time that runs evenly, even if the machine's wall clock is set."""

import time

from weft.clocks import Clock, since_boot


def unix_clock(wall: Clock = time.time, even: Clock = since_boot) -> Clock:
    """Make a clock of Unix seconds. It starts at the wall clock's time and then counts elapsed time.

    Pauses, back-offs and drains end at times of this clock. Setting the wall clock back by an hour would make each
    pause an hour longer, and setting it forward would end each pause at once. Times in statuses follow the wall clock
    again after a restart.
    """
    offset_s = wall() - even()
    return lambda: offset_s + even()

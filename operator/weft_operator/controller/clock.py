"""The planner's clock: calendar time that runs evenly, whatever is done to the machine's wall clock."""

import time

from weft.clocks import Clock, since_boot


def unix_clock(wall: Clock = time.time, even: Clock = since_boot) -> Clock:
    """Make a clock of Unix seconds. It starts at the wall clock's time and then counts elapsed time.

    Pauses, back-offs and drains end at times of this clock. With the wall clock itself each would last an hour longer
    when that is set back by an hour, and would be over at once when it is set forward. Times in statuses follow the
    wall clock again after a restart.
    """
    offset_s = wall() - even()
    return lambda: offset_s + even()

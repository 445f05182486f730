"""The pace at which answers that have something new are woken to send it.

A runner of many rows has a token for each of them every few milliseconds, and what a chunk costs, above all its system
call, may take longer than that. Answers woken at once would then have the event loop for themselves, tokens would
gather in front of the gateway, and a runner ends a session that does not read. So all answers are woken together, and
again only once as much time has passed as the sending took: at least half of the time is left for reading, and what
comes meanwhile is part of the next chunk. What the loop does for others before the answers' tasks run is no sending: a
burst of requests would delay chunks twice. A gateway that keeps up sends each token in a chunk of its own.
"""

import asyncio
from collections.abc import Callable


def _call_later(delay_s: float, call: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    loop.call_later(delay_s, call) if delay_s else loop.call_soon(call)


class ChunkPacing:
    """Wakes answers.

    `clock`: seconds, monotonic; `after(delay_s, call)`: calls later, in order; 0: in the event loop's next turn.
    """

    def __init__(
        self, clock: Callable[[], float], call_later: Callable[[float, Callable[[], None]], object] = _call_later
    ) -> None:
        self._clock, self._call_later = clock, call_later
        self._wakes: dict[Callable[[], None], None] = {}
        self._under_way = False  # a wake is due, or what it woke is sending
        self._began_s = self._next_s = 0.0

    def add(self, wake: Callable[[], None]) -> None:
        """Call `wake` once, together with further answers that have new text."""
        self._wakes[wake] = None
        if not self._under_way:
            self._plan()

    def _plan(self) -> None:
        self._under_way = True
        self._call_later(max(0.0, self._next_s - self._clock()), self._wake)

    def _wake(self) -> None:
        wakes, self._wakes = self._wakes, {}
        self._call_later(0.0, self._begin)  # ahead of the tasks that are awake now, and `_sent` behind them
        for wake in wakes:
            wake()
        self._call_later(0.0, self._sent)

    def _begin(self) -> None:
        self._began_s = self._clock()

    def _sent(self) -> None:
        now_s = self._clock()
        self._next_s, self._under_way = 2 * now_s - self._began_s, False
        if self._wakes:
            self._plan()

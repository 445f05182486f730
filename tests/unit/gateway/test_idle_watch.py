"""A stream that sends nothing gets a comment in time, and one that sends sets no timer for it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weft_gateway.openai import PING_S, IdleWatch


class Loop:
    """An event loop of simulated time with one timer."""

    def __init__(self) -> None:
        self.now, self.timers_set = 0.0, 0
        self._due: tuple[float, Callable[[], None]] | None = None

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Any:
        assert self._due is None, "one timer at a time"
        self._due = self.now + delay_s, call
        self.timers_set += 1
        return SimpleNamespace(cancel=self.cancel)

    def cancel(self) -> None:
        self._due = None

    def run_until(self, end_s: float) -> None:
        while self._due is not None and self._due[0] <= end_s:
            (self.now, call), self._due = self._due, None
            call()
        self.now = end_s


@given(st.lists(st.integers(1, 12 * int(PING_S)).map(lambda quarters: quarters / 4), min_size=1, max_size=50))
def test_a_comment_is_due_exactly_where_nothing_was_sent_for_so_long(gaps: list[float]) -> None:
    """`gaps`: seconds between two chunks, whose sums are exact."""
    loop: Any = Loop()
    woken = list[float]()
    watch = IdleWatch(lambda: woken.append(loop.now), loop)
    watch.begin()
    for gap in gaps:
        began, before = loop.now, len(woken)
        loop.run_until(began + gap)
        assert watch.due == (len(woken) > before)
        assert len(woken) - before == gap // PING_S, "once in each such time"
        watch.sent()
        assert not watch.due
    assert loop.timers_set <= 2 + 2 * sum(gaps) / PING_S, "chunks set no timer"
    watch.close()
    loop.run_until(loop.now + 10 * PING_S)
    assert not watch.due

"""Answers are woken together, and sending has at most half of the event loop's time."""

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_gateway.shell import ChunkPacing


class Loop:
    """An event loop of simulated time: `now` moves to the next call, and by what a call takes."""

    def __init__(self) -> None:
        self.now, self._order = 0.0, count()
        self._due = list[tuple[float, int, Callable[[], None]]]()

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heappush(self._due, (self.now + delay_s, next(self._order), call))

    def run(self) -> None:
        while self._due:
            at, _, call = heappop(self._due)
            self.now = max(self.now, at)
            call()


@given(st.lists(st.floats(1e-4, 0.02), min_size=1, max_size=60), st.integers(1, 8), st.floats(1e-5, 5e-3))
def test_every_token_is_sent_and_sending_has_half_of_the_time(gaps: list[float], rows: int, chunk_s: float) -> None:
    """`gaps`: between steps, each of which has a token for each of the rows; a chunk takes `chunk_s` of the loop."""
    loop, pending, chunks = Loop(), [0] * rows, list[tuple[float, int]]()
    pacing = ChunkPacing(lambda: loop.now, loop.after)

    def send(row: int) -> None:
        chunks.append((loop.now, pending[row]))
        loop.now, pending[row] = loop.now + chunk_s, 0

    wakes = [partial(loop.after, 0.0, partial(send, row)) for row in range(rows)]

    def step() -> None:
        for row, wake in enumerate(wakes):
            pending[row] += 1
            pacing.add(wake)

    for number in range(len(gaps)):
        loop.after(sum(gaps[: number + 1]), step)
    loop.run()
    assert sum(tokens for _, tokens in chunks) == len(gaps) * rows
    assert all(tokens for _, tokens in chunks), "nobody is woken for nothing"
    began = [at for at, _ in chunks[::rows]]
    assert all(later - earlier >= 2 * rows * chunk_s - 1e-9 for earlier, later in pairwise(began))
    if min(gaps) > 2 * rows * chunk_s:
        assert all(tokens == 1 for _, tokens in chunks), "who keeps up sends each token in a chunk of its own"


def test_what_the_loop_does_for_others_delays_chunks_once():
    loop, chunks = Loop(), list[float]()
    pacing = ChunkPacing(lambda: loop.now, loop.after)

    def spend(seconds: float) -> None:
        loop.now += seconds

    def send() -> None:
        chunks.append(loop.now)
        spend(0.001)

    def step() -> None:
        pacing.add(wake)

    wake = partial(loop.after, 0.0, send)
    loop.after(0.0, step)
    loop.after(0.0, partial(loop.after, 0.0, partial(spend, 0.01)))  # between the wake and the answers' tasks
    loop.after(0.0115, step)
    loop.run()
    assert chunks == pytest.approx([0.01, 0.012]), "as long after the first one as sending it took"

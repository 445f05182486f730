"""The read-ahead of weights, KV and activations, alone: in any order of calls, with threads that are slow or fail."""

import threading
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.waiting import PATIENCE_S
from weft_runner.errors import ExecutorLost
from weft_runner.model import ReadAhead, SlowTier, TierTransfer

SEEDS = st.integers(0, 1 << 32)


@dataclass(frozen=True)
class Page:
    """An item: `size` numbers of the tier, under `key`."""

    key: int
    size: int
    stores: bool = True


class Turnstile(threading.Thread):
    """Lets threads that wait pass one by one, in an order that the seed draws."""

    def __init__(self, seed: int) -> None:
        super().__init__(daemon=True)
        self._chance, self._coming = Random(seed), SimpleQueue[threading.Event]()
        self.start()

    def wait(self) -> None:
        passes = threading.Event()
        self._coming.put(passes)
        assert passes.wait(PATIENCE_S)

    def run(self) -> None:
        waiting = list[threading.Event]()
        while True:
            while not waiting or not self._coming.empty():
                waiting.append(self._coming.get())
            passes = waiting.pop(self._chance.randrange(len(waiting)))
            passes.set()


class Memory(SlowTier[Page]):
    """A ring of numbers over a tier of numbers, one by one. The work whose turn `fails` is raises."""

    def __init__(self, capacity: int, turnstile: Turnstile | None = None, fails: int = -1) -> None:
        self.ring, self.kept, self.loaded = [-1] * capacity, Counter[int](), list[Page]()
        self.failed = self.closed = False
        self._turnstile, self._turns, self._fails = turnstile, count(), fails

    def size(self, item: Page) -> int:
        return item.size

    def load(self, item: Page, at: int) -> list[TierTransfer]:
        self.loaded.append(item)
        return [TierTransfer(1, partial(self._load, item, at + i)) for i in range(item.size)]

    def store(self, item: Page, at: int) -> list[TierTransfer]:
        return [TierTransfer(item.size, partial(self._store, item, at))] if item.stores else []

    def waits_for(self, item: Page, earlier: Page) -> bool:
        return earlier.stores and item.key == earlier.key

    def close(self) -> None:
        self.closed = True

    def _load(self, item: Page, at: int) -> None:
        self._take_turn()
        self.ring[at] = self.kept[item.key]

    def _store(self, item: Page, at: int) -> None:
        self._take_turn()
        (self.kept[item.key],) = {*self.ring[at : at + item.size]}

    def _take_turn(self) -> None:
        if self._turnstile is not None:
            self._turnstile.wait()
        if next(self._turns) == self._fails:
            self.failed = True
            raise OSError("the disk is gone")


@pytest.fixture(scope="module")
def turnstile() -> Turnstile:
    return Turnstile(7)


def drawn_pass(chance: Random, capacity: int) -> list[Page]:
    keys = chance.randint(1, 5)
    return [
        Page(chance.randrange(keys), chance.randint(1, capacity), chance.random() < 0.5)
        for _ in range(chance.randint(1, 12))
    ]  # fmt: skip


def run_pass(ahead: ReadAhead[Page], memory: Memory, values: Counter[int], items: list[Page], until: int) -> None:
    """Compute with the items up to `until`: each has the value that the last one of its key was given."""
    ahead.begin(items)
    for item in items[:until]:
        at = ahead.acquire()
        here = slice(at, at + item.size)
        assert memory.ring[here] == [values[item.key]] * item.size
        if item.stores:
            values[item.key] += 1
            memory.ring[here] = [values[item.key]] * item.size
        ahead.release()
    if until < len(items) and until % 2:
        ahead.acquire()  # and give the pass up


@given(seed=SEEDS, capacity=st.integers(1, 8), threads=st.integers(0, 3), fails=st.integers(-60, 60))
def test_every_item_is_whole_when_it_is_acquired_and_has_what_was_stored_last(
    turnstile: Turnstile, seed: int, capacity: int, threads: int, fails: int
) -> None:
    chance, values, memory = Random(seed), Counter[int](), Memory(capacity, turnstile if threads else None, fails)
    ahead = ReadAhead[Page](memory, capacity, "pages are", threads=threads)
    try:
        for _ in range(4):
            items = drawn_pass(chance, capacity)
            run_pass(ahead, memory, values, items, chance.choice([len(items), chance.randint(0, len(items))]))
        ahead.drain()
        assert +memory.kept == +values
        assert not memory.failed
    except (ExecutorLost, OSError):
        assert memory.failed
        for call in (ahead.drain, partial(ahead.begin, [Page(0, 1)])):
            with pytest.raises(ExecutorLost, match="pages are lost: the disk is gone"):
                call()
    ahead.close()
    assert memory.closed


@given(
    seed=SEEDS, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8), capacity=st.integers(9, 30),
    threads=st.integers(1, 4),
)  # fmt: skip
def test_items_that_repeat_come_in_the_order_of_passes_and_others_are_sought(
    turnstile: Turnstile, seed: int, sizes: list[int], capacity: int, threads: int
) -> None:
    """A pass may need fewer than the one before: what was loaded ahead is dropped only where that changes."""
    chance, items = Random(seed), [Page(key, size, stores=False) for key, size in enumerate(sizes)]
    memory, needed, expected, steady = Memory(capacity, turnstile), len(items), list[Page](), seed % 2
    memory.kept.update({key: key + 1 for key in range(len(items))})
    ahead = ReadAhead[Page](memory, capacity, "weights are", threads=threads, repeated=items)
    for _ in range(8):
        needed = needed if steady else chance.randint(1, len(items))
        ahead.repeat(needed)
        for place in range(0 if steady else chance.randrange(needed), needed):
            at, size = ahead.acquire(place), sizes[place]
            assert memory.ring[at : at + size] == [place + 1] * size
            expected.append(items[place])
            ahead.release()
    ahead.close()
    assert not steady or memory.loaded[: len(expected)] == expected


def test_the_ring_is_filled_ahead_and_behind_the_stores_that_an_item_waits_for() -> None:
    memory, items = Memory(2), [Page(0, 1), Page(1, 1), Page(2, 1), Page(2, 1)]
    ahead = ReadAhead[Page](memory, 2, "pages are")
    ahead.begin(items)
    for there in (2, 3, 3, 4):
        assert memory.loaded == items[:there]
        ahead.acquire()
        assert memory.loaded == items[:there]
        ahead.release()
    assert (ahead.figures.read_bytes, ahead.figures.written_bytes, ahead.figures.waited_s) == (4, 4, 0.0)


def test_the_first_items_of_the_next_pass_are_loaded_behind_the_last_one_of_this() -> None:
    memory, items = Memory(2), [Page(key, 1, stores=False) for key in range(3)]
    ahead = ReadAhead[Page](memory, 2, "weights are", repeated=items)
    for needed in (3, 2):
        ahead.repeat(needed)
        for place in range(needed):
            ahead.acquire(place)
            ahead.release()
        assert memory.loaded[-2:] == items[:2]
    ahead.acquire(2)  # beyond what this pass was to need
    assert memory.loaded[-2:] == [items[2], items[0]]

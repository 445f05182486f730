"""One read-ahead for weights, KV and activations: buffers of a ring that are loaded while others are computed with.

An **item** is what is computed with at a time: a group of matrices, a layer of a micro-batch's pages. Items come in the
order in which they are acquired. As many as the ring has room for are loaded ahead, each into a buffer of its own; an
item keeps its buffer until it is released and what was computed there is stored. Threads move the bytes of files.
Without threads the caller does so at once: it launches copies, whose events keep the order.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from weft_runner.errors import ExecutorLost
from weft_runner.offload.figures import TierFigures
from weft_runner.offload.residency import Ring

Item = TypeVar("Item")


class Event(Protocol):
    """Something that was launched, as `torch.cuda.Event`."""

    def wait(self) -> None:
        """Let all that this thread launches from now on come after it."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TierTransfer:
    """A part of a load or a store: `do` moves `n_bytes`, or launches their copies and returns the event behind them."""

    n_bytes: int
    do: Callable[[], Event | None]


class SlowTier(ABC, Generic[Item]):
    """What items come from and go to. All but `close` and `TierTransfer.do` is called under the lock of the ring."""

    @abstractmethod
    def size(self, item: Item) -> int:
        """What the item takes of the ring, above 0."""

    @abstractmethod
    def load(self, item: Item, at: int) -> Sequence[TierTransfer]:
        """What loads the item to `at` of the ring; not empty."""

    def store(self, item: Item, at: int) -> Sequence[TierTransfer]:
        """What stores the item, all of whose users are done or launched."""
        del item, at
        return ()

    def waits_for(self, item: Item, earlier: Item) -> bool:
        """Whether the item cannot be loaded before that one is stored."""
        del item, earlier
        return False

    def close(self) -> None:
        """Nothing is moved any more."""


@dataclass(slots=True, eq=False)
class _Held(Generic[Item]):
    """An item in the ring: `work` is yet to begin, `busy` of it is under way. Computing comes after `arrived`."""

    item: Item
    place: int
    at: int
    work: deque[TierTransfer]
    busy: int = 0
    released: bool = False
    arrived: Event | None = None

    @property
    def is_transferred(self) -> bool:
        """Loaded, or stored after its release."""
        return not self.work and not self.busy


class ReadAhead(Generic[Item]):
    """One thread calls it. The first error is the last: whatever waits raises ExecutorLost from then on."""

    def __init__(
        self, tier: SlowTier[Item], capacity: int, what: str, *, threads: int = 0, repeated: Sequence[Item] = ()
    ) -> None:
        """`what` is lost where the tier fails. `repeated`: the items of a pass, and again of the next one behind it."""
        self.figures = TierFigures()
        self._tier, self._ring, self._what = tier, Ring(capacity), what
        self._items, self._needed, self._next, self._repeats = repeated, len(repeated), 0, bool(repeated)
        self._held: deque[_Held[Item]] = deque()  # oldest first: those that are released come before those that are not
        self._changed = threading.Condition()
        self._failed: Exception | None = None
        self._closing, self._loading, self._since = False, 0, 0.0
        self._threads = [
            threading.Thread(target=self._transfer, name=what.partition(" ")[0], daemon=True) for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, items: Sequence[Item]) -> None:
        """Load these from now on. What a pass that was given up has left is dropped. Raises ExecutorLost."""
        with self._changed:
            if self._following < self._needed or self._first is not None:
                self.drain()
            self._wait_for(lambda: True)
            self._items, self._needed, self._next = items, len(items), 0
            self._go_on()

    def repeat(self, needed: int) -> None:
        """Let the first item follow the first `needed` of those that repeat."""
        with self._changed:
            self._needed = needed
            self._go_on()

    def acquire(self, place: int | None = None) -> int:
        """Wait for the next item, or the one at `place` of those that repeat. Its offset in the ring, until `release`.

        What was loaded for another one to come is dropped. Raises ExecutorLost.
        """
        began = time.perf_counter()
        with self._changed:
            if place is not None:
                self._seek(place)
            assert self._first or self._following < self._needed, "all that was begun is acquired already"
            self._wait_for(lambda: self._first is not None and self._first.is_transferred)
            if self._threads:
                self.figures.waited_s += time.perf_counter() - began
            held = self._first
            assert held is not None
        if held.arrived is not None:
            held.arrived.wait()
        return held.at

    def release(self) -> None:
        """Let the item that was acquired be stored: all that uses it is done or launched."""
        with self._changed:
            held = self._first
            assert held is not None, "an item is acquired before it is released"
            held.released = True
            held.work.extend(self._tier.store(held.item, held.at))
            self._go_on()

    def drain(self) -> list[Event | None]:
        """Wait until all that was released is stored, and drop the rest: the events of that. Raises ExecutorLost."""
        with self._changed:
            self._needed = 0
            for held in self._held:
                if not held.released:
                    held.work.clear()
            self._wait_for(lambda: all(held.is_transferred for held in self._held))
            dropped = [held.arrived for held in self._held if not held.released]
            self._held.clear()
            self._ring.clear()
            return dropped

    def close(self) -> None:
        """Wait for what is under way, not for what is yet to begin."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._tier.close()

    @property
    def _first(self) -> _Held[Item] | None:
        """The item that is acquired, or is to be acquired next."""
        return next((held for held in self._held if not held.released), None)

    @property
    def _following(self) -> int:
        """The place of the item that is loaded next; there is none from `_needed` on."""
        return self._next if self._next < self._needed or not self._repeats else 0

    def _seek(self, place: int) -> None:
        first, needed = self._first, max(self._needed, place + 1)
        if (self._following if first is None else first.place) != place:
            self.drain()
            self._needed, self._next = needed, place
            self._go_on()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._failed or condition())
        if self._failed is not None:
            raise ExecutorLost(f"{self._what} lost: {self._failed}") from self._failed

    def _go_on(self) -> None:
        self._changed.notify_all()
        while not self._threads and (taken := self._take()) is not None:
            self._do(*taken)

    def _transfer(self) -> None:
        """Do what there is until the end."""
        while True:
            with self._changed:
                taken = self._changed.wait_for(lambda: self._closing or self._failed or self._take())
            if not isinstance(taken, tuple):
                return
            with suppress(Exception):  # who waits raises it
                self._do(*taken)

    def _take(self) -> tuple[_Held[Item], TierTransfer] | None:
        """Work of the oldest item that has any; None while there is nothing, or no room."""
        while self._held and self._held[0].released and self._held[0].is_transferred:
            self._held.popleft()
            self._ring.release()
        held = next((one for one in self._held if one.work), None) or self._append()
        if held is None:
            return None
        held.busy += 1
        if not held.released:
            self._since = self._since if self._loading else time.perf_counter()
            self._loading += 1
        return held, held.work.popleft()

    def _append(self) -> _Held[Item] | None:
        """Give the next item a buffer, if the ring has room for it and all that it waits for is stored."""
        if (place := self._following) >= self._needed:
            return None
        item = self._items[place]
        unstored = (held for held in self._held if not (held.released and held.is_transferred))
        if any(self._tier.waits_for(item, held.item) for held in unstored):
            return None
        if (at := self._ring.take(self._tier.size(item))) is None:
            return None
        self._next = place + 1
        self._held.append(_Held(item, place, at, deque(self._tier.load(item, at))))
        return self._held[-1]

    def _do(self, held: _Held[Item], work: TierTransfer) -> None:
        loads = not held.released
        try:
            arrived = work.do()
        except Exception as error:
            with self._changed:
                self._failed = error
                self._changed.notify_all()
            raise
        with self._changed:
            held.busy, held.arrived = held.busy - 1, arrived
            self.figures.read_bytes += work.n_bytes * loads
            self.figures.written_bytes += work.n_bytes * (not loads)
            self._loading -= loads
            if loads and not self._loading:
                self.figures.reading_s += time.perf_counter() - self._since
            if not held.busy:
                self._changed.notify_all()

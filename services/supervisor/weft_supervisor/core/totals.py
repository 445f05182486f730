"""Sums over runners: pages of a pool, and counters over all incarnations that are and that were."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from weft.domain.ids import RunnerId
from weft.domain.runner import RunnerBook

MAX_COUNTER = 2**64 - 1  # of a sum in a message
MAX_LOST = 10_000  # lost incarnations kept apart, so that one that comes back counts once


@dataclass(frozen=True, slots=True)
class Memory:
    """Pages of a runner or a pool: free + reserved + adapter pages = total, used <= reserved."""

    total_pages: int = 0
    free_pages: int = 0
    reserved_pages: int = 0
    used_pages: int = 0
    adapter_pages: int = 0
    sequences: int = 0

    def __add__(self, other: "Memory") -> "Memory":
        return Memory(
            self.total_pages + other.total_pages,
            self.free_pages + other.free_pages,
            self.reserved_pages + other.reserved_pages,
            self.used_pages + other.used_pages,
            self.adapter_pages + other.adapter_pages,
            self.sequences + other.sequences,
        )


def memory_of(book: RunnerBook) -> Memory:
    """A runner's memory."""
    f = book.figures
    return Memory(
        book.spec.total_pages, f.free_pages, book.reserved_pages, f.used_pages, f.adapter_pages, len(book.sequences)
    )


def summarize(books: Iterable[RunnerBook]) -> dict[str, Memory]:
    """Memory by pool."""
    pools: dict[str, Memory] = {}
    for book in books:
        pools[book.spec.pool] = pools.get(book.spec.pool, Memory()) + memory_of(book)
    return pools


def violation(book: RunnerBook) -> str | None:
    """The law of the page table that a runner's report breaks. The report counts all the same: the runner's table is
    the truth, and its owner has to know of it."""
    free, used, adapters = book.figures.free_pages, book.figures.used_pages, book.figures.adapter_pages
    if free + book.reserved_pages + adapters != book.spec.total_pages:
        return (
            f"{free} free + {book.reserved_pages} reserved + {adapters} pages of adapters are not "
            f"{book.spec.total_pages}"
        )
    if used > book.reserved_pages:
        return f"{used} used pages are more than {book.reserved_pages} reserved"
    return None


@dataclass(frozen=True, slots=True)
class Counters:
    """Over all incarnations: pages grown in place, victims, reservations doubled, runners lost since the start."""

    grown_pages: int
    preempts: int
    doublings: int
    lost: int


class LostCounters:
    """A runner counts from the start of its incarnation: what each lost incarnation had counted last."""

    def __init__(self) -> None:
        self.lost = 0
        self._last: OrderedDict[RunnerId, tuple[int, int]] = OrderedDict()  # pages grown, doublings
        self._folded = (0, 0)  # of incarnations that were lost long ago

    def keep(self, runner: RunnerId, book: RunnerBook) -> None:
        """The runner is lost."""
        self._last[runner] = (book.figures.grown_pages, book.figures.doublings)
        if len(self._last) > MAX_LOST:
            _, (grown, doubled) = self._last.popitem(last=False)
            self._folded = (self._folded[0] + grown, self._folded[1] + doubled)

    def drop(self, runner: RunnerId) -> None:
        """The incarnation has come back, and reports its counters itself."""
        self._last.pop(runner, None)

    def sums(self, live: Iterable[RunnerBook]) -> tuple[int, int]:
        """Pages grown in place and reservations doubled, of these and the lost runners."""
        grown, doubled = self._folded
        for more_grown, more_doubled in self._last.values():
            grown, doubled = grown + more_grown, doubled + more_doubled
        for book in live:
            grown, doubled = grown + book.figures.grown_pages, doubled + book.figures.doublings
        return min(grown, MAX_COUNTER), min(doubled, MAX_COUNTER)

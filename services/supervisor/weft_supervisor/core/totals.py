"""Sums over runners: pages of a pool, and counters over all live and lost incarnations."""

from collections.abc import Iterable
from typing import NamedTuple

from weft.domain.ids import RunnerId
from weft.domain.runner import RunnerBook

MAX_COUNTER = 2**64 - 1  # the largest sum in a message
MAX_LOST = 10_000  # lost incarnations kept separately, so that a returned incarnation counts once


class PoolMemory(NamedTuple):
    """Pages of a pool's runners: free + reserved + adapter pages = total, used <= reserved."""

    total_pages: int = 0
    free_pages: int = 0
    reserved_pages: int = 0
    used_pages: int = 0
    adapter_pages: int = 0
    sequences: int = 0


def summarize(books: Iterable[RunnerBook]) -> dict[str, PoolMemory]:
    """Sum memory by pool."""
    pools: dict[str, PoolMemory] = {}
    for book in books:
        spec, f = book.spec, book.figures
        pages = (spec.total_pages, f.free_pages, book.reserved_pages, f.used_pages, f.adapter_pages)
        memory = pools.get(spec.pool, PoolMemory())
        pools[spec.pool] = PoolMemory(*map(sum, zip(memory, (*pages, len(book.sequences)), strict=True)))
    return pools


def violation(book: RunnerBook) -> str | None:
    """Name the violated law of a runner's page table. The report counts all the same: the runner's table is the truth,
    and its operator has to know of the fault."""
    free, used, adapters = book.figures.free_pages, book.figures.used_pages, book.figures.adapter_pages
    reserved, total = book.reserved_pages, book.spec.total_pages
    if free + reserved + adapters != total:
        return f"{free} free + {reserved} reserved + {adapters} pages of adapters are not {total}"
    if used > reserved:
        return f"{used} used pages are more than {reserved} reserved"
    return None


class Counters(NamedTuple):
    """Counts over all incarnations: pages grown in place, victims, reservations doubled, runners lost."""

    grown_pages: int
    preempts: int
    doublings: int
    lost: int


class LostCounters:
    """The last counts of each lost incarnation. A runner counts from the start of its incarnation."""

    def __init__(self) -> None:
        self.lost = 0
        self._last: dict[RunnerId, tuple[int, int]] = {}  # pages grown, doublings; lost longest ago first
        self._folded = (0, 0)  # sums of incarnations lost long ago

    def lose(self, runner: RunnerId, book: RunnerBook | None) -> None:
        """Count a lost runner and keep its counters; None: it had not reported."""
        self.lost += 1
        if book is None or book.version is None:
            return
        self._last[runner] = (book.figures.grown_pages, book.figures.doublings)
        if len(self._last) > MAX_LOST:
            self._folded = _sum([self._folded, self._last.pop(next(iter(self._last)))])

    def drop(self, runner: RunnerId) -> None:
        """Drop a returned incarnation: it reports its counters itself."""
        self._last.pop(runner, None)

    def sums(self, live: Iterable[RunnerBook]) -> tuple[int, int]:
        """Sum pages grown in place and reservations doubled, over the live and the lost runners."""
        reported = [(book.figures.grown_pages, book.figures.doublings) for book in live]
        grown, doubled = _sum([self._folded, *self._last.values(), *reported])
        return min(grown, MAX_COUNTER), min(doubled, MAX_COUNTER)


def _sum(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    grown, doubled = map(sum, zip(*pairs, strict=True))
    return grown, doubled

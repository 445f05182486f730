"""The memory picture: what every runner last told of its pages, and the sums over a pool.

The runner's book is the truth; this one is checked against the law of the book (free + reserved + adapters' = total,
reserved covers used), and a report that breaks it is named, not corrected.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from weft_supervisor.core.events import Report


@dataclass(frozen=True, slots=True)
class Memory:
    """Pages of a runner or a pool: free + reserved + adapters' = total, used <= reserved."""

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


def memory_of(report: Report, total_pages: int) -> Memory:
    """A runner's memory."""
    reserved = sum(sequence.reserved_pages for sequence in report.sequences)
    lent = report.adapter_pages
    return Memory(total_pages, report.free_pages, reserved, report.used_pages, lent, len(report.sequences))


def picture(runners: Iterable[tuple[str, Memory]]) -> dict[str, Memory]:
    """Memory by pool."""
    pools: dict[str, Memory] = {}
    for pool, memory in runners:
        pools[pool] = pools.get(pool, Memory()) + memory
    return pools


def fault(report: Report, total_pages: int) -> str | None:
    """Which law of the page book a report breaks, if any."""
    memory = memory_of(report, total_pages)
    free, reserved, lent = memory.free_pages, memory.reserved_pages, memory.adapter_pages
    if free + reserved + lent != total_pages:
        return f"{free} free + {reserved} reserved + {lent} pages of adapters are not {total_pages}"
    if report.used_pages != sum(sequence.used_pages for sequence in report.sequences):
        return f"{report.used_pages} used pages are not the sum over its sequences"
    over = next((s for s in report.sequences if s.used_pages > s.reserved_pages), None)
    return f"{over.request_id} uses {over.used_pages} pages of {over.reserved_pages} reserved" if over else None


def check_memory(report: Report, total_pages: int) -> None:
    """A runner's report obeys the law of the page book."""
    broken = fault(report, total_pages)
    assert broken is None, broken

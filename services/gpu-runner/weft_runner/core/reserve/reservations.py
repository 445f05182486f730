"""How much is reserved for a sequence, and what happens when the sequence outruns its reservation.

Pages are asked for when the reserved ones are full, not a page ahead: a p90 that is right ends most answers inside
their last page, and asking on entering it would double, and preempt for, sequences that never need the page.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from weft_runner.core.adapters.slots import AdapterSlots
from weft_runner.core.page_table import PageTable
from weft_runner.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Growth:
    """What a full sequence asks for: `wanted_pages` more, under a reservation of `reservation_tokens`."""

    wanted_pages: int
    reservation_tokens: int
    doubled: bool


def first_reservation_pages(base_len: int, reservation_tokens: int, page_tokens: int, max_context_tokens: int) -> int:
    """Return ceil((prompt + emitted + reservation) / P), never beyond the context, which no sequence can outgrow."""
    return _pages(min(base_len + reservation_tokens, max_context_tokens), page_tokens)


def next_growth(sequence: Sequence, reserved_pages: int, page_tokens: int) -> Growth:
    """What to ask for when the reserved pages are full.

    A reservation that was granted only in part is first completed; a complete one doubles, to one page more at least
    and to no more than the sequence can ever fill. Where nothing is reserved ahead it is always a page.
    """
    if sequence.start.allotment.by_page:
        return Growth(1, sequence.reservation_tokens, doubled=False)
    granted = _pages(min(sequence.base_len + sequence.reservation_tokens, sequence.max_len), page_tokens)
    if granted > reserved_pages:
        return Growth(granted - reserved_pages, sequence.reservation_tokens, doubled=False)
    one_page_more = (reserved_pages + 1) * page_tokens - sequence.base_len
    doubled = min(max(2 * sequence.reservation_tokens, one_page_more), sequence.max_len - sequence.base_len)
    return Growth(_pages(sequence.base_len + doubled, page_tokens) - reserved_pages, doubled, doubled=True)


def _pages(n_tokens: int, page_tokens: int) -> int:
    return -(-n_tokens // page_tokens)


class Reservations:
    """One owner: the request pool. `paused`: sequence -> pages wanted, the longest paused first."""

    def __init__(self, pages: PageTable, slots: AdapterSlots) -> None:
        self._pages, self._slots = pages, slots
        self.paused: dict[str, int] = {}
        self.grown_pages = self.doublings = 0
        self._granted: list[int] = []

    def add_granted(self, pages: list[int]) -> None:
        """Note pages that changed hands."""
        self._granted.extend(pages)

    def drop_granted(self, pages: list[int]) -> None:
        """Forget granted pages that a copy fills: clearing them before the next step would destroy the copy."""
        if self._granted:
            dropped = {*pages}
            self._granted = [page for page in self._granted if page not in dropped]

    def take_granted(self) -> list[int]:
        """Pages that changed hands since the last call: cleared before anything is written to them."""
        granted, self._granted = self._granted, []
        return granted

    def grow(self, sequence: Sequence) -> bool:
        """Double a reservation whose pages are full. False: there is no page, and the sequence is paused."""
        growth = next_growth(sequence, len(self._pages.pages_of(sequence.key)), self._pages.page_tokens)
        sequence.enlarge(growth.reservation_tokens, doubled=growth.doubled)
        self._pages.mark(sequence.key)
        self.doublings += growth.doubled
        grown = self._grant(sequence.key, growth.wanted_pages)
        if not grown:
            sequence.pause()
            self.paused[sequence.key] = growth.wanted_pages
        return grown

    def serve_paused(self, sequences: Mapping[str, Sequence]) -> None:
        """Give free pages to interactive sequences, then to the longest waiting sequences."""
        for key, pages in sorted(self.paused.items(), key=lambda entry: sequences[entry[0]].start.priority):
            if not self._grant(key, pages):
                return
            del self.paused[key]
            sequences[key].resume()

    def release(self, key: str, *, forget: bool = False) -> None:
        """Give a sequence's pages back (`PageTable.release`). No step clears them: an adapter may have them next."""
        self.drop_granted(self._pages.pages_of(key))
        self._pages.release(key, forget=forget)

    def remove(self, key: str) -> None:
        """Forget the pause of a leaving sequence."""
        self.paused.pop(key, None)

    def _grant(self, key: str, wanted_pages: int) -> bool:
        """Give it as many pages as are free; with none, an unused adapter is evicted."""
        if not self._pages.free_pages:
            self._slots.evict_for(1)
        pages = self._pages.grow(key, wanted_pages)
        self._granted.extend(pages)
        self.grown_pages += len(pages)
        return bool(pages)

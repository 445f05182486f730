"""Sequences that outrun their reservation: it grows in place while pages are free, else they pause (an overrun)."""

from collections.abc import Mapping

from weft_runner.core.adapter_slots import AdapterSlots
from weft_runner.core.growth import next_growth
from weft_runner.core.pages import PageBook
from weft_runner.core.sequence import Sequence


class Reservations:
    """One owner: the request pool. `paused`: sequence -> pages wanted, the longest paused first."""

    def __init__(self, pages: PageBook, slots: AdapterSlots) -> None:
        self._pages, self._slots = pages, slots
        self.paused: dict[str, int] = {}
        self.grown_pages = self.doublings = 0
        self._granted: list[int] = []

    def granted(self, pages: list[int]) -> None:
        """These changed hands."""
        self._granted.extend(pages)

    def take_granted(self) -> list[int]:
        """Pages that changed hands since the last call."""
        granted, self._granted = self._granted, []
        return granted

    def grow(self, sequence: Sequence) -> bool:
        """Double a reservation whose pages are full. False: there is no page, and the sequence is paused."""
        growth = next_growth(sequence, self._pages.held_by(sequence.key), self._pages.page_tokens)
        sequence.reservation_tokens = growth.reservation_tokens
        sequence.doublings += growth.doubled
        self.doublings += growth.doubled
        grown = self._grant(sequence.key, growth.wanted_pages)
        if not grown:
            sequence.pause()
            self.paused[sequence.key] = growth.wanted_pages
        return grown

    def serve_paused(self, sequences: Mapping[str, Sequence]) -> None:
        """What is free goes to those who have waited longest."""
        for key, wanted in list(self.paused.items()):
            if not self._grant(key, wanted):
                return
            del self.paused[key]
            sequences[key].resume()

    def _grant(self, key: str, wanted_pages: int) -> bool:
        """As many pages as are free; with none, an unused adapter is evicted."""
        if not self._pages.free_pages:
            self._slots.evict_for(1)
        pages = self._pages.grow(key, wanted_pages)
        self._granted.extend(pages)
        self.grown_pages += len(pages)
        return bool(pages)

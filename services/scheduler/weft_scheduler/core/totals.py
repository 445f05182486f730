"""Sums over a pool's runners, kept up to date by whoever changes one: what a pool does is asked for all the time."""

from operator import add, sub
from typing import NamedTuple

from weft_scheduler.core.capacity import Unit


class Share(NamedTuple):
    """What one runner adds. Pages are counted only while it can serve; slots are those for unpinned adapters."""

    sequences: int = 0  # its best batch
    kv_tokens: int = 0
    reserved_tokens: int = 0
    slots: int = 0
    busy_slots: int = 0
    total_pages: int = 0
    reserved_pages: int = 0


class Totals:
    """The sum of some runners' shares."""

    def __init__(self) -> None:
        self.runners = 0
        self.sum = Share()

    def replace(self, old: Share | None, new: Share | None) -> None:
        """One runner's share has changed; None: it has none."""
        if old is not None:
            self.runners, self.sum = self.runners - 1, Share(*map(sub, self.sum, old))
        if new is not None:
            self.runners, self.sum = self.runners + 1, Share(*map(add, self.sum, new))

    def unit(self, tokens_per_s: float) -> Unit | None:
        """The mean runner; None while there is none."""
        if not self.runners:
            return None
        n, total = self.runners, self.sum
        return Unit(total.sequences / n, total.kv_tokens / n, total.slots / n, tokens_per_s)

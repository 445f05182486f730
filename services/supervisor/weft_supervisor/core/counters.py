"""Counters over all runners that are and that were."""

from collections import OrderedDict
from dataclasses import dataclass

from weft_supervisor.core.events import Report, RunnerId

MOST = 2**64 - 1  # of a sum on the wire
MAX_COUNTED = 10_000  # incarnations kept apart, so that one that comes back counts once


@dataclass(frozen=True, slots=True)
class Counters:
    """Over all incarnations: pages grown in place, victims, reservations doubled, runners lost since the start."""

    grows: int
    preempts: int
    doublings: int
    lost: int


class Tally:
    """Runners count from the start of their incarnation: the latest word of each incarnation, summed."""

    def __init__(self) -> None:
        self.lost = 0
        self._latest: OrderedDict[RunnerId, tuple[int, int]] = OrderedDict()  # pages grown, doublings
        self._folded = (0, 0)  # of incarnations long gone

    def count(self, report: Report) -> None:
        """An incarnation's counters as it tells them now."""
        self._latest[report.runner] = (report.grown_pages, report.doublings)
        self._latest.move_to_end(report.runner)
        if len(self._latest) > MAX_COUNTED:
            _, (grown, doubled) = self._latest.popitem(last=False)
            self._folded = (self._folded[0] + grown, self._folded[1] + doubled)

    def sums(self) -> tuple[int, int]:
        """Pages grown in place, reservations doubled."""
        latest = self._latest.values()
        grown, doubled = self._folded[0] + sum(g for g, _ in latest), self._folded[1] + sum(d for _, d in latest)
        return min(grown, MOST), min(doubled, MOST)

"""Which sequence leaves where memory is short: one rule, for the runner that swaps and the supervisor that moves."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from weft.domain.request import Priority

T = TypeVar("T")


def latest_arrival(candidates: Iterable[T], arrived: Callable[[T], float]) -> T:
    """The one that came last, of equals the last one admitted. `candidates`: at least one, in order of admission.

    The oldest is never chosen while another one is there, so it makes progress, then the next (S3, section 3.4).
    """
    return max(reversed(list(candidates)), key=arrived)


def of_lowest_priority(candidates: Sequence[T], priority: Callable[[T], Priority]) -> Sequence[T]:
    """Those among which a victim is: the batch ones, or all where there is none. Order is kept."""
    return [one for one in candidates if priority(one) is Priority.BATCH] or candidates

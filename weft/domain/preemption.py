"""The rule for which sequence leaves when memory is short, for the runner (it swaps) and the supervisor (it moves)."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from weft.domain.request import Priority

T = TypeVar("T")


def latest_arrival(candidates: Iterable[T], arrived: Callable[[T], float]) -> T:
    """Return the candidate that arrived last; among equals, the last admitted. `candidates`: non-empty, in order of
    admission.

    The oldest is never chosen while another one is there, so it makes progress, then the next (S3, section 3.4).
    """
    return max(reversed(list(candidates)), key=arrived)


def victim_candidates(candidates: Sequence[T], priority: Callable[[T], Priority]) -> Sequence[T]:
    """The sequences that may be preempted: the batch ones if there are any, else all, in their order."""
    return [candidate for candidate in candidates if priority(candidate) is Priority.BATCH] or candidates

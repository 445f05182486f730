"""Which sequence leaves where memory is short: one rule, for the runner that swaps and the supervisor that moves."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def latest_arrival(candidates: Iterable[T], arrived: Callable[[T], float]) -> T:
    """The one that came last, of equals the last one admitted. `candidates`: at least one, in order of admission.

    The oldest is never chosen while another one is there, so it makes progress, then the next (S3, section 3.4).
    """
    return max(reversed(list(candidates)), key=arrived)

"""Waiting requests in a policy's order."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Ordered(Protocol):
    """Something with a fixed place in an order while it waits."""

    @property
    def order(self) -> tuple[float, int]: ...


Item = TypeVar("Item", bound=Ordered)


class Queue(Generic[Item]):
    """Sorted by `order`; finding a place is O(log n), moving the tail is one memmove."""

    def __init__(self) -> None:
        self._items: list[Item] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __contains__(self, item: Item) -> bool:
        place = self._place(item)
        return place < len(self._items) and self._items[place] is item

    def at(self, place: int) -> Item | None:
        """The item at that place, None past the end."""
        return self._items[place] if place < len(self._items) else None

    def add(self, item: Item) -> None:
        insort(self._items, item, key=_order)

    def remove(self, item: Item) -> None:
        """Raises KeyError where it does not wait."""
        place = self._place(item)
        if place == len(self._items) or self._items[place] is not item:
            raise KeyError(item)
        del self._items[place]

    def _place(self, item: Item) -> int:
        return bisect_left(self._items, item.order, key=_order)


def _order(item: Ordered) -> tuple[float, int]:
    return item.order

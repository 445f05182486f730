"""A pool's runners that could take something now, in placement order, by what admission depends on.

A shape is what a runner can hold at all (rank, context) and its numerics class. Within a shape a runner is either
*open* (a device slot is free or unused: it admits any adapter) or *full* (every slot is busy: it admits the adapters
that run there, and the base). So a decision asks, per shape, two rankings: O(log runners). Moving a runner costs O(log)
per ranking it is in: one if open, one per busy slot if full.
"""

from collections.abc import Container, Iterable
from typing import NamedTuple

from weft_scheduler.core.ranking import Key, Ranking
from weft_scheduler.core.values import BASE


class Shape(NamedTuple):
    """What a runner can hold at all, and who computes as it does."""

    max_rank: int
    max_context_tokens: int
    numerics_class: str = ""

    def takes(self, rank: int, context_tokens: int, numerics_class: str = "") -> bool:
        """Whether such a request could run there. No class: any will do."""
        fits = rank <= self.max_rank and context_tokens <= self.max_context_tokens
        return fits and numerics_class in ("", self.numerics_class)


class Place(NamedTuple):
    """A runner that a request was admitted on, as queue policies see it."""

    shape: Shape
    uuid: str


class Shelf:
    """The runners of one shape."""

    def __init__(self) -> None:
        self.members = 0  # confirmed, with room or without
        self.ready = 0
        self.open = Ranking()
        self.full: dict[str, Ranking] = {}

    def put(self, key: Key, room: int, priority: int, digests: tuple[str, ...] | None) -> None:
        """`digests` None: open; else the busy slots of a full runner."""
        if digests is None:
            self.open.put(key, room, priority)
            return
        for digest in (BASE, *digests):
            self.full.setdefault(digest, Ranking()).put(key, room, priority)

    def drop(self, key: Key, digests: tuple[str, ...] | None) -> None:
        if digests is None:
            self.open.drop(key)
            return
        for digest in (BASE, *digests):
            ranking = self.full[digest]
            ranking.drop(key)
            if not len(ranking):
                del self.full[digest]

    def best(self, digest: str, room: int, avoid: Container[str], skip_limit: int) -> Key | None:
        """The preferred runner that admits `digest` and has `room` tokens free."""
        key = self.open.best(room, avoid, skip_limit)
        ranking = self.full.get(digest)
        other = ranking.best(room, avoid, skip_limit) if ranking is not None else None
        return max(key, other) if key is not None and other is not None else key or other


class Shelves:
    """All shapes of a pool."""

    def __init__(self) -> None:
        self.by_shape: dict[Shape, Shelf] = {}

    def shelf(self, shape: Shape) -> Shelf:
        if shape not in self.by_shape:
            self.by_shape[shape] = Shelf()
        return self.by_shape[shape]

    def prune(self, shape: Shape) -> None:
        """Forget a shape nobody has any more."""
        shelf = self.by_shape.get(shape)
        if shelf is not None and not shelf.members:
            del self.by_shape[shape]

    def taking(self, rank: int, context_tokens: int, numerics_class: str = "") -> list[Shape]:
        """The shapes that could ever take such a request."""
        return [shape for shape in self.by_shape if shape.takes(rank, context_tokens, numerics_class)]

    def has_room(self, closed: Container[Shape] = ()) -> bool:
        """Whether any runner of the other shapes could take anything at all."""
        return any(len(s.open) or s.full for shape, s in self.by_shape.items() if shape not in closed)

    def ready_contexts(self) -> Iterable[int]:
        return (shape.max_context_tokens for shape, shelf in self.by_shape.items() if shelf.ready)

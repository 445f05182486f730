"""A pool's placeable runners, indexed so that a decision costs O(log runners) for each shape.

Runners of one shape (the same maximum rank, context and numerics class) share an index. A runner with a free device
slot takes any adapter: it is in `open`. One whose slots are all busy takes only the adapters that hold them, and the
base: it is in the treap of each of these. So a decision asks two treaps for each shape.
"""

from collections.abc import Container, Iterator
from typing import NamedTuple

from weft.domain.ids import BASE
from weft_scheduler.core.policy.placement.room_treap import RoomTreap, RunnerKey, priority_of


class RunnerShape(NamedTuple):
    """What a runner can hold at all, and the class in which it computes."""

    max_rank: int
    max_context_tokens: int
    numerics_class: str = ""

    def fits(self, rank: int, context_tokens: int, numerics_class: str = "") -> bool:
        """Whether such a request could run there. `numerics_class` "": any class will do."""
        large_enough = rank <= self.max_rank and context_tokens <= self.max_context_tokens
        return large_enough and numerics_class in ("", self.numerics_class)


class RunnerEntry(NamedTuple):
    """A placeable runner. `busy_adapters`: None while a slot is free, else the adapters that hold the slots."""

    shape: RunnerShape
    key: RunnerKey
    free_tokens: int
    busy_adapters: tuple[str, ...] | None


class ShapeIndex:
    """The placeable runners of one shape."""

    def __init__(self) -> None:
        self.open = RoomTreap()
        self.full: dict[str, RoomTreap] = {}

    def __len__(self) -> int:
        return len(self.open) + (len(self.full[BASE]) if self.full else 0)

    def __iter__(self) -> Iterator[tuple[RunnerKey, int]]:
        """(key, free tokens) of every runner, once."""
        yield from self.open
        yield from self.full.get(BASE, ())

    def treaps(self, entry: RunnerEntry) -> list[RoomTreap]:
        """The treaps that have, or get, that runner."""
        if entry.busy_adapters is None:
            return [self.open]
        return [self.full.setdefault(adapter, RoomTreap()) for adapter in (BASE, *entry.busy_adapters)]

    def prune(self, entry: RunnerEntry) -> None:
        """Forget the treaps that a removed runner has left empty."""
        for adapter in (BASE, *(entry.busy_adapters or ())):
            if adapter in self.full and not len(self.full[adapter]):
                del self.full[adapter]

    def best(self, adapter: str, free_tokens: int, avoid: Container[str], skip_limit: int) -> RunnerKey | None:
        """The preferred runner that can admit `adapter` and has so many tokens free."""
        key = self.open.best(free_tokens, avoid, skip_limit)
        treap = self.full.get(adapter)
        other = treap.best(free_tokens, avoid, skip_limit) if treap is not None else None
        return max(key, other) if key is not None and other is not None else key or other


class RunnerIndex:
    """All placeable runners of a pool. `update` costs O(log runners) for each treap that the runner is in."""

    def __init__(self) -> None:
        self.by_shape: dict[RunnerShape, ShapeIndex] = {}
        self.entries: dict[str, RunnerEntry] = {}

    def update(self, uuid: str, entry: RunnerEntry | None) -> None:
        """Index a runner as it is now; None: nothing may be placed on it."""
        before = self.entries.get(uuid)
        if entry == before:
            return
        if before is not None and entry is not None and before[:2] == entry[:2] and before[3] == entry[3]:
            for treap in self.by_shape[entry.shape].treaps(entry):
                treap.resize(entry.key, entry.free_tokens)
            self.entries[uuid] = entry
            return
        if before is not None:
            self._remove(uuid, before)
        if entry is not None:
            self.entries[uuid] = entry
            for treap in self.by_shape.setdefault(entry.shape, ShapeIndex()).treaps(entry):
                treap.put(entry.key, entry.free_tokens, priority_of(uuid))

    def _remove(self, uuid: str, entry: RunnerEntry) -> None:
        del self.entries[uuid]
        index = self.by_shape[entry.shape]
        for treap in index.treaps(entry):
            treap.drop(entry.key)
        index.prune(entry)
        if not len(index):
            del self.by_shape[entry.shape]

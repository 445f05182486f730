"""A pool's placeable runners, indexed so that a decision does not iterate them.

Runners of one shape (the same maximum rank, context and numerics class) share an index. A runner with a free device
slot takes any adapter: it is in `open`. One whose slots are all busy takes only the adapters that hold them, and the
base: it is in `full`, and among the holders of these adapters. So a change of a runner costs O(log runners), however
many slots it has, and a decision searches two treaps for each shape.

Of the holders of an adapter either all are compared, or the full runners are visited in placement order until a holder
comes: with k holders among n full runners one of the two ends after about sqrt(n) steps. A treap for each adapter
answers in O(log k), but then each report of a full runner costs as many changes as it has slots: 1.6 ms at 64 of them.
"""

from collections.abc import Collection, Container
from typing import NamedTuple

from weft.domain.ids import BASE
from weft_scheduler.core.policy.placement.capacity_treap import CapacityTreap, RunnerKey, priority_of

MAX_COMPARED = 32  # holders: comparing so many costs 10 us


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
        self.open = CapacityTreap()
        self.full = CapacityTreap()
        self.holders: dict[str, set[str]] = {}  # adapter -> uuids of full runners with it in a slot

    def __len__(self) -> int:
        return len(self.open) + len(self.full)

    @property
    def free_tokens(self) -> int:
        """The most that a runner has."""
        return max(self.open.free_tokens, self.full.free_tokens)

    def treap(self, entry: RunnerEntry) -> CapacityTreap:
        """The one that has, or gets, that runner."""
        return self.open if entry.busy_adapters is None else self.full

    def hold(self, uuid: str, before: Collection[str], after: Collection[str]) -> None:
        """A full runner had those adapters in its slots, and has these."""
        for adapter in {*before}.difference(after):
            holders = self.holders[adapter]
            holders.discard(uuid)
            if not holders:
                del self.holders[adapter]
        for adapter in {*after}.difference(before):
            self.holders.setdefault(adapter, set()).add(uuid)


class RunnerIndex:
    """All placeable runners of a pool."""

    def __init__(self) -> None:
        self.by_shape: dict[RunnerShape, ShapeIndex] = {}
        self.entries: dict[str, RunnerEntry] = {}

    def update(self, uuid: str, entry: RunnerEntry | None) -> None:
        """Index a runner as it is now; None: nothing may be placed on it."""
        before = self.entries.get(uuid)
        if entry == before:
            return
        if before is not None and (entry is None or entry.shape != before.shape):
            self._remove(uuid, before)
            before = None
        if entry is None:
            return
        index = self.by_shape.setdefault(entry.shape, ShapeIndex())
        treap, key, free_tokens = index.treap(entry), entry.key, entry.free_tokens
        if before is not None and key == before.key and index.treap(before) is treap:
            if free_tokens != before.free_tokens:
                treap.resize(key, free_tokens)
        else:
            if before is not None:
                index.treap(before).drop(before.key)
            treap.put(key, free_tokens, priority_of(uuid))
        held = before.busy_adapters if before is not None else None
        if entry.busy_adapters is not held:
            index.hold(uuid, held or (), entry.busy_adapters or ())
        self.entries[uuid] = entry

    def best(
        self, shape: RunnerShape, adapter: str, free_tokens: int, avoid: Container[str], skip_limit: int
    ) -> RunnerKey | None:
        """The preferred runner of a shape that can admit `adapter` and has so many tokens free."""
        index = self.by_shape[shape]
        key = index.open.best(free_tokens, avoid, skip_limit)
        if adapter == BASE:
            other = index.full.best(free_tokens, avoid, skip_limit)
        else:
            other = self._best_holder(index, index.holders.get(adapter, ()), free_tokens, avoid)
        return max(key, other) if key is not None and other is not None else key or other

    def _best_holder(
        self, index: ShapeIndex, holders: Collection[str], free_tokens: int, avoid: Container[str]
    ) -> RunnerKey | None:
        if len(holders) > MAX_COMPARED:
            for visited, (key, _) in enumerate(index.full.descending(free_tokens)):
                if key.uuid in holders and key.uuid not in avoid:
                    return key
                if visited > len(holders):
                    break
        best: RunnerKey | None = None
        for uuid in holders:
            entry = self.entries[uuid]
            if entry.free_tokens >= free_tokens and uuid not in avoid and (best is None or entry.key > best):
                best = entry.key
        return best

    def _remove(self, uuid: str, entry: RunnerEntry) -> None:
        del self.entries[uuid]
        index = self.by_shape[entry.shape]
        index.treap(entry).drop(entry.key)
        index.hold(uuid, entry.busy_adapters or (), ())
        if not len(index):
            del self.by_shape[entry.shape]

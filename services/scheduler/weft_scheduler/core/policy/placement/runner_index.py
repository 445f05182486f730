"""A pool's placeable runners, indexed so that a decision does not iterate them.

Runners of one shape (the same maximum rank, context, numerics class and memory) share an index. Adapters and KV share
their pages: a request whose adapter is busy on a runner (a *holder*) needs pages for its tokens alone, any other also
those that its adapter will take. Where the number of adapters is bounded and reached (`full`), a runner takes only
what its busy adapters serve, and the base. So a change of a runner costs O(log runners), unless other adapters are
busy than before, and a decision searches two treaps for each shape.

Of the holders of an adapter either all are compared, or the runners are visited in placement order until a holder
comes: with k holders among n runners one of the two ends after about sqrt(n) steps. A treap for each adapter answers
in O(log k), but then each report of a runner costs as many changes as it has busy adapters: 1.6 ms at 64 of them.
"""

from collections.abc import Collection, Container
from heapq import merge
from typing import NamedTuple

from weft.domain.ids import BASE
from weft_scheduler.core.policy.placement.capacity_treap import CapacityTreap, RunnerKey, priority_of

MAX_COMPARED = 32  # holders; comparing them costs 10 us


class RunnerShape(NamedTuple):
    """The bounds of a runner's capacity, and its numerics class.

    `token_bytes`: bytes of a token's KV, the unit in which adapters take memory; 0: they have memory of their own.
    `kv_tokens`: what an idle runner has free at least, whatever is pinned. `kv_layout`: runners with equal ones can
    exchange KV; "": with none.
    """

    max_rank: int
    max_context_tokens: int
    numerics_class: str = ""
    token_bytes: int = 0
    kv_tokens: int = 0
    kv_layout: str = ""

    def fits(self, rank: int, context_tokens: int, numerics_class: str = "") -> bool:
        """Return whether such a request could run there. `numerics_class` "": any class will do."""
        large_enough = rank <= self.max_rank and context_tokens <= self.max_context_tokens
        return large_enough and numerics_class in ("", self.numerics_class)

    def tokens_with_adapter(self, footprint_tokens: int, adapter_bytes: int) -> int:
        """Return the tokens of a request whose adapter is not busy yet; never more for it than an idle runner has."""
        if not self.token_bytes:
            return footprint_tokens
        total_tokens = footprint_tokens - -adapter_bytes // self.token_bytes
        return max(footprint_tokens, min(total_tokens, self.kv_tokens))


class RunnerEntry(NamedTuple):
    """A placeable runner. `busy_adapters`: in use, or pinned; `full`: it takes no further adapters."""

    shape: RunnerShape
    key: RunnerKey
    free_tokens: int
    busy_adapters: tuple[str, ...]
    full: bool


class ShapeIndex:
    """The placeable runners of a common shape."""

    def __init__(self) -> None:
        self.open = CapacityTreap()
        self.full = CapacityTreap()
        self.holders: dict[str, set[str]] = {}  # adapter -> uuids of runners where it is busy

    def __len__(self) -> int:
        return len(self.open) + len(self.full)

    @property
    def free_tokens(self) -> int:
        """Maximum of the runners' free tokens."""
        return max(self.open.free_tokens, self.full.free_tokens)

    def treap(self, entry: RunnerEntry) -> CapacityTreap:
        """Return the present or future treap of this runner."""
        return self.full if entry.full else self.open

    def hold(self, uuid: str, old_adapters: Collection[str], adapters: Collection[str]) -> None:
        """Index a runner by its busy adapters: `adapters` instead of `old_adapters`."""
        for adapter in {*old_adapters}.difference(adapters):
            holders = self.holders[adapter]
            holders.discard(uuid)
            if not holders:
                del self.holders[adapter]
        for adapter in {*adapters}.difference(old_adapters):
            self.holders.setdefault(adapter, set()).add(uuid)


class RunnerIndex:
    """All placeable runners of a pool."""

    def __init__(self) -> None:
        self.by_shape: dict[RunnerShape, ShapeIndex] = {}
        self.entries: dict[str, RunnerEntry] = {}

    def update(self, uuid: str, entry: RunnerEntry | None) -> None:
        """Index a runner as it is now; None: nothing may be placed on it."""
        old_entry = self.entries.get(uuid)
        if entry == old_entry:
            return
        if old_entry is not None and (entry is None or entry.shape != old_entry.shape):
            del self.entries[uuid]
            index = self.by_shape[old_entry.shape]
            index.treap(old_entry).drop(old_entry.key)
            index.hold(uuid, old_entry.busy_adapters, ())
            if not len(index):
                del self.by_shape[old_entry.shape]
            old_entry = None
        if entry is None:
            return
        index = self.by_shape.setdefault(entry.shape, ShapeIndex())
        treap, key, free_tokens = index.treap(entry), entry.key, entry.free_tokens
        if old_entry is not None and key == old_entry.key and index.treap(old_entry) is treap:
            if free_tokens != old_entry.free_tokens:
                treap.resize(key, free_tokens)
        else:
            if old_entry is not None:
                index.treap(old_entry).drop(old_entry.key)
            treap.put(key, free_tokens, priority_of(uuid))
        old_adapters = old_entry.busy_adapters if old_entry is not None else ()
        if entry.busy_adapters is not old_adapters:
            index.hold(uuid, old_adapters, entry.busy_adapters)
        self.entries[uuid] = entry

    def best(
        self, shape: RunnerShape, adapter: str, free_tokens: int, avoid: Container[str], skip_limit: int,
        *, adapter_bytes: int = 0, slack: int = 0,
    ) -> RunnerKey | None:  # fmt: skip
        """Return the preferred runner of a shape with `free_tokens`, and room for `adapter` unless it is busy there.

        A runner where it is busy is preferred to one whose score is higher by no more than `slack`.
        """
        index = self.by_shape[shape]
        if adapter == BASE:
            key = index.open.best(free_tokens, avoid, skip_limit)
            candidate = index.full.best(free_tokens, avoid, skip_limit)
        else:
            key = index.open.best(shape.tokens_with_adapter(free_tokens, adapter_bytes), avoid, skip_limit)
            candidate = self._best_holder(index, index.holders.get(adapter, ()), free_tokens, avoid)
        if key is None or candidate is None:
            return key or candidate
        return candidate if slack and adapter != BASE and candidate.score + slack >= key.score else max(key, candidate)

    def _best_holder(
        self, index: ShapeIndex, holders: Collection[str], free_tokens: int, avoid: Container[str]
    ) -> RunnerKey | None:
        if len(holders) > MAX_COMPARED:
            in_order = merge(*(treap.descending(free_tokens) for treap in (index.open, index.full)), reverse=True)
            for visited, (key, _) in enumerate(in_order):
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

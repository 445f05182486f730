"""Adapters on all ranks: built beside steps, everywhere or nowhere; put and cleared in the order of the steps.

Steps that a rank has yet to run may still write to pages that were allocated to an adapter: each rank builds an
adapter after it has received all allocations that were made before.
"""

import itertools
import os
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weft.domain.model.spec import ModelSpec
from weft_runner.model.adapter_store import AdapterStore, DeviceAdapter, HostTensorStore
from weft_runner.model.arrays import Array
from weft_runner.model.lora import Scales, adapter_pairs
from weft_runner.parallel.commands import BuiltShard
from weft_runner.parallel.shared_tensors import RecordedScales, share_tensors


class OtherRanks(Protocol):
    """The methods of `worker_group.WorkerGroup` that are called here."""

    def broadcast(self, *command: Any) -> None: ...
    def request(self, *command: Any, file: int) -> None: ...
    def replies(self) -> list[Any]: ...


@dataclass(frozen=True, eq=False)
class ShardedAdapter:
    """Rank 0's part, and what the others call theirs; the ranks are the whole adapter's. See `DeviceAdapter`."""

    number: int
    local: DeviceAdapter
    rank: int
    site_rank: int
    n_bytes: int


class ShardedAdapterStore(HostTensorStore):
    """The AdapterStore of a ShardedExecutor: no rank has a larger part than rank 0.

    What is built and never put is forgotten when the next one is put.
    """

    def __init__(self, local: AdapterStore, workers: OtherRanks, model: ModelSpec) -> None:
        """`local`: rank 0's part."""
        self.own, self._workers, self._whole_spec = local, workers, model
        self._numbers = itertools.count(1)
        self._allocations = 0  # of pages to adapters, so far
        self._released: deque[int] = deque()  # of adapters without a reference here

    @property
    def page_bytes(self) -> int:
        return self.own.page_bytes

    @property
    def slots(self) -> int:
        return self.own.slots

    def device_bytes(self, tensors: Mapping[str, Array], scales: Scales) -> int:
        return self.own.device_bytes(tensors, scales)

    def build(self, tensors: Mapping[str, Array], scales: Scales, pages: Sequence[int] = ()) -> ShardedAdapter:
        """Build on every rank; returns when all have built their part. Raises ExecutorLost too."""
        recorded = self._recorded(tensors, scales)
        number = next(self._numbers)
        self._request("build", tensors, recorded, (number, pages, self._allocations))
        try:
            try:
                local = self.own.build(tensors, scales, pages)
            finally:
                shards = self._workers.replies()
        except Exception:
            self._released.append(number)
            raise
        adapter = self._sharded(number, local, shards)
        weakref.finalize(adapter, self._released.append, number).atexit = False
        return adapter

    def put(self, slot: int, adapter: DeviceAdapter) -> None:
        assert isinstance(adapter, ShardedAdapter), adapter
        released = [self._released.popleft() for _ in range(len(self._released))]
        self._workers.broadcast("put", slot, adapter.number, released)
        self.own.put(slot, adapter.local)

    def clear(self, slot: int) -> None:
        self._workers.broadcast("clear", slot)
        self.own.clear(slot)

    def on_pages_allocated(self) -> None:
        """Count an allocation of pages to adapters, which the other ranks were sent. The engine's thread."""
        self._allocations += 1

    # ---- the builder's thread

    def _sharded(self, number: int, local: DeviceAdapter, shards: Sequence[BuiltShard]) -> ShardedAdapter:
        del shards  # none is larger
        return ShardedAdapter(number, local, local.rank, local.site_rank, local.n_bytes)

    def _recorded(self, tensors: Mapping[str, Array], scales: Scales) -> RecordedScales:
        """Record the scales of all modules, whichever rank has them. Raises AdapterInvalid before anything is sent."""
        recorded = RecordedScales(scales)
        adapter_pairs(tensors, recorded, self._whole_spec)
        return recorded

    def _request(
        self, name: str, tensors: Mapping[str, Array], scales: RecordedScales, arguments: tuple[object, ...] = ()
    ) -> None:
        file, table = share_tensors(tensors)
        try:
            self._workers.request(name, table, scales.by_module, *arguments, file=file)
        finally:
            os.close(file)


class PipelineAdapterStore(ShardedAdapterStore):
    """The AdapterStore of a PipelinedExecutor: stages have more layers or fewer, and an adapter may skip some of them.

    Pages have the same numbers on all stages, so that it takes as many as the stage that needs most of them.
    """

    def __init__(self, local: AdapterStore, workers: OtherRanks, model: ModelSpec, page_bytes: int) -> None:
        """`page_bytes`: of a KV page on stage 0, in which adapters are counted."""
        super().__init__(local, workers, model)
        self._kv_page_bytes = page_bytes

    def device_bytes(self, tensors: Mapping[str, Array], scales: Scales) -> int:
        recorded = self._recorded(tensors, scales)
        local = self.own.device_bytes(tensors, recorded)
        self._request("device_bytes", tensors, recorded)
        return self._max_bytes(local, self._workers.replies())

    def _sharded(self, number: int, local: DeviceAdapter, shards: Sequence[BuiltShard]) -> ShardedAdapter:
        rank = max(local.rank, *(shard.rank for shard in shards))
        site_rank = max(local.site_rank, *(shard.site_rank for shard in shards))
        return ShardedAdapter(number, local, rank, site_rank, self._max_bytes(local.n_bytes, shards))

    def _max_bytes(self, own_bytes: int, shards: Sequence[BuiltShard]) -> int:
        pages = max(-(-own_bytes // self._kv_page_bytes), *(shard.pages for shard in shards))
        return pages * self._kv_page_bytes

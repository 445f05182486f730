"""Adapters packed for the native kernels, by slot: each in memory of its own, of the size that its true ranks need.

A site's A matrices are stacked, so that a shrink reads its input once; each projection keeps its own B. Blocks follow
each other in one piece of memory, in the order in which a step reads them.
"""

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weft_kernels.cpu.library import Library
from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.threads import ThreadPool
from weft_runner.model.adapter_store import MAX_LAYOUTS, DeviceAdapter, FileLayout, HostTensorStore, MappedTensors
from weft_runner.model.arrays import Array
from weft_runner.model.cpu.adapter_plan import AdapterPacking, Plan, Planner, Slices, Structs
from weft_runner.model.lora import Scales, adapter_pairs
from weft_runner.model.partition import Partition

# Of adapters that have left, for the next ones of their size: memory that is touched for the first time costs more than
# packing does, in a virtual machine whose free pages go back to the host 20 ms for 10 MB.
SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class CpuAdapter:
    """`sites` [L * 4] point into `memory`. `site_rank` counts each projection's rank rounded up to 2."""

    sites: Structs
    memory: MappedMemory
    rank: int
    site_rank: int

    @property
    def n_bytes(self) -> int:
        return self.memory.n_bytes


class CpuAdapterStore(HostTensorStore):
    """The AdapterStore of the native executor. `table`: slot -> address of its sites, which a step reads.

    `complete` does the slices of a load and returns after the last one; they run on the threads of `pool`.
    """

    def __init__(self, library: Library, pool: ThreadPool, part: Partition, slots: int, kind: int) -> None:
        """`part`: of the model, which adapters are cut to."""
        self.table = (ctypes.c_void_p * slots)()
        self.complete: Callable[[Slices], None] = run_slices
        self._library, self._pool, self._part, self._kind = library, pool, part, kind
        self._planner = Planner(library, part, kind)
        self._plans: dict[FileLayout, Plan] = {}  # of the builder's thread; the one that was made first leaves first
        self._held: dict[int, CpuAdapter] = {}
        self._spare = SpareMemory(SPARE_BYTES)

    @property
    def site_rank(self) -> int:
        """The widest site of all that are here."""
        return max((adapter.site_rank for adapter in self._held.values()), default=0)

    @property
    def page_bytes(self) -> int:
        return 0

    @property
    def slots(self) -> int:
        return len(self.table)

    def n_bytes(self, slot: int) -> int:
        """Bytes of the adapter in that slot; 0: none is there."""
        adapter = self._held.get(slot)
        return 0 if adapter is None else adapter.n_bytes

    def device_bytes(self, tensors: Mapping[str, Array], scales: Scales) -> int:
        return self._plan(tensors, scales)[0].n_bytes

    def build(self, tensors: Mapping[str, Array], scales: Scales, pages: Sequence[int] = ()) -> CpuAdapter:
        del pages  # memory of its own: its KV pages stay untouched
        plan, kept = self._plan(tensors, scales)
        memory = self._spare.take(plan.n_bytes)
        adapter = CpuAdapter(plan.sites_at(memory.address, scales), memory, plan.rank, plan.site_rank)
        packing = AdapterPacking(plan.jobs_at(memory.address, _address(tensors)), plan.ends, (memory, tensors, kept))
        self.complete(packing.slices(self._library, self._pool, self._kind))
        return adapter

    def put(self, slot: int, adapter: DeviceAdapter) -> None:
        assert isinstance(adapter, CpuAdapter), adapter
        self._held[slot] = adapter
        self.table[slot] = adapter.sites.ctypes.data

    def clear(self, slot: int) -> None:
        self.table[slot] = None
        if (adapter := self._held.pop(slot, None)) is not None:
            self._spare.give(adapter.memory)

    def _plan(self, tensors: Mapping[str, Array], scales: Scales) -> tuple[Plan, Sequence[Array]]:
        """Return the plan, and the tensors that have to live until it is carried out. Raises AdapterInvalid."""
        if isinstance(tensors, MappedTensors) and (known := self._plans.get(tensors.layout)) is not None:
            return known, ()
        file = _address(tensors)
        pairs = self._part.pairs(adapter_pairs(tensors, scales, self._part.whole))
        plan, read = self._planner.plan(pairs, file)
        if isinstance(tensors, MappedTensors) and all(0 <= t.ctypes.data - file < tensors.n_bytes for t in read):
            if len(self._plans) == MAX_LAYOUTS:
                del self._plans[next(iter(self._plans))]
            self._plans[tensors.layout] = plan
        return plan, read


class SpareMemory:
    """Memory that nobody needs, bounded in bytes; what was given first leaves first. Any thread."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._pieces: list[MappedMemory] = []
        self._lock = threading.Lock()

    def take(self, n_bytes: int) -> MappedMemory:
        """A piece of this size, with anything in it, or a new one."""
        with self._lock:
            for index, piece in enumerate(self._pieces):
                if piece.n_bytes == n_bytes:
                    return self._pieces.pop(index)
        return MappedMemory(n_bytes)

    def give(self, piece: MappedMemory) -> None:
        with self._lock:
            self._pieces.append(piece)
            while sum(each.n_bytes for each in self._pieces) > self._most_bytes:
                self._pieces.pop(0)


def run_slices(slices: Slices) -> None:
    """All of them, one after the other."""
    for _ in slices:
        pass


def _address(tensors: Mapping[str, Array]) -> int:
    """What the sources of its plan are counted from."""
    return tensors.address if isinstance(tensors, MappedTensors) else 0

"""Where an executor's bytes lie, tier by tier: what a plan or a share of the budgets becomes. Pure and exact.

Without a GPU device and host are one memory: what the host may have is more of it, KV there is read where it lies, and
nothing is copied. KV lies in whole pages: so many of them in memory, the others in a file, from where a layer of a
micro-batch's pages passes through a ring. Activations between layers stay in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from weft_runner.errors import PolicyInvalid
from weft_runner.offload.plan import OffloadPlan
from weft_runner.offload.policy import Budgets, MemoryTier
from weft_runner.offload.residency import WeightResidency, least_bytes, place_weights, planned_weights
from weft_runner.offload.sizes import ALIGN, round_up

RING_PARTS = 4  # of the pages on disk, that one micro-batch may have where no plan says how many


@dataclass(frozen=True, slots=True)
class KvSplit:
    """`pages` of KV and adapters, `disk_pages` of them in a file. `batch_pages`: of a micro-batch on disk, at most."""

    pages: int
    disk_pages: int
    batch_pages: int
    layers: int
    layer_bytes: int  # of a page
    buffers: int  # of a micro-batch each

    @property
    def page_bytes(self) -> int:
        return self.layers * self.layer_bytes

    @property
    def frames(self) -> int:
        """Pages in memory."""
        return self.pages - self.disk_pages

    @property
    def ring_slots(self) -> int:
        """Layers of pages on their way: with two buffers one is loaded or stored while another is computed with."""
        return self.buffers * self.batch_pages

    @property
    def memory_bytes(self) -> int:
        """Frames and ring."""
        return self.frames * self.page_bytes + self.ring_slots * self.layer_bytes

    @property
    def disk_bytes(self) -> int:
        """Of the file."""
        return self.disk_pages * self.layers * round_up(self.layer_bytes, ALIGN)


@dataclass(frozen=True, slots=True)
class TierPlacement:
    """`work_bytes`: what steps work on, activations included; `packed_bytes`: of the file of all weights."""

    weights: WeightResidency
    kv: KvSplit
    work_bytes: int
    packed_bytes: int
    embedding_bytes: int

    @property
    def memory_bytes(self) -> int:
        """Of the device and the host."""
        weights = self.weights.resident_bytes + self.weights.ring_bytes
        return weights + self.embedding_bytes * self.weights.embedding + self.kv.memory_bytes + self.work_bytes

    @property
    def disk_bytes(self) -> int:
        return self.packed_bytes + self.kv.disk_bytes


def split_kv(
    pages: int, disk_pages: int, *, row_pages: int, layers: int, page_bytes: int, batch_pages: int = 0,
    buffers: int = 2,
) -> KvSplit:  # fmt: skip
    """`row_pages`: most that one row has; `batch_pages`: that a micro-batch is to have on disk (0: a fair part).

    Raises PolicyInvalid.
    """
    if not 0 <= disk_pages <= pages:
        raise PolicyInvalid(f"{disk_pages} of {pages} KV pages on the disk")
    part = batch_pages or -(-disk_pages // RING_PARTS)
    most = min(disk_pages, max(part, row_pages))
    return KvSplit(pages, disk_pages, most, layers, page_bytes // layers, buffers)


def planned_kv(plan: OffloadPlan, page_bytes: int) -> tuple[int, int]:
    """(pages on the disk, of them those of a device batch)."""
    disk_pages = -(-plan.usage[MemoryTier.DISK].kv // page_bytes)
    sequences = plan.policy.block - plan.kv_device - plan.kv_host
    return disk_pages, -(-disk_pages * min(plan.policy.batch, sequences) // max(1, sequences))


def place(
    groups: Sequence[Sequence[int]], embedding_bytes: int, kv: KvSplit, budgets: Budgets, *, work_bytes: int,
    packed_bytes: int, share: float = 1.0, plan: OffloadPlan | None = None,
) -> TierPlacement:  # fmt: skip
    """Of `groups` of matrices (`WeightResidency`) what a plan keeps, or as much as fits, at most `share`.

    Raises PolicyInvalid: the plan is of something else, or does not fit. The budgets have room for `least_memory`.
    """
    left = budgets.device_bytes + budgets.host_bytes - kv.memory_bytes - work_bytes
    if plan is None:
        weights = place_weights(groups, embedding_bytes, left, share)
    else:
        if plan.activations is MemoryTier.DISK:
            raise PolicyInvalid("the plan has activations on the disk, and the cpu executor keeps them in memory")
        weights = planned_weights(groups, plan, left)
    return TierPlacement(weights, kv, work_bytes, packed_bytes, embedding_bytes)


def least_memory(groups: Sequence[Sequence[int]], kv: KvSplit, work_bytes: int) -> int:
    """With which a pass can be computed."""
    return kv.memory_bytes + work_bytes + least_bytes(groups)


def check_placement(placement: TierPlacement, budgets: Budgets) -> None:
    """No tier has more than its budget, nothing is lost or twice."""
    weights, kv = placement.weights, placement.kv
    assert placement.memory_bytes <= budgets.device_bytes + budgets.host_bytes, placement
    assert placement.disk_bytes <= budgets.disk_bytes, placement
    assert weights.resident_bytes + weights.streamed_bytes == sum(map(sum, weights.groups)), weights
    assert weights.ring_bytes >= max(weights.streamed, default=0), weights
    assert kv.frames + kv.disk_pages == kv.pages, kv
    assert (kv.ring_slots > 0) == (kv.disk_pages > 0), kv

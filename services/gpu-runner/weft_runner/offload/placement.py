"""Placement of an executor's bytes, tier by tier, from a plan or a share of the budgets. Pure and exact.

Without a GPU device and host are one memory: what the host may have is more of it, KV there is read where it lies, and
nothing is copied. KV lies in whole pages: some of them in memory, the others in a file, from where a layer of a
micro-batch's pages passes through a ring. Activations are hidden rows between layers: of the largest pass the first
ones are in memory, the others in a file, from where a micro-batch's rows pass through a ring of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft_runner.errors import PolicyInvalid
from weft_runner.offload.plan import OffloadPlan
from weft_runner.offload.policy import Budgets
from weft_runner.offload.residency import WeightResidency, place_weights, planned_weights
from weft_runner.offload.sizes import ALIGN, round_up

RING_PARTS = 4  # of the pages outside, that one micro-batch may have where no plan says how many


@dataclass(frozen=True, slots=True)
class KvSplit:
    """`pages` of KV and adapters, `outside_pages` of them in a file, or beside a GPU in memory of the host.

    `batch_pages`: of a micro-batch outside, at most.
    """

    pages: int
    outside_pages: int
    batch_pages: int
    layers: int
    layer_bytes: int  # of a page
    buffers: int  # of a micro-batch each

    @property
    def page_bytes(self) -> int:
        return self.layers * self.layer_bytes

    @property
    def frames(self) -> int:
        """Pages in the memory that computes."""
        return self.pages - self.outside_pages

    @property
    def ring_slots(self) -> int:
        """Layers of pages on their way: with three buffers one is loaded and one stored while one is computed with."""
        return self.buffers * self.batch_pages

    @property
    def memory_bytes(self) -> int:
        """Frames and ring."""
        return self.frames * self.page_bytes + self.ring_slots * self.layer_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the host, if the outside pages are there."""
        return self.outside_pages * self.page_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file, if the outside pages are in one."""
        return self.outside_pages * self.layers * round_up(self.layer_bytes, ALIGN)


@dataclass(frozen=True, slots=True)
class ActivationSplit:
    """Hidden rows of the largest pass, of `row_bytes` each: the last `outside_rows` of `rows` are in a file, or beside
    a GPU in memory of the host.

    `batch_rows`: of a micro-batch, at most; `batches`: micro-batches of a pass, at most; `buffers`: of one each.
    """

    rows: int
    outside_rows: int
    batch_rows: int
    batches: int
    row_bytes: int
    buffers: int

    @property
    def memory_rows(self) -> int:
        """Rows that stay in the memory that computes: the first ones of a pass that has rows outside."""
        return self.rows - self.outside_rows

    @property
    def ring_at(self) -> int:
        """Offset in memory at which the ring begins: after the rows that stay."""
        return round_up(self.memory_rows * self.row_bytes, ALIGN)

    @property
    def ring_bytes(self) -> int:
        return self.buffers * round_up(self.batch_rows * self.row_bytes, ALIGN) if self.outside_rows else 0

    @property
    def memory_bytes(self) -> int:
        return self.ring_at + self.ring_bytes if self.outside_rows else self.rows * self.row_bytes

    @property
    def whole_rows(self) -> int:
        """Rows of the largest pass that has none outside: memory and ring hold it."""
        return self.memory_bytes // self.row_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the host, if the outside rows are there.

        The first micro-batch may have rows that had room in memory.
        """
        return min(self.rows, self.outside_rows + self.batch_rows) * self.row_bytes if self.outside_rows else 0

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file, if the outside rows are in one: a micro-batch begins on a block."""
        return round_up(self.host_bytes, ALIGN) + self.batches * ALIGN if self.outside_rows else 0


@dataclass(frozen=True, slots=True)
class TierPlacement:
    """`work_bytes`: what steps work on beside activations; `packed_bytes`: of the file of all weights."""

    weights: WeightResidency
    kv: KvSplit
    activations: ActivationSplit
    work_bytes: int
    packed_bytes: int
    embedding_bytes: int

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device and the host."""
        weights = self.weights.resident_bytes + self.weights.ring_bytes
        embedding = self.embedding_bytes * self.weights.embedding
        return weights + embedding + self.kv.memory_bytes + self.activations.memory_bytes + self.work_bytes

    @property
    def disk_bytes(self) -> int:
        return self.packed_bytes + self.kv.disk_bytes + self.activations.disk_bytes


def split_kv(
    pages: int, outside_pages: int, *, row_pages: int, layers: int, page_bytes: int, batch_pages: int = 0,
    buffers: int = 3,
) -> KvSplit:  # fmt: skip
    """`row_pages`: most that one row has; `batch_pages`: that a micro-batch is to have outside (0: a fair part).

    Raises PolicyInvalid.
    """
    if not 0 <= outside_pages <= pages:
        raise PolicyInvalid(f"{outside_pages} of {pages} KV pages outside of the memory that computes")
    part = batch_pages or -(-outside_pages // RING_PARTS)
    most = min(outside_pages, max(part, row_pages))
    return KvSplit(pages, outside_pages, most, layers, page_bytes // layers, buffers)


def split_activations(
    rows: int, outside_rows: int, *, batch_rows: int, sequences: int, row_bytes: int, buffers: int = 2
) -> ActivationSplit:
    """`sequences`: rows of a step, at each of which a micro-batch may begin. None outside where that saves nothing.

    Raises PolicyInvalid.
    """
    if not 0 <= outside_rows <= rows:
        raise PolicyInvalid(f"activations of {outside_rows} of {rows} tokens outside of the memory that computes")
    batches = -(-rows // batch_rows) + sequences
    split = ActivationSplit(rows, outside_rows, batch_rows, batches, row_bytes, buffers)
    return split if split.whole_rows < rows else replace(split, outside_rows=0)


def place(
    groups: Sequence[Sequence[int]], embedding_bytes: int, kv: KvSplit, activations: ActivationSplit, budgets: Budgets,
    *, work_bytes: int, packed_bytes: int, share: float = 1.0, plan: OffloadPlan | None = None,
) -> TierPlacement:  # fmt: skip
    """Place `groups` of matrices (`WeightResidency`) as a plan says, or as many as fit, at most `share` of their bytes.

    The budgets have room for `least_bytes` of weights. Raises PolicyInvalid: the plan is of another model, or does not
    fit.
    """
    left = budgets.device_bytes + budgets.host_bytes - kv.memory_bytes - activations.memory_bytes - work_bytes
    if plan is None:
        weights = place_weights(groups, embedding_bytes, left, share)
    else:
        weights = planned_weights(groups, plan, left)
    return TierPlacement(weights, kv, activations, work_bytes, packed_bytes, embedding_bytes)


def check_placement(placement: TierPlacement, budgets: Budgets) -> None:
    """No tier has more than its budget, nothing is lost or twice."""
    weights, kv, activations = placement.weights, placement.kv, placement.activations
    assert placement.memory_bytes <= budgets.device_bytes + budgets.host_bytes, placement
    assert placement.disk_bytes <= budgets.disk_bytes, placement
    assert weights.resident_bytes + weights.streamed_bytes == sum(map(sum, weights.groups)), weights
    assert weights.ring_bytes >= max(weights.streamed, default=0), weights
    check_kv(kv)
    check_activations(activations)


def check_activations(activations: ActivationSplit) -> None:
    """Every row is on one tier, and what is outside takes less memory than in it."""
    assert activations.memory_rows + activations.outside_rows == activations.rows, activations
    assert (activations.outside_rows > 0) == (activations.whole_rows < activations.rows), activations
    assert activations.memory_bytes <= activations.rows * activations.row_bytes, activations


def check_kv(kv: KvSplit) -> None:
    """Every page is on one tier, and what is outside has a way to where it is computed with."""
    assert kv.frames + kv.outside_pages == kv.pages, kv
    assert 0 <= kv.batch_pages <= kv.outside_pages <= kv.pages, kv
    assert (kv.ring_slots > 0) == (kv.outside_pages > 0), kv

"""Placement of a GPU executor's weights, KV and activations: on the device, in pinned memory, weights also on disk.

Pure and exact.
What steps work on is on the device. Weights that are not there pass through a ring on it, group by group, and from the
disk through a ring of the host before. KV is on the device or in pinned memory, in whole pages; a layer of the pages
there passes through a ring of its own, part by part of a step. Activations are on the device or in pinned memory, and
pass through buffers, device batch by device batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft_runner.errors import NoPolicyFits, PolicyInvalid
from weft_runner.offload.placement import ActivationSplit, KvSplit, check_activations, check_kv
from weft_runner.offload.plan import OffloadPlan, WeightTiers
from weft_runner.offload.policy import Budgets, MemoryTier
from weft_runner.offload.residency import WeightResidency, best_resident, least_bytes, shape_of, with_ring
from weft_runner.offload.rounding import host_part, weight_tiers


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """`weights`: of each group what stays on the device; `tiers`: where each of its matrices lies.

    `kv`: with adapters. `work_bytes`: of the device, for steps; `staging_bytes`: the host's ring of weights;
    `packed_bytes`: of the file of all weights.
    """

    weights: WeightResidency
    tiers: tuple[tuple[MemoryTier, ...], ...]
    staging_bytes: int
    kv: KvSplit
    activations: ActivationSplit
    work_bytes: int
    packed_bytes: int

    @property
    def device_bytes(self) -> int:
        weights = self.weights.resident_bytes + self.weights.ring_bytes
        return weights + self.kv.memory_bytes + self.activations.memory_bytes + self.work_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of weights that lie on the host."""
        return sum(map(sum, self.of(MemoryTier.HOST)))

    @property
    def disk_read(self) -> tuple[int, ...]:
        """Bytes of each group that a pass reads from the disk."""
        return tuple(sum(sizes) for sizes in self.of(MemoryTier.DISK))

    def of(self, tier: MemoryTier) -> list[list[int]]:
        """Bytes of the matrices of each group that lie there."""
        return [
            [n for n, at in zip(sizes, tiers, strict=True) if at is tier]
            for sizes, tiers in zip(self.weights.groups, self.tiers, strict=True)
        ]


def place_on_device(
    groups: Sequence[Sequence[int]], budgets: Budgets, kv: KvSplit, activations: ActivationSplit, *, work_bytes: int,
    packed_bytes: int, share: float = 1.0, plan: OffloadPlan | None = None,
) -> DevicePlacement:  # fmt: skip
    """Place as a plan says; without one, at most `share` on the device, as far as it fits, and the rest on the host.

    Raises NoPolicyFits: a tier is too small; PolicyInvalid: the plan is of something else.
    """
    work_needs = work_bytes + activations.memory_bytes
    left = budgets.device_bytes - kv.memory_bytes - work_needs
    if (short := least_bytes(groups) - left) > 0:
        raise NoPolicyFits(
            f"deviceBytes {budgets.device_bytes} is {short} too small: {kv.memory_bytes} for KV and adapters, "
            f"{work_needs} for steps and {least_bytes(groups)} for one layer's weights on their way: allow more, or "
            "ask for fewer --kv-pages, --max-batch-tokens or --max-sequences",
            MemoryTier.DEVICE,
            short,
        )
    if packed_bytes > budgets.disk_bytes:
        short = packed_bytes - budgets.disk_bytes
        raise NoPolicyFits(
            f"diskBytes {budgets.disk_bytes} is {short} too small: packed weights take {packed_bytes}",
            MemoryTier.DISK,
            short,
        )
    tiers, buffers = (
        _greedy(groups, budgets, kv.host_bytes + activations.host_bytes, left, share)
        if plan is None
        else (plan.tiers, plan.buffers)
    )
    every = tiers.of_groups(len(groups))
    weights = with_ring(groups, [tuple(at is MemoryTier.DEVICE for at in one) for one in every], buffers)
    placed = DevicePlacement(weights, every, 0, kv, activations, work_bytes, packed_bytes)
    most, total = max(placed.disk_read, default=0), sum(placed.disk_read)
    placed = replace(placed, staging_bytes=min(buffers * most, total))
    for tier, needed in ((MemoryTier.DEVICE, placed.device_bytes), (MemoryTier.HOST, _host_needs(placed))):
        if needed > budgets.of(tier):
            raise PolicyInvalid(f"the plan takes {needed} bytes of the {tier}, which has {budgets.of(tier)}")
    return placed


def check_device_placement(placed: DevicePlacement, budgets: Budgets) -> None:
    """No tier has more than its budget, nothing is lost or twice."""
    weights = placed.weights
    check_kv(placed.kv)
    check_activations(placed.activations)
    assert placed.device_bytes <= budgets.device_bytes, placed
    assert _host_needs(placed) <= budgets.host_bytes, placed
    assert placed.packed_bytes <= budgets.disk_bytes, placed
    assert weights.resident_bytes + placed.host_bytes + sum(placed.disk_read) == sum(map(sum, weights.groups)), placed
    assert weights.ring_bytes >= max(weights.streamed, default=0), placed
    assert placed.staging_bytes >= max(placed.disk_read, default=0), placed


def _host_needs(placed: DevicePlacement) -> int:
    return placed.host_bytes + placed.staging_bytes + placed.kv.host_bytes + placed.activations.host_bytes


def _greedy(
    groups: Sequence[Sequence[int]], budgets: Budgets, beside: int, left: int, share: float
) -> tuple[WeightTiers, int]:
    """(tiers, buffers). `left`: bytes of the device for weights; `beside`: of the host for all else."""
    shape, total, host = shape_of(groups), sum(map(sum, groups)), budgets.host_bytes - beside
    if total <= left and share >= 1.0 and host >= 0:
        whole, n = MemoryTier.DEVICE, shape.layers
        return weight_tiers(shape, (n, n, n, n), (0, 0, 0, 0), whole), 1
    best, buffers = best_resident(shape, left, share)
    part = host_part(shape, best, total - best.bytes, host)
    if part is None:
        short = best.ring - host
        raise NoPolicyFits(
            f"hostBytes {budgets.host_bytes} is {short} too small: KV and activations take {beside}, and weights that "
            f"come from the disk pass through {best.ring} bytes of the host on their way to the GPU",
            MemoryTier.HOST,
            short,
        )
    head = MemoryTier.DEVICE if best.head else MemoryTier.HOST if part.head else MemoryTier.DISK
    return weight_tiers(shape, best.counts, part.counts, head), buffers

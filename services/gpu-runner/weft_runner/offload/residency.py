"""The matrices of a model that stay in memory; the others come from disk each time their layer is computed. Pure.

FlexGen's `wg` and `wd` (section 4.2) at the grain of a matrix. What stays is spread evenly over the layers, so that the
disk has as much to read for one layer as for the next. What comes is read into a ring: a **group** is what one layer,
or one piece of the head, has on disk; groups come in the order of a step, and the ring holds two of the largest, so
that one is read while another is computed with.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from weft_runner.errors import PolicyInvalid
from weft_runner.offload.plan import BUFFERS, MATRICES, OffloadPlan
from weft_runner.offload.policy import MemoryTier
from weft_runner.offload.rounding import Resident, every_resident, resident_layers
from weft_runner.offload.sizes import WeightShape


@dataclass(frozen=True, slots=True)
class WeightResidency:
    """`resident`: of each group, which of its matrices stay. `ring_bytes`: 0 if all do."""

    groups: tuple[tuple[int, ...], ...]  # bytes of each matrix
    resident: tuple[tuple[bool, ...], ...]
    ring_bytes: int
    embedding: bool  # it stays, too

    @property
    def resident_bytes(self) -> int:
        return sum(n for sizes, stay in self._rows() for n, here in zip(sizes, stay, strict=True) if here)

    @property
    def streamed_bytes(self) -> int:
        """Bytes that each pass over the model reads."""
        return sum(self.streamed)

    @property
    def streamed(self) -> tuple[int, ...]:
        """Bytes that a pass reads for each group."""
        return tuple(
            sum(n for n, here in zip(sizes, stay, strict=True) if not here) for sizes, stay in self._rows()
        )  # fmt: skip

    @property
    def share(self) -> float:
        """Share of the weights that stays: FlexGen's wg."""
        return self.resident_bytes / max(1, self.resident_bytes + self.streamed_bytes)

    def _rows(self) -> "zip[tuple[tuple[int, ...], tuple[bool, ...]]]":
        return zip(self.groups, self.resident, strict=True)


def least_bytes(groups: Sequence[Sequence[int]]) -> int:
    """Return the least bytes that any pass can be computed with: the largest group, alone in the ring."""
    return max(map(sum, groups), default=0)


def place_weights(
    groups: Sequence[Sequence[int]], embedding_bytes: int, budget: int, share: float = 1.0
) -> WeightResidency:
    """Keep as much as fits into `budget` beside the ring, at most `share` of it. `budget` is at least `least_bytes`.

    `groups`: layers, which are alike, then the head's pieces. What stays is among what a plan may keep. The embedding,
    of which a step reads a few rows, stays only where everything else does.
    """
    assert budget >= least_bytes(groups), (budget, least_bytes(groups))
    total = sum(map(sum, groups))
    if total <= budget and share >= 1.0:
        stay = tuple((True,) * len(sizes) for sizes in groups)
        return WeightResidency(tuple(map(tuple, groups)), stay, 0, embedding_bytes <= budget - total)
    shape = shape_of(groups)
    best, buffers = best_resident(shape, budget, share)
    stay = [*resident_layers(shape.layers, best.counts), *([(best.head,)] * (len(groups) - shape.layers))]
    return with_ring(groups, stay, buffers)


def shape_of(groups: Sequence[Sequence[int]]) -> WeightShape:
    """Return the sizes of a layer, all of which are alike, and of the head's pieces."""
    layers = [sizes for sizes in groups if len(sizes) == len(MATRICES)]
    pieces = [sum(sizes) for sizes in groups[len(layers) :]]
    return WeightShape(len(layers), tuple(layers[0]), sum(pieces), max(pieces, default=0))


def best_resident(shape: WeightShape, budget: int, share: float) -> tuple[Resident, int]:
    """What stays, and how many of the largest group the ring holds."""
    total = sum(shape.matrices) * shape.layers + shape.head
    for buffers in BUFFERS:
        every = every_resident(shape, buffers)
        fitting = [one for one in every if one.device_bytes <= budget and one.bytes <= share * total]
        if fitting:
            return max(fitting, key=lambda one: (one.bytes, -one.device_bytes, one.counts)), buffers
    raise AssertionError("nothing resident and one group in the ring fit, as was asserted")


def planned_weights(groups: Sequence[Sequence[int]], plan: OffloadPlan, budget: int) -> WeightResidency:
    """Keep what a plan keeps. What it has on the host stays, too: device and host are one memory.

    Raises PolicyInvalid: it is of another model or stage, or does not fit.
    """
    stay = [tuple(tier is not MemoryTier.DISK for tier in group) for group in plan.tiers.of_groups(len(groups))]
    found = with_ring(groups, stay, plan.buffers)
    if (needed := found.resident_bytes + found.ring_bytes) > budget:
        raise PolicyInvalid(f"the plan's weights and ring take {needed} bytes, and the budget leaves {budget} for them")
    return found


def with_ring(groups: Sequence[Sequence[int]], stay: Sequence[tuple[bool, ...]], depth: int) -> WeightResidency:
    """Return the residency with a ring for `depth` of the largest group."""
    whole = WeightResidency(tuple(map(tuple, groups)), tuple(stay), 0, embedding=False)
    return replace(whole, ring_bytes=min(depth * max(whole.streamed, default=0), whole.streamed_bytes))


class Ring:
    """Memory of `n_bytes` that is taken piece by piece, each in one part, and released in the same order.

    A piece that does not fit before the end begins at 0 again. An empty ring has room for any piece up to `n_bytes`.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._held: deque[tuple[int, int]] = deque()  # (offset, bytes), oldest first

    def take(self, n_bytes: int) -> int | None:
        """Take a piece. Returns its offset; None while there is no room for it."""
        assert 0 < n_bytes <= self.n_bytes, (n_bytes, self.n_bytes)
        offset = self._place(n_bytes)
        if offset is not None:
            self._held.append((offset, n_bytes))
        return offset

    def release(self) -> None:
        """The oldest."""
        self._held.popleft()

    def clear(self) -> None:
        self._held.clear()

    def _place(self, n_bytes: int) -> int | None:
        if not self._held:
            return 0
        (oldest, _), (newest, last) = self._held[0], self._held[-1]
        end = newest + last
        if newest < oldest:  # wrapped
            return end if end + n_bytes <= oldest else None
        if end + n_bytes <= self.n_bytes:
            return end
        return 0 if n_bytes <= oldest else None


def offsets(sizes: Sequence[int]) -> list[int]:
    """Return the offset of each piece of a row."""
    return [0, *accumulate(sizes)][:-1]

"""What a part of a step has outside: on a slower tier than that where it is computed with. Pure.

Such pages pass through a ring, a layer at a time: slots of it on the one side, extents of the slower tier on the other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft_runner.model.step import Ints, StepArrays
from weft_runner.model.tiers.micro_batches import MicroBatch
from weft_runner.model.tiers.read_ahead import SlowTier
from weft_runner.offload.residency import offsets


@dataclass(frozen=True, slots=True)
class SlotRun:
    """`count` slots of a ring from `slot` on, and as many extents of the tier below."""

    slot: int
    extent: int
    count: int

    def parts(self, most: int) -> Iterator["SlotRun"]:
        """Cut it into runs of at most `most` slots."""
        for done in range(0, self.count, most):
            yield SlotRun(self.slot + done, self.extent + done, min(most, self.count - done))


@dataclass(frozen=True, slots=True, eq=False)
class OutsidePages:
    """What a part of a step reads and writes outside. Slots [0, n) have a page each, in the order of their extents.

    `columns`: places in the step's list of pages that refer to one, `slots`: to which. `clears`: pages that begin.
    """

    n: int
    columns: Ints
    slots: Ints
    loads: tuple[SlotRun, ...]
    clears: tuple[SlotRun, ...]
    stores: tuple[SlotRun, ...]
    reads: frozenset[int]  # extents
    writes: frozenset[int]


def outside_pages(
    rows: Ints, arrays: StepArrays, places: Ints, page_tokens: int, window: int = 0, block: int = 1
) -> OutsidePages | None:
    """Find what rows [R, 4] (start, end, position, where its pages begin in `arrays.pages`) have outside.

    `places`: of `PagePlaces`; `window`: of the layer (0: none). The `block` of keys in which a row's begins is computed
    with as a whole. None: they have none outside.
    """
    position, end = rows[:, 2], rows[:, 2] + rows[:, 1] - rows[:, 0]
    seen = np.maximum(position + 1 - window, 0) if window else np.zeros_like(position)
    first = seen // block * block // page_tokens
    used = -(-end // page_tokens) - first
    of_row = np.repeat(np.arange(len(rows)), used)
    index = np.arange(len(of_row)) - np.repeat(np.cumsum(used) - used - first, used)
    columns = rows[of_row, 3] + index
    place = places[arrays.pages[columns]]
    outside = place < 0
    if not outside.any():
        return None
    columns, of_row, index = columns[outside], of_row[outside], index[outside]
    extents, slots = np.unique(~place[outside], return_inverse=True)
    begins, is_written = np.zeros(len(extents), bool), np.zeros(len(extents), bool)
    begins[slots[index * page_tokens >= position[of_row]]] = True
    is_written[slots[index >= position[of_row] // page_tokens]] = True
    return OutsidePages(
        len(extents), columns, slots.astype(np.int32), _runs(extents, ~begins), _runs(extents, begins),
        _runs(extents, is_written), frozenset(extents[~begins].tolist()), frozenset(extents[is_written].tolist()),
    )  # fmt: skip


def _runs(extents: Ints, wanted: npt.NDArray[np.bool_]) -> tuple[SlotRun, ...]:
    """Slots that are wanted, in runs of neighbours outside."""
    (slots,) = np.nonzero(wanted)
    cuts = np.flatnonzero(np.diff(extents[slots]) != 1) + 1
    return tuple(SlotRun(int(run[0]), int(extents[run[0]]), len(run)) for run in np.split(slots, cuts) if len(run))


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A layer of a part of a step."""

    layer: int
    pages: OutsidePages


class PageTier(SlowTier[Piece]):
    """Pieces come from it and go to it, through slots of a ring."""

    def size(self, item: Piece) -> int:
        return item.pages.n

    def waits_for(self, item: Piece, earlier: Piece) -> bool:
        """A prompt that is cut between two micro-batches reads what the earlier one writes."""
        writes, own = earlier.pages.writes, item.pages
        return earlier.layer == item.layer and not (writes.isdisjoint(own.reads) and writes.isdisjoint(own.writes))


LayerPages = dict[int, list[OutsidePages | None]]  # of each layer of a pass, those of each part


def layer_pages(
    parts: Sequence[MicroBatch], arrays: StepArrays, places: Ints, page_tokens: int, windows: Mapping[int, int],
    block: int = 1,
) -> LayerPages:  # fmt: skip
    """Find what each part has outside in a pass over the layers of `windows`. Layers of one window have the same."""
    of_window = {
        window: [outside_pages(part.rows, arrays, places, page_tokens, window, block) for part in parts]
        for window in {*windows.values()}
    }
    return {layer: of_window[window] for layer, window in windows.items()}


def pieces(found: LayerPages) -> list[Piece]:
    """Pieces of a pass, in the order in which they are computed."""
    return [Piece(layer, pages) for layer, of_layer in found.items() for pages in of_layer if pages is not None]


def row_pieces(counts: Sequence[int], layers: int, slots: int = 0) -> list[Piece]:
    """Hidden rows between the layers of a pass: the first layer loads nothing, and the last one stores nothing.

    `counts`: extents of each part, side by side. `slots` that each takes; 0: as many as it has extents.
    """
    none, found, starts = np.empty(0, np.int32), list[Piece](), offsets(counts)
    for layer in range(layers):
        for start, count in zip(starts, counts, strict=True):
            run, own = (SlotRun(0, start, count),), frozenset((start,))
            begins, ends = layer == 0, layer == layers - 1
            pages = OutsidePages(
                slots or count, none, none, loads=() if begins else run, clears=(), stores=() if ends else run,
                reads=frozenset() if begins else own, writes=frozenset() if ends else own,
            )  # fmt: skip
            found.append(Piece(0, pages))
    return found


def count_extents(runs: Iterable[SlotRun]) -> int:
    return sum(run.count for run in runs)


def transfer_bytes(coming: Sequence[Piece], extent_bytes: int) -> tuple[int, int]:
    """Bytes that a pass loads and stores."""
    loaded = sum(count_extents(piece.pages.loads) for piece in coming)
    stored = sum(count_extents(piece.pages.stores) for piece in coming)
    return loaded * extent_bytes, stored * extent_bytes

"""KV, some of whose pages are in pinned memory and pass through a ring on the GPU while layers compute.

A **part** of a device batch is some of its rows, whose pages on the host fit into the ring together. Products run on
all rows of a batch at once, attention runs part by part. A layer of a part's pages is copied to the ring (FlexGen's KV
load, section 4.1), the part's new keys and values are written, its rows attend, and the pages that were written are
copied back (KV store). The next parts' pages, of this layer and of those that follow, are copied meanwhile, as many as
the ring holds. What is launched for a row is what `CudaExecutor` launches, so that its bits do not depend on the parts.

`host_pages` copies both ways and keeps the order.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from weft_kernels.triton.chunks import chunk_table, count_chunks
from weft_kernels.triton.lora import ChunkTable, expand_arguments
from weft_runner.model.cuda.attention import TritonAttention
from weft_runner.model.cuda.device import PinnedMemory
from weft_runner.model.cuda.device_batches import DeviceBatch
from weft_runner.model.cuda.host_pages import HostPages
from weft_runner.model.cuda.ops import DeviceContext, TritonOps, Widths
from weft_runner.model.cuda.step import ALIGNED, DeviceStep
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.step import Ints
from weft_runner.model.tiers.micro_batches import MicroBatch, cut_step
from weft_runner.model.tiers.outside_pages import LayerPages, OutsidePages, layer_pages, pieces, transfer_bytes
from weft_runner.model.tiers.read_ahead import ReadAhead
from weft_runner.model.weights import LayerWeights
from weft_runner.offload.figures import TierFigures
from weft_runner.offload.page_places import PagePlaces
from weft_runner.offload.placement import KvSplit


@dataclass(frozen=True, slots=True, eq=False)
class StepPart:
    """Tokens [start, end) of a device batch, of whole rows; `index`: among the parts of a pass.

    `chunked`: the batch's chunks that have any of its tokens. `picked`: its rows of one token; None: there are none.
    """

    index: int
    start: int
    end: int
    chunked: ChunkTable
    picked: torch.Tensor | None
    tiles: torch.Tensor


class HostKv:
    """Pages by their places, and what of them is in the ring. One owner: the executor, whose thread calls it.

    `kv`: the frames, with `split.ring_slots` slots behind them.
    """

    def __init__(self, kv: KvCache, split: KvSplit, windows: Sequence[int]) -> None:
        """`windows`: of each layer. Raises OutOfMemory: the system pins no more."""
        assert (kv.page_bytes, len(kv.tensor)) == (split.page_bytes, split.frames), (kv.tensor.shape, split)
        self._kv, self._split, self._windows = kv, split, windows
        self.pass_bytes = 0, 0  # loaded and stored, of the pass
        self._places = PagePlaces(split.pages, split.frames)
        memory = kv.by_layer.view(len(kv.by_layer), -1).view(torch.uint8)
        self._frames, ring = memory[: -split.ring_slots], memory[-split.ring_slots :]
        self._host = HostPages(ring, PinnedMemory(split.host_bytes, ring.device), split.layers)
        self._ahead = ReadAhead(self._host, split.ring_slots, "KV is")
        self._outside: LayerPages = {}  # of the pass
        self._tables: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []  # of each part, by window: see `_table`

    @property
    def figures(self) -> TierFigures:
        return self._ahead.figures

    # ---- whose pages they are

    def grant(self, pages: Sequence[int]) -> None:
        """These are sequences' from now on. What lies there is not read before it is written."""
        self._places.grant(pages)

    def take(self, pages: Sequence[int]) -> None:
        """These are adapters' now, each in a frame; what was in the frame goes to the host before they are copied.

        Raises OutOfMemory: adapters hold more pages than there are frames.
        """
        spills, layers = self._places.take(pages), self._split.layers
        if spills:
            pairs = [
                (self._host.extents[layer, spill.extent], self._frames[spill.frame * layers + layer])
                for spill in spills
                for layer in range(layers)
            ]
            if (stored := self._host.copy_out(pairs)) is not None:
                stored.wait()

    def frames_of(self, pages: Sequence[int]) -> list[int]:
        """Frames of an adapter's pages. Any thread."""
        return [self._places.frame_taken_by(page) for page in pages]

    # ---- a step

    def begin(self, batches: Sequence[DeviceBatch], layers: range) -> list[list[StepPart]]:
        """A pass over these layers: the parts of each batch of its step. What they have on the host comes from now on.

        Attention runs layer by layer, batch by batch and part by part.
        """
        windows = {layer: self._windows[layer] for layer in layers}
        self._outside, self._tables = {layer: [] for layer in layers}, []
        found = [self._parts(batch, windows) for batch in batches]
        coming = pieces(self._outside)
        if self._ahead.drain():  # of a pass that was given up: what comes waits until nothing reads it
            self._host.copy_out(())
        self.pass_bytes = transfer_bytes(coming, self._split.layer_bytes)
        self._ahead.begin(coming)
        return found

    def _parts(self, one: DeviceBatch, windows: Mapping[int, int]) -> list[StepPart]:
        """Parts of a batch, which comes behind those that were asked for before."""
        arrays, places, block_m = one.step.arrays, self._places.places, one.here.shape.block_m
        outside = places[arrays.pages] < 0
        parts = cut_step(arrays, len(arrays.tokens), outside, self._split.batch_pages)
        of_layer = layer_pages(parts, arrays, places, self._kv.page_tokens, windows)
        of_window = {window: of_layer[layer] for layer, window in windows.items()}
        tables = [self._table(arrays.pages, found) for found in of_window.values()]
        chunks = chunk_table(one.step.plan, block_m)
        of_part = [_fields(part, one, chunks) for part in parts]
        fields = [*chain(*tables), *chain(*of_part)]
        there = _upload(fields, self._kv.tensor.device)
        of_tables, of_parts = there[: 2 * len(tables)], there[2 * len(tables) :]
        marked = zip(of_tables[::2], of_tables[1::2], strict=True)
        table = {window: (base, marks.bool()) for window, (base, marks) in zip(of_window, marked, strict=True)}
        first = len(self._tables)
        self._tables += [table] * len(parts)
        for layer, pages in of_layer.items():
            self._outside[layer] += pages
        return [
            StepPart(
                first + i, part.start, part.end,
                ChunkTable(of_parts[3 * i].view(-1, 4), block_m, count_chunks(of_part[i][0])),
                of_parts[3 * i + 1] if len(of_parts[3 * i + 1]) else None, of_parts[3 * i + 2].view(-1, 2),
            )
            for i, part in enumerate(parts)
        ]  # fmt: skip

    def _table(self, pages: Ints, found: Sequence[OutsidePages | None]) -> tuple[Ints, Ints]:
        """The first layer's numbers of a step's pages, or slots counted from where a part's begin; 1: it is a slot.

        What a row has beyond its context or window is not read.
        """
        places = self._places.places[pages]
        base, marks = places * np.int32(self._split.layers), np.zeros(len(places), np.int32)
        base[places < 0] = 0
        for one in found:
            if one is not None:
                base[one.columns] = one.slots + len(self._frames)
                marks[one.columns] = 1
        return base, marks

    @contextmanager
    def pages(self, layer: int, part: StepPart) -> Generator[torch.Tensor]:
        """The page table of the batch for what is launched in this context: pages of one layer (`KvCache.by_layer`).

        int32; the part's own are right. Parts come in the order of `begin`, layer by layer.
        """
        base, is_slot = self._tables[part.index][self._windows[layer]]
        if self._outside[layer][part.index] is None:
            yield base + layer
            return
        slot = self._ahead.acquire()
        try:
            yield torch.where(is_slot, base + slot, base + layer)
        finally:
            self._ahead.release()

    def close(self) -> None:
        """Wait for the copies under way."""
        self._ahead.close()


def table_bytes(rows: int, row_pages: int, tokens: int) -> int:
    """Bytes of the device for what `HostKv.begin` and `PassingOps` put there, of steps of `rows` and `tokens` at most.

    Tables of pages of two windows and what is made of one, chunks and tiles of all parts, rows of one token, and rows
    of tokens.
    """
    return 4 * (8 * rows * row_pages + 3 * (tokens + 2 * rows) + 2 * (tokens + rows) + tokens + rows + 8 * ALIGNED)


class PassingOps(TritonOps):
    """`Operators` of a device batch whose pages lie where `HostKv` says: attention runs part by part."""

    def __init__(
        self, device: DeviceContext, step: DeviceStep, attention: TritonAttention, residual: torch.Tensor,
        widths: Widths | None, kv: HostKv, parts: Sequence[StepPart],
    ) -> None:  # fmt: skip
        """`attention`: of `KvCache.by_layer`."""
        super().__init__(device, step, attention, residual, widths)
        self._rows, self._host_kv, self._parts = attention, kv, parts
        self._own = torch.empty_like(step.row_of) if len(parts) > 1 else step.row_of

    def attention(self, qkv: torch.Tensor, layer: int, weights: LayerWeights) -> torch.Tensor:
        device, step, spec = self._device, self._step, self._device.spec
        q = device.new(qkv.shape[0], spec.heads, spec.head_dim)
        out = device.new(qkv.shape[0], spec.q_size)
        norms, pending, rope = self._head_norms(qkv, weights), self._taken(), weights.spec.rope
        for part in self._parts:
            if len(self._parts) > 1:  # tokens of other parts, which its chunks may have, are of no row
                self._own.fill_(-1)
                self._own[part.start : part.end] = step.row_of[part.start : part.end]
            with self._host_kv.pages(layer, part) as pages:
                launch = self._rotation(q, device.kv.by_layer, qkv, pages, self._own, part.chunked, pending, rope)
                launch(q, qkv, *norms, 0, *expand_arguments(pending))
                self._rows.attend_rows(out, q, 0, weights.spec.window, pages, part.picked, part.tiles)
        return out


def _fields(part: MicroBatch, batch: DeviceBatch, chunks: Ints) -> tuple[Ints, Ints, Ints]:
    """A part's chunks, which are never cut, since a row's bits depend on their size; its single tokens; its tiles."""
    single, tiles = part.of_row[batch.single[part.of_row]], batch.tiles
    inside = (chunks[:, 1] < part.end) & (chunks[:, 1] + chunks[:, 2] > part.start)
    return chunks[inside], single, tiles[np.isin(tiles[:, 0], part.of_row)]


def _upload(fields: Sequence[Ints], at: torch.device) -> list[torch.Tensor]:
    """int32, flat, each from a multiple of 16 bytes on, by one copy."""
    starts = np.cumsum([0, *(-(-field.size // ALIGNED) * ALIGNED for field in fields)]).tolist()
    whole = np.zeros(starts[-1], np.int32)
    for start, field in zip(starts, fields, strict=False):
        whole[start : start + field.size] = field.reshape(-1)
    there = torch.from_numpy(whole).to(at)
    return [there[start : start + field.size] for start, field in zip(starts, fields, strict=False)]

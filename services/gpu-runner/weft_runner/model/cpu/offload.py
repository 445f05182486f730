"""The cpu executor for a model larger than its memory: weights and KV come from disk while layers compute.

An iteration passes each layer once over all of its rows, in micro-batches, and the next layer's weights are read
meanwhile: FlexGen's zig-zag block schedule (section 4.1), where a block is an iteration: requests join and leave at
each. A weight is read once a pass for all rows, whatever their number, and adapters are applied as their layer passes.
KV pages on the disk are loaded for a layer of a micro-batch while the one before computes, and stored behind it
(`tiered_kv`), and so are hidden rows of passes that memory does not hold (`activations`). What is computed is what
`CpuExecutor` computes, to the bit, and so is the numerics class: sequences may move between the two.
"""

import ctypes
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from weft_kernels.cpu.library import Library
from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.structs import INT8, KINDS, LoraSiteStruct, Matrix, ModelStruct, StepStruct
from weft_runner.errors import DiskUnusable, OutOfMemory
from weft_runner.model.checkpoint import Checkpoint
from weft_runner.model.cpu.activations import DiskActivations
from weft_runner.model.cpu.executor import CpuExecutor, address_of
from weft_runner.model.cpu.packed_weights import PackedWeights, RowPacker
from weft_runner.model.cpu.page_file import bounce_bytes
from weft_runner.model.cpu.tiered_kv import TieredKv
from weft_runner.model.executor import Capabilities, LayerDone
from weft_runner.model.partition import Partition
from weft_runner.model.pooling import with_states
from weft_runner.model.sampling import Floats
from weft_runner.model.step import Ints, StepInput
from weft_runner.model.tiers.budget import OffloadBudget, formats_of, state_of
from weft_runner.model.tiers.direct_io import DirectFile
from weft_runner.model.tiers.embedding_rows import EmbeddingRows, gather_bytes
from weft_runner.model.tiers.micro_batches import MicroBatch, cut_step
from weft_runner.model.tiers.outside_pages import LayerPages, OutsidePages
from weft_runner.model.tiers.packed_file import PackedFile, PackedLayout, Region, packed_file, region_groups
from weft_runner.model.tiers.pass_work import pass_work
from weft_runner.model.tiers.weight_stream import DiskWeights, Extent, StreamedGroups
from weft_runner.offload.figures import Accuracy, OffloadFigures, TierFigures
from weft_runner.offload.passes import PassWork, WeightPlacement
from weft_runner.offload.placement import TierPlacement, check_placement, place, split_activations, split_kv
from weft_runner.offload.plan import MATRICES, PassTime, kv_buffers
from weft_runner.offload.policy import WeightsFormat
from weft_runner.offload.residency import WeightResidency, least_bytes
from weft_runner.offload.sizes import BOUNCE_THREADS, model_sizes
from weft_runner.offload.stages import StageState


class OffloadExecutor(CpuExecutor):
    """One CPU, or a stage of a pipeline; tensor ranks do not offload, whose exchanges would wait for other disks."""

    def __init__(
        self, library: Library, checkpoint: Checkpoint, budget: OffloadBudget, *, dtype: str, kv_dtype: str = "auto",
        top_share: float = 0.0, threads: int, pages: int, page_tokens: int, slots: int, part: Partition | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """Load it. Raises WeightsInvalid, OutOfMemory (the budget), PolicyInvalid, DiskUnusable, StoppedAtStart."""
        self._budget, self._stopping = budget, stopping
        part = part or Partition(checkpoint.spec)
        assert part.size == 1, "tensor ranks do not offload"
        super().__init__(
            library, checkpoint, dtype=dtype, kv_dtype=kv_dtype, top_share=top_share, threads=threads, pages=pages,
            page_tokens=page_tokens, slots=slots, part=part,
        )  # fmt: skip
        self.placement = self._place()
        self.residency = self.placement.weights
        self._disk_kv: TieredKv | None = None
        if self._split.outside_pages:
            self.kv_memory = None  # what copies pages reads them in memory: such sequences are computed again
            self._disk_kv = TieredKv(budget.path, self._kv, self._split, page_tokens, self.spec.windows)
        self._weights = _NativeWeights(self._file, self.residency, self._base.model)
        self._head = ModelStruct.from_buffer_copy(self._base.model)
        self._single = ModelStruct.from_buffer_copy(self._base.model)  # the layer that is computed from disk pages
        self._single.layers = 1
        self._embedding = EmbeddingRows(self._file, resident=self.residency.embedding)
        self._native.layers_done = None
        self._batches: list[MicroBatch] = []
        self._version = 0
        self._structs: list[StepStruct] = []
        self._disk_pages: LayerPages = {}  # of this pass
        self._rows_on_disk: list[bool] = []  # of each micro-batch
        self._activations: DiskActivations | None = None
        if self.placement.activations.outside_rows:
            self._activations = DiskActivations(budget.path, self.placement.activations)
            self._hidden = self._activations.rows
        self._step_s = 0.0
        formats = formats_of(dtype, kv_dtype)
        self._sizes = model_sizes(part.whole, formats, layers=part.layers)
        placed = self._weights_placed(formats.weights)
        self._accuracy = None if budget.machine is None else Accuracy(placed, self._sizes, budget.machine)

    @property
    def can(self) -> Capabilities:
        return super().can._replace(stages=lambda: [self.stage_state], stage=self, close=self.close)

    @property
    def figures(self) -> OffloadFigures:
        """Any thread."""
        residency, stream = self.residency, self._weights.groups.figures
        planned_s = 0.0 if self._budget.plan is None else self._budget.plan.predicted.token.pass_s
        accuracy = None if self._accuracy is None else self._accuracy.figures
        return OffloadFigures(
            residency.resident_bytes, 0, residency.streamed_bytes, residency.ring_bytes, replace(stream),
            TierFigures() if self._disk_kv is None else replace(self._disk_kv.figures),
            TierFigures() if self._activations is None else replace(self._activations.figures),
            self._step_s, planned_s, accuracy,
        )  # fmt: skip

    @property
    def stage_state(self) -> StageState:
        figures, done = self.figures, self.layer_counter.count
        return StageState(state_of(figures, self.residency.share), figures, self.placement.kv.frames, done)

    def predicted(self, tokens: int) -> PassTime | None:
        return None if self._accuracy is None else self._accuracy.predict(PassWork(tokens, tokens))

    @property
    def packed(self) -> bool:
        """The file of its weights was not there, or not whole, and has been written at this start."""
        return self._file.written

    def close(self) -> None:
        """Ends the threads that read and write."""
        self._weights.groups.close()
        if self._disk_kv is not None:
            self._disk_kv.close()
        if self._activations is not None:
            self._activations.close()
        self._embedding.close()

    def run(
        self, step: StepInput, *, first: int = 0, last: int | None = None, hidden: npt.ArrayLike | None = None,
        layer_done: LayerDone | None = None,
    ) -> Floats:  # fmt: skip
        """Run layers, see `model.executor.Executor.run`. Raises ExecutorLost if the disk fails."""
        began = time.perf_counter()
        layers = self.spec.layers
        last = layers if last is None else last
        n_tokens, n_sampled = len(step.tokens), len(step.arrays.sampled)
        samples = last == layers and self._part.ends and n_sampled > 0
        leaves = last < layers or not self._part.ends
        wanted = np.arange(n_tokens, dtype=np.int32) if leaves else step.arrays.sampled
        self._begin(step, range(first, last), hidden, wanted)
        self._weights.groups.begin(samples=samples)
        if hidden is None and self._part.begins and first == 0:
            self._base.model.embedding = self._embedding.gather(step.arrays.tokens, self._tokens)
        single = len(self._structs) == 1 and not any(map(any, self._disk_pages.values()))
        for begin, end in self._weights.spans(first, last, single=single):
            with self._weights.group(begin):
                self._layers(step, begin, end, layer_done)
        rows = self._hidden[wanted] if self._activations is None else self._activations.leaving()
        if samples:
            self._sample(rows)
        self._step_s += (took_s := time.perf_counter() - began)
        if self._accuracy is not None and last - first == layers:
            self._accuracy.learn(self._pass_work(step), took_s)
        if leaves:
            return rows
        logits = self._logits[:n_sampled]
        logits = with_states(logits, rows, step, self._norm, self.spec.norm_eps)
        return logits if self._part.begins else logits.copy()

    def _layers(self, step: StepInput, first: int, last: int, layer_done: LayerDone | None) -> None:
        """Over all micro-batches. A layer is done, to those who wait for it, with the last of them."""
        for native, pages, on_disk in zip(self._structs, self._disk_pages[first], self._rows_on_disk, strict=True):
            if on_disk and self._activations is not None:
                native.hidden = self._activations.acquire()
            native.first, native.last = first, last
            final = native is self._structs[-1]
            native.layers_done = self.layer_counter.address if final else None
            if pages is None:
                self._run(native, layer_done if final else None)
            else:
                self._run_staged(step, native, pages, layer_done if final else None)
            if on_disk and self._activations is not None:
                self._activations.release()

    def _run_staged(
        self, step: StepInput, native: StepStruct, pages: OutsidePages, layer_done: LayerDone | None
    ) -> None:  # fmt: skip
        """One layer as a model of its own, whose pages are layers of pages (`tiered_kv`)."""
        assert self._disk_kv is not None
        base, single, layer, native = self._base.model, self._single, native.first, StepStruct.from_buffer_copy(native)
        table = self._disk_kv.acquire(step.arrays, layer, pages)
        sites = np.frombuffer(bytes(self.adapters.table), np.uint64)
        sites = np.where(sites > 0, sites + np.uint64(layer * len(MATRICES) * ctypes.sizeof(LoraSiteStruct)), sites)
        single.layer = ctypes.pointer(base.layer[layer])
        single.embedding = base.embedding if layer == 0 else None
        native.first, native.last = 0, 1
        native.page_table, native.slots = address_of(table), address_of(sites)
        self._library.run(self._pool, single, native)
        self._disk_kv.release()
        if layer_done is not None:
            layer_done(layer)

    def _sample(self, rows: Floats) -> None:
        """Logits of the rows that sample, from the head's pieces as they come: by native steps of no layers."""
        layers, workspace = self.spec.layers, self._workspace
        for begin, matrix in self._weights.head():
            self._head.head, self._head.vocab = matrix, matrix.n_out
            for done in range(0, len(rows), self._budget.micro_batch):
                part = rows[done : done + self._budget.micro_batch]
                n, found = len(part), np.empty((len(part), matrix.n_out), np.float32)
                count, row = np.arange(n, dtype=np.int32), np.array([[0, n, 0, 0]], np.int32)
                native = StepStruct(
                    n_tokens=n, n_rows=1, n_segments=0, n_sampled=n, first=layers, last=layers, rows=address_of(row),
                    sampled=address_of(count), hidden=address_of(part), logits=address_of(found),
                    workspace=workspace.address, workspace_bytes=workspace.n_bytes,
                )  # fmt: skip
                self._library.run(self._pool, self._head, native)
                self._logits[done : done + n, begin : begin + matrix.n_out] = found

    def _pass_work(self, step: StepInput) -> PassWork:
        """What a whole pass is to the cost model."""
        found = [pages for of_layer in self._disk_pages.values() for pages in of_layer if pages is not None]
        read, written = (0, 0) if self._activations is None else self._activations.pass_bytes
        return replace(
            pass_work(step, self._sizes, self.adapters.n_bytes),
            read_bytes=read + self._split.layer_bytes * sum(len(pages.reads) for pages in found),
            written_bytes=written + self._split.layer_bytes * sum(len(pages.writes) for pages in found),
            reads=sum(len(pages.loads) for pages in found),
            writes=sum(len(pages.stores) for pages in found),
        )

    # ---- a step

    def _begin(self, step: StepInput, layers: range, entering: npt.ArrayLike | None, wanted: Ints) -> None:
        """Micro-batches of a step, for as long as it lives and its pages lie there; their positions now.

        `entering`: hidden rows of the caller; `wanted`: which are read after the last layer.
        """
        arrays, disk, n_tokens = step.arrays, self._disk_kv, len(step.arrays.tokens)
        self._grow_workspace(n_tokens if self._activations is None else self._budget.micro_batch, len(arrays.sampled))
        version = 0 if disk is None else disk.version
        if step is not self._prepared or version != self._version:
            on_disk = None if disk is None else disk.on_disk(arrays)
            self._batches = cut_step(arrays, self._budget.micro_batch, on_disk, self._split.batch_pages)
            self._tokens = np.arange(len(arrays.tokens), dtype=np.int32)
            self._prepared, self._version = step, version
        for batch in self._batches:
            batch.advance(arrays)
        nowhere: LayerPages = dict.fromkeys(layers, [None] * len(self._batches))
        self._disk_pages = nowhere if disk is None else disk.begin(arrays, self._batches, layers)
        self._rows_on_disk = [False] * len(self._batches)
        if self._activations is not None:
            self._rows_on_disk = self._activations.begin(self._batches, layers, entering, wanted)
        elif entering is not None:
            self._hidden[:n_tokens] = entering
        self._page_table = arrays.pages if disk is None else disk.frames(arrays)
        hidden_bytes = 4 * self.spec.hidden_size
        self._structs = [
            StepStruct(
                n_tokens=batch.n_tokens, n_rows=len(batch.rows), n_segments=len(batch.segments), n_sampled=0,
                tokens=address_of(self._tokens) + 4 * batch.start, rows=address_of(batch.rows),
                page_table=address_of(self._page_table), segments=address_of(batch.segments),
                guesses=address_of(arrays.guesses) + 4 * batch.start if len(arrays.guesses) else None,
                slots=ctypes.addressof(self.adapters.table),
                hidden=address_of(self._hidden) + hidden_bytes * batch.start,
                workspace=self._workspace.address, workspace_bytes=self._workspace.n_bytes,
            )
            for batch in self._batches
        ]  # fmt: skip

    def _workspace_of(self, n_tokens: int, n_sampled: int, site_rank: int) -> int:
        """Bytes for the largest micro-batch."""
        most = self._budget.micro_batch
        tokens = max(min(n_tokens, most), min(n_sampled, most))
        return self._library.workspace_bytes(self._base.model, tokens, site_rank, min(n_sampled, most))

    def _weights_placed(self, weights: WeightsFormat) -> WeightPlacement:
        streamed = self.residency.streamed
        return WeightPlacement(
            weights,
            disk_bytes=self.residency.streamed_bytes,
            head_bytes=sum(streamed[self.spec.layers :]),
            batch_tokens=self._budget.micro_batch,
            buffers=2 if self.residency.ring_bytes >= min(2 * max(streamed), sum(streamed)) else 1,
            gathers=self._part.begins and not self.residency.embedding,
            sparse=self._top_share > 0.0,
        )

    # ---- the start

    def _load(self, checkpoint: Checkpoint, dtype: str, page_tokens: int) -> PackedWeights:
        packer = RowPacker(self._library, self._pool, KINDS[dtype])
        budget = self._budget
        layout = PackedLayout(packer, self._part, budget.base, dtype, checkpoint.embedding.dtype)
        packed = packed_file(budget.path, layout, packer, disk_bytes=budget.disk_bytes, stopping=self._stopping)
        with packed as self._file:
            return PackedWeights(self._file, checkpoint, dtype, page_tokens, self._part)

    def _kv_bytes(self, pages: int) -> int:
        budget, spec = self._budget, self.spec
        disk_pages, batch_pages = budget.kv_disk_pages, 0
        if budget.plan is not None:
            disk_pages, batch_pages = budget.plan.kv_pages(self.page_bytes)
        row_pages = -(-min(spec.max_positions, pages * self._base.model.page_tokens) // self._base.model.page_tokens)
        self._split = split_kv(
            pages, disk_pages, row_pages=row_pages, layers=spec.layers, page_bytes=self.page_bytes,
            batch_pages=batch_pages, buffers=kv_buffers(2 if budget.plan is None else budget.plan.buffers),
        )  # fmt: skip
        return self._split.memory_bytes

    def _place(self) -> TierPlacement:
        """Raises OutOfMemory, DiskUnusable, PolicyInvalid, with what there has to be."""
        budget, layout, spec, split = self._budget, self._file.layout, self.spec, self._split
        groups = region_groups(layout)
        sizes = [[region.n_bytes for region in group] for group in groups]
        plan, rows, row_bytes = budget.plan, budget.max_tokens, 4 * spec.hidden_size
        activations = split_activations(
            rows, budget.activation_disk_tokens if plan is None else plan.activation_rows(rows),
            batch_rows=min(budget.micro_batch, rows), sequences=budget.max_sequences, row_bytes=row_bytes,
            buffers=2 if plan is None else plan.buffers,
        )  # fmt: skip
        logits = 4 * budget.max_sequences * spec.vocab_size * self._part.ends
        gathered = 0 if not self._part.begins else budget.max_tokens * layout.row_bytes + gather_bytes(layout)
        site_rank = 3 * (budget.max_rank + budget.max_rank % 2)
        work = 2 * logits + gathered + self._workspace_of(budget.max_tokens, budget.max_sequences, site_rank)
        work += BOUNCE_THREADS * bounce_bytes(split.layer_bytes) if split.outside_pages else 0
        work += self._scores.n_bytes
        work += budget.in_flight * rows * row_bytes * (2 - self._part.begins - self._part.ends)  # come and leave
        # of the budget, for all but weights
        self.beside_bytes = split.memory_bytes + activations.memory_bytes + work
        if budget.device_bytes + budget.host_bytes < (least := self.beside_bytes + least_bytes(sizes)):
            raise OutOfMemory(
                f"--offload device {budget.device_bytes} is too small: {split.memory_bytes} for KV and adapters, "
                f"{work + activations.memory_bytes} for what steps work on and at least {least - self.beside_bytes} "
                f"for one layer's weights take {least}: allow more, or ask for fewer --kv-pages, --max-batch-tokens or "
                "--max-sequences"
            )
        if (needed := layout.n_bytes + split.disk_bytes + activations.disk_bytes) > budget.disk_bytes:
            raise DiskUnusable(
                f"--offload disk {budget.disk_bytes} is below the {layout.n_bytes} bytes of the packed weights, "
                f"{split.disk_bytes} of KV and {activations.disk_bytes} of activations, {needed} together: allow more, "
                "or ask for less KV on the disk"
            )
        placement = place(
            sizes, layout.embedding_bytes, split, activations, budget.budgets, work_bytes=work,
            packed_bytes=layout.n_bytes, share=budget.share, plan=plan,
        )  # fmt: skip
        check_placement(placement, budget.budgets)
        return placement

    # ---- pages

    def clear_pages(self, pages: list[int]) -> None:
        if self._disk_kv is None:
            super().clear_pages(pages)
        else:
            self._disk_kv.clear(pages)

    def allocate_adapter_pages(self, pages: list[int]) -> None:
        """Give pages to adapters, see `model.executor.Executor.allocate_adapter_pages`. Raises ExecutorLost."""
        if self._disk_kv is None:
            super().allocate_adapter_pages(pages)
        else:
            self._disk_kv.take(pages)


class _NativeWeights:
    """The model's matrices: those that stay, read once, and those that come. Points the native model at them."""

    def __init__(self, packed: PackedFile, residency: WeightResidency, model: ModelStruct) -> None:
        """Raises DiskUnusable."""
        self._model, self._layers = model, model.layers
        self._regions = region_groups(packed.layout)
        coming = [
            [region for region, stays in zip(group, stay, strict=True) if not stays]
            for group, stay in zip(self._regions, residency.resident, strict=True)
        ]
        self._memory, self._ring = MappedMemory(residency.resident_bytes), MappedMemory(residency.ring_bytes)
        kind, file = model.layer[0].qkv.kind, packed.open()
        self._heads = [Matrix(n_in=one.n_in, n_out=one.n_out, kind=kind) for one in packed.layout.head]
        streamed = [[Extent(one.offset, one.n_bytes) for one in group] for group in coming if group]
        try:
            self._read_resident(file, residency)
        except DiskUnusable:
            file.close()
            raise
        if not streamed:
            file.close()
        ahead = DiskWeights(file, streamed, self._ring).read_ahead() if streamed else None
        self.groups = StreamedGroups(coming, self._layers, ahead)

    def spans(self, first: int, last: int, *, single: bool) -> Iterator[tuple[int, int]]:
        """Layers [first, last) in the runs that are computed at a time: one, or all that follow it and stay.

        `single`: the step has one micro-batch.
        """
        while first < last:
            end = first + 1
            while single and end < last and not self.groups.comes(first) and not self.groups.comes(end):
                end += 1
            yield first, end
            first = end

    @contextmanager
    def group(self, index: int) -> Generator[None]:
        """Have the matrices of a layer or a piece of the head in memory while the block runs. Raises ExecutorLost."""
        with self.groups.acquire(index) as came:
            for region, at in came:
                self._point(index, region, self._ring.address + at)
            yield

    def head(self) -> Iterator[tuple[int, Matrix]]:
        """(first output, matrix) of each piece of the head, in memory until the next one is asked for."""
        done = 0
        for piece, matrix in enumerate(self._heads):
            with self.group(self._layers + piece):
                yield done, matrix
            done += matrix.n_out

    def _read_resident(self, file: DirectFile, residency: WeightResidency) -> None:
        at = self._memory.address
        for group, (regions, stay) in enumerate(zip(self._regions, residency.resident, strict=True)):
            for region, stays in zip(regions, stay, strict=True):
                if stays:
                    file.read(at, region.n_bytes, region.offset)
                    self._point(group, region, at)
                    at += region.n_bytes

    def _point(self, group: int, region: Region, address: int) -> None:
        if group < self._layers:
            matrix = getattr(self._model.layer[group], MATRICES[self._regions[group].index(region)])
        else:
            matrix = self._heads[group - self._layers]
        matrix.data = address
        if matrix.kind == INT8:
            matrix.scale = address + region.data_bytes

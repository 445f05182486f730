"""The cuda executor for a model larger than its GPU: weights and KV come from elsewhere while layers compute.

FlexGen's three tiers for weights (section 4.2): what stays on the GPU, what lies in pinned memory of the host, and what
is read from a disk in each pass. A pass computes each layer once for all of its rows, in device batches
(`device_batches`), so that each weight is moved once, whatever the number of rows: the zig-zag block schedule (section
4.1). KV and activations have two tiers, the GPU and the host (`host_kv`, `activations`); adapters are on the device.
What is computed is what `CudaExecutor` computes, and so is the numerics class: as there, the library may choose another
product for another number of rows. Decode steps are not captured: a graph would hold matrices where they no longer are.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from weft.domain.model.tensors import EMBEDDING, HEAD
from weft_runner.errors import PolicyInvalid
from weft_runner.memory_estimate import device_workspace, page_bytes
from weft_runner.model.arrays import Array, check_finite
from weft_runner.model.checkpoint import Checkpoint
from weft_runner.model.cuda.activations import HostActivations
from weft_runner.model.cuda.adapters import layout_of
from weft_runner.model.cuda.device import CopyStream, Gpu, PinnedMemory, on_device
from weft_runner.model.cuda.device_batches import DeviceBatch, device_batches
from weft_runner.model.cuda.executor import CudaExecutor, Sizes, chunk_tokens
from weft_runner.model.cuda.host_kv import HostKv, PassingOps, table_bytes
from weft_runner.model.cuda.matrix_packer import DevicePacker
from weft_runner.model.cuda.ops import TritonOps, Widths
from weft_runner.model.cuda.step import DeviceStep
from weft_runner.model.cuda.weight_copies import FromDisk, FromHost, HostWeights, Piece
from weft_runner.model.decoder import run_layer
from weft_runner.model.executor import Capabilities, LayerDone
from weft_runner.model.host_tensors import tensor_of
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.kv_memory import KvMemory
from weft_runner.model.lora import sites_of
from weft_runner.model.partition import Partition
from weft_runner.model.step import StepInput
from weft_runner.model.tiers.budget import OffloadBudget, formats_of, state_of
from weft_runner.model.tiers.direct_io import BLOCK, DirectFile
from weft_runner.model.tiers.embedding_rows import EmbeddingRows
from weft_runner.model.tiers.matrices import MatrixRows
from weft_runner.model.tiers.packed_file import PackedFile, PackedLayout, Region, packed_file, region_groups
from weft_runner.model.tiers.pass_work import pass_work
from weft_runner.model.tiers.read_ahead import ReadAhead
from weft_runner.model.tiers.weight_stream import DiskWeights, Extent, StreamedGroups
from weft_runner.model.weights import LayerWeights, ModelWeights, stacked_layer
from weft_runner.offload.device_placement import DevicePlacement, check_device_placement, place_on_device
from weft_runner.offload.figures import Accuracy, OffloadFigures, TierFigures
from weft_runner.offload.passes import PassWork, WeightPlacement
from weft_runner.offload.placement import ActivationSplit, KvSplit, split_activations, split_kv
from weft_runner.offload.plan import PassTime, kv_buffers
from weft_runner.offload.policy import MemoryTier
from weft_runner.offload.sizes import model_sizes
from weft_runner.offload.stages import StageState


class OffloadCudaExecutor(CudaExecutor):
    """One device, or a stage of a pipeline; tensor ranks do not offload."""

    def __init__(
        self, gpu: Gpu, checkpoint: Checkpoint, budget: OffloadBudget, sizes: Sizes, *, dtype: str,
        part: Partition | None = None, stopping: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """Raises WeightsInvalid, NoPolicyFits, PolicyInvalid, OutOfMemory, DiskUnusable, StoppedAtStart."""
        part = part or Partition(checkpoint.spec)
        assert part.size == 1, "tensor ranks do not offload"
        gpu.limit(budget.device_bytes)
        self._budget, self._step_s = budget, 0.0
        packer, budgets = DevicePacker(dtype, gpu.device), budget.budgets
        split, activations = kv_split(part, dtype, sizes, budget), activation_split(part, sizes, budget)
        layout = PackedLayout(packer, part, budget.base, dtype, checkpoint.embedding.dtype)
        groups = [[region.n_bytes for region in group] for group in region_groups(layout)]
        self.placement = place_on_device(
            groups, budgets, split, activations, work_bytes=work_bytes(part, dtype, sizes, split, activations),
            packed_bytes=layout.n_bytes, share=budget.share, plan=budget.plan,
        )  # fmt: skip
        check_device_placement(self.placement, budgets)
        with packed_file(budget.path, layout, packer, disk_bytes=budget.disk_bytes, stopping=stopping) as self._file:
            layers = _load(self._file, checkpoint, part, packer.dtype, gpu.device)
        check_finite("norm", checkpoint.norm)
        norm = tensor_of(checkpoint.norm).to(gpu.device, torch.float32)
        self._placed = _StagedWeights(gpu.device, self._file, self.placement, packer, layers, norm)
        self._rows = EmbeddingRows(self._file, resident=False)
        self._stored = torch.bfloat16 if layout.row_bytes == 2 * part.local.hidden_size else torch.float32
        self._model = model_sizes(checkpoint.spec, formats_of(dtype, executor="cuda"), layers=part.layers)
        self._accuracy = (
            None if budget.machine is None else Accuracy(self._weights_placed(), self._model, budget.machine)
        )
        self._activations = HostActivations(activations, gpu.device)
        self._host_kv: HostKv | None = None
        super().__init__(checkpoint.spec, self._placed, replace(sizes, graphs=False), part=part)

    @property
    def can(self) -> Capabilities:
        return super().can._replace(stages=lambda: [self.stage_state], stage=self, close=self.close)

    @property
    def figures(self) -> OffloadFigures:
        """Any thread."""
        placed, plan = self.placement, self._budget.plan
        return OffloadFigures(
            placed.weights.resident_bytes, placed.host_bytes, sum(placed.disk_read), placed.weights.ring_bytes,
            self._placed.figures, TierFigures() if self._host_kv is None else self._host_kv.figures,
            self._activations.figures, self._step_s,
            0.0 if plan is None else plan.predicted.token.pass_s,
            None if self._accuracy is None else self._accuracy.figures,
        )  # fmt: skip

    @property
    def stage_state(self) -> StageState:
        figures, done = self.figures, self._placed.layers_done  # launched; the ring is no further ahead of the device
        return StageState(state_of(figures, self.placement.weights.share), figures, self.placement.kv.frames, done)

    def predicted(self, tokens: int) -> PassTime | None:
        return None if self._accuracy is None else self._accuracy.predict(PassWork(tokens, tokens))

    @property
    def packed(self) -> bool:
        """The file of its weights was not there, or not whole, and has been written at this start."""
        return self._file.written

    def close(self) -> None:
        """Ends the threads that read and copy."""
        self._placed.close()
        if self._host_kv is not None:
            self._host_kv.close()
        self._activations.close()
        self._rows.close()

    @on_device
    def run(
        self, step: StepInput, *, first: int = 0, last: int | None = None, hidden: torch.Tensor | None = None,
        layer_done: LayerDone | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run layers, see `model.executor.Executor.run`; return when the device is done. Raises ExecutorLost."""
        began, layers = time.perf_counter(), self.spec.layers
        last = layers if last is None else last
        self._placed.groups.begin(samples=last == layers and self._placed.has_head and len(step.arrays.sampled) > 0)
        found = super().run(step, first=first, last=last, hidden=hidden, layer_done=layer_done)
        if (done := self._placed.device.computed()) is not None:
            done.synchronize()
        self._step_s += (took_s := time.perf_counter() - began)
        if self._accuracy is not None and last - first == layers:
            self._accuracy.learn(self._pass_work(step), took_s)
        return found

    def clear_pages(self, pages: list[int]) -> None:
        if self._host_kv is not None:
            self._host_kv.grant(pages)

    @on_device
    def allocate_adapter_pages(self, pages: list[int]) -> None:
        """Give pages to adapters (`CudaExecutor`). Raises OutOfMemory: there are more than the device has."""
        if self._host_kv is not None:
            self._host_kv.take(pages)
        super().allocate_adapter_pages(pages)

    @on_device
    def warm_up(self, tokens: int) -> None:
        """Warm up with one layer, since kernels are the same for all, and with the head once."""
        self._placed.groups.begin(samples=False)
        with self._placed.layer(0) as layer:
            none = torch.empty(0, self.spec.hidden_size, dtype=self._placed.embedding.dtype, device=self.at)
            self._warm_up(tokens, ModelWeights(none, (layer,), self._placed.norm, none), 1)
        if self._placed.has_head:
            self._placed.groups.begin(samples=True)
            self._logits(torch.zeros(1, self.spec.hidden_size, device=self.at))

    def _cache(self, sizes: Sizes) -> KvCache:
        split = self.placement.kv
        kv = KvCache(self.spec, split.frames, sizes.page_tokens, self._dtype, self.at, slots=split.ring_slots)
        if split.outside_pages:
            self._host_kv = HostKv(kv, split, self.spec.windows)
        return kv

    def _memory_of(self, kv: KvCache) -> KvMemory | None:
        """None if pages lie on the host: what copies pages reads them on the device, so they are computed again."""
        return super()._memory_of(kv) if self._host_kv is None else None

    def _frames_of(self, pages: Sequence[int]) -> Sequence[int]:
        return pages if self._host_kv is None else self._host_kv.frames_of(pages)

    def _eager(
        self, step: StepInput, first: int, last: int, hidden: torch.Tensor | None, layer_done: LayerDone | None
    ) -> torch.Tensor:
        """Each layer over all device batches."""
        layers, samples = range(first, last), last == self.spec.layers and self._placed.has_head
        batches = [*self._batches(step)]
        every = self._operators(batches, layers, self._widths_of(step))
        wanted = step.arrays.sampled if samples else np.arange(len(step.tokens), dtype=np.int32)
        self._activations.begin(batches, len(layers), wanted)
        y: torch.Tensor | None = None  # of a batch that is alone, between two layers
        for layer in layers:
            with self._placed.layer(layer) as weights:
                for index, (batch, ops) in enumerate(zip(batches, every, strict=True)):
                    with self._activations.rows(index) as residual:
                        if layer == first:
                            residual.copy_(
                                self._embedded_rows(batch) if hidden is None else hidden[batch.start : batch.end]
                            )
                        ops.go_on(residual)
                        y = run_layer(ops, weights, layer, y)
                        if len(batches) > 1 or layer == layers[-1]:
                            ops.end(y)
                            y = None
            if layer_done is not None:
                layer_done(layer)
        x = self._activations.leaving()
        return self._logits(x, step) if samples else x

    def _batches(self, step: StepInput) -> Iterator[DeviceBatch]:
        block_m, most = chunk_tokens(len(step.tokens)), self.placement.activations.batch_rows
        return device_batches(step, most, block_m, self._prompt_tile, self.at)

    def _operators(self, batches: Sequence[DeviceBatch], layers: range, widths: Widths | None) -> list[TritonOps]:
        """Operators of each device batch of a pass over these layers. They have no rows yet."""
        device, nothing = self._device, torch.empty(0, device=self.at)
        if self._host_kv is None:
            attend = [self._triton(one.here) for one in batches]
            return [TritonOps(device, one.here, of, nothing, widths) for one, of in zip(batches, attend, strict=True)]
        return [
            PassingOps(
                device, one.here, self._triton_of(device.kv.by_layer, one.here), nothing, widths, self._host_kv, parts,
            )
            for one, parts in zip(batches, self._host_kv.begin(batches, layers), strict=True)
        ]  # fmt: skip

    def _warm_operators(self, step: StepInput, widths: Widths | None) -> tuple[TritonOps, DeviceStep]:
        """Operators of the first device batch of such a step."""
        batch = next(self._batches(step))
        (ops,) = self._operators([batch], range(1), widths)
        ops.go_on(self._begun(batch.here))
        return ops, batch.here

    def _pass_work(self, step: StepInput) -> PassWork:
        """What a whole pass is to the cost model."""
        of_kv = (0, 0) if self._host_kv is None else self._host_kv.pass_bytes
        loaded, stored = map(sum, zip(of_kv, self._activations.pass_bytes, strict=True))
        return replace(pass_work(step, self._model, self.adapters.n_bytes), loaded_bytes=loaded, stored_bytes=stored)

    def _embedded_rows(self, batch: DeviceBatch) -> torch.Tensor:
        """Rows of the embedding of a batch's tokens, from the file."""
        step = batch.step
        of_token = np.empty(len(step.arrays.tokens), np.int32)
        self._rows.gather(step.arrays.tokens, of_token)
        rows = torch.from_numpy(self._rows.rows[: int(of_token.max()) + 1]).view(self._stored)
        rows = rows.to(self._placed.embedding.dtype).to(self.at)
        return self.spec.embedding_scale * rows[torch.from_numpy(of_token).long().to(self.at)].float()

    def _weights_placed(self) -> WeightPlacement:
        placed, layers, streamed = self.placement, self._model.layers, self.placement.weights.streamed
        return WeightPlacement(
            formats_of(self._file.layout.dtype).weights,
            disk_bytes=sum(placed.disk_read),
            host_bytes=placed.host_bytes,
            head_bytes=sum(placed.disk_read[layers:]),
            batch_tokens=placed.activations.batch_rows,
            buffers=2 if placed.weights.ring_bytes >= min(2 * max(streamed), sum(streamed)) else 1,
        )


def kv_split(part: Partition, dtype: str, sizes: Sizes, budget: OffloadBudget) -> KvSplit:
    """Pages on the device and on the host, as the plan or the budget says. Raises PolicyInvalid."""
    each, plan = page_bytes(part.local, f"cuda {dtype}", sizes.page_tokens), budget.plan
    host_pages, batch_pages = (budget.kv_host_pages, 0) if plan is None else plan.kv_pages(each, MemoryTier.HOST)
    if plan is not None and (plan.usage[MemoryTier.DISK].kv or plan.activations is MemoryTier.DISK):
        raise PolicyInvalid("the plan has KV or activations on the disk, where --executor cuda has none")
    return split_kv(
        sizes.pages, host_pages, row_pages=-(-sizes.context // sizes.page_tokens), layers=part.local.layers,
        page_bytes=each, batch_pages=batch_pages, buffers=2 if plan is None else kv_buffers(plan.buffers),
    )  # fmt: skip


def activation_split(part: Partition, sizes: Sizes, budget: OffloadBudget) -> ActivationSplit:
    """Rows on the device and on the host, as the plan or the budget says; a batch has whole chunks of adapters.

    Raises PolicyInvalid.
    """
    plan, tokens = budget.plan, sizes.tokens
    outside = budget.activation_host_tokens if plan is None else plan.activation_rows(tokens, MemoryTier.HOST)
    batch_rows = min(tokens, max(budget.micro_batch, chunk_tokens(tokens)))
    return split_activations(
        tokens, outside, batch_rows=batch_rows, sequences=sizes.rows, row_bytes=4 * part.local.hidden_size,
        buffers=2 if plan is None else plan.buffers,
    )  # fmt: skip


def work_bytes(part: Partition, dtype: str, sizes: Sizes, split: KvSplit, activations: ActivationSplit) -> int:
    """Bytes of the device for norms, biases and tables, and what the largest step works on beside activations."""
    kind, spec, batch = f"cuda {dtype}", part.local, activations.batch_rows
    batches = 1 if batch >= sizes.tokens else 2 * -(-sizes.tokens // batch)  # each begins with a chunk
    of_tables = sizes.rows + batches - 1  # a row that is cut has its pages in several
    work = device_workspace(
        spec, kind, rows=sizes.rows, tokens=batch, context=sizes.context, page_tokens=sizes.page_tokens, recorded=(),
    )  # fmt: skip
    work += 4 * (batches - 1) * -(-sizes.context // sizes.page_tokens)
    residual = 4 * (batch + sizes.rows) * spec.hidden_size  # the embedding's rows, and those that are sampled
    residual += activations.row_bytes * sizes.tokens * bool(activations.outside_rows and not part.ends)  # that leave
    tables = sizes.slots * layout_of(part, sizes.max_rank).entry_bytes
    vectors = model_sizes(part.whole, formats_of(dtype, executor="cuda"), layers=part.layers).fixed
    passing = table_bytes(of_tables, -(-sizes.context // sizes.page_tokens), sizes.tokens)
    return work + residual + tables + vectors + passing * bool(split.outside_pages)


# ---- the start


def _load(
    file: PackedFile, checkpoint: Checkpoint, part: Partition, dtype: torch.dtype, device: torch.device
) -> list[LayerWeights]:  # fmt: skip
    """Layers whose matrices are still empty; those go to the file, if it is written. Raises WeightsInvalid."""

    def empty(name: str, array: Array) -> torch.Tensor:
        del name, array
        return torch.empty(0, device=device)

    layers = list[LayerWeights]()
    for index in part.layers:
        tensors, name = part.layer(checkpoint.layer(index)).projections, f"model.layers.{index}"
        for parts in sites_of(part.whole.family):
            file.add(MatrixRows(name, {one: tensors[one] for one in parts}))
        layers.append(stacked_layer(checkpoint, part, index, dtype, device, empty))
    if part.ends:
        name = EMBEDDING if checkpoint.spec.tied_embeddings else HEAD
        file.add(MatrixRows(name, {name: checkpoint.head[part.head]}))
        checkpoint.release(name)
    file.embed(part.embedding(checkpoint.embedding))
    checkpoint.release(EMBEDDING)
    return layers


class _StagedWeights:
    """`DeviceWeights`: matrices that stay on the device, and those that come."""

    def __init__(
        self, at: torch.device, file: PackedFile, placement: DevicePlacement, packer: DevicePacker,
        layers: Sequence[LayerWeights], norm: torch.Tensor,
    ) -> None:  # fmt: skip
        """Reads what stays on the device and on the host. Raises DiskUnusable, OutOfMemory."""
        self.norm, self._layers, self._packer, self._tiers = norm, layers, packer, placement.tiers
        self._regions = region_groups(file.layout)
        self.has_head, self.packed = bool(file.layout.head), packer.packed
        self.embedding = torch.empty(0, norm.shape[-1], dtype=packer.dtype, device=at)
        self.device, self.layers_done = CopyStream(at), 0
        self._here: dict[str, torch.Tensor] = {}  # matrices that stay, by region
        self._host = PinnedMemory(placement.host_bytes, at)
        self._staging = PinnedMemory(placement.staging_bytes, at)
        self._ring = torch.zeros(placement.weights.ring_bytes, dtype=torch.uint8, device=at)
        source = file.open()
        try:
            groups, extents = self._read(source, placement)
        except BaseException:
            source.close()
            raise
        if not extents:
            source.close()
        self._disk = DiskWeights(source, extents, self._staging).read_ahead() if extents else None
        copies: ReadAhead[int] | None = None
        if moving := [group for group in groups if group]:
            tier = HostWeights(self.device, moving, self._ring, self._staging.tensor, self._disk)
            copies = ReadAhead(tier, len(self._ring), "weights are", threads=1, repeated=range(len(moving)))
        coming = [
            [region for region, tier in zip(regions, tiers, strict=True) if tier is not MemoryTier.DEVICE]
            for regions, tiers in zip(self._regions, self._tiers, strict=True)
        ]
        self.groups = StreamedGroups(coming, len(layers), copies)

    @property
    def figures(self) -> TierFigures:
        """Any thread. Waiting is that of the engine's thread, for the disk or for copies to be launched."""
        copied = self.groups.figures
        of_disk = TierFigures() if self._disk is None else self._disk.figures
        return replace(of_disk, waited_s=copied.waited_s, copied_bytes=copied.read_bytes)

    def close(self) -> None:
        self.groups.close()
        self._host.close()
        self._staging.close()

    @contextmanager
    def layer(self, index: int) -> Generator[LayerWeights]:
        """Have a layer on the device, see `model.decoder.LayerSource`. Raises ExecutorLost."""
        with self._group(index) as (qkv, o, gate_up, down):
            yield replace(self._layers[index], qkv=qkv, o=o, gate_up=gate_up, down=down)
        self.layers_done += 1

    def head_pieces(self) -> Iterator[torch.Tensor]:
        """Have the head piece by piece, see `DeviceWeights.head_pieces`. Raises ExecutorLost."""
        for group in range(len(self._layers), len(self._regions)):
            with self._group(group) as matrices:
                yield from matrices

    @contextmanager
    def _group(self, group: int) -> Generator[list[torch.Tensor]]:
        """Matrices of a group, for what is launched in this context."""
        with self.groups.acquire(group) as came:
            come = {one.name: self._view(self._ring[at : at + one.n_bytes], one) for one, at in came}
            yield [come[one.name] if one.name in come else self._here[one.name] for one in self._regions[group]]

    def _read(self, file: DirectFile, placement: DevicePlacement) -> tuple[list[list[Piece]], list[list[Extent]]]:
        """What each group has outside of the device; and where the disk has its part, of those that have one there."""
        here = torch.empty(placement.weights.resident_bytes, dtype=torch.uint8, device=self.device.at)
        bounce = PinnedMemory(BLOCK, self.device.at)
        taken, hosted, groups, extents = 0, 0, list[list[Piece]](), list[list[Extent]]()
        for regions, tiers in zip(self._regions, self._tiers, strict=True):
            group, on_disk = list[Piece](), list[Extent]()
            for region, tier in zip(regions, tiers, strict=True):
                if tier is MemoryTier.DEVICE:
                    to = here[taken : taken + region.n_bytes]
                    for done in range(0, region.n_bytes, BLOCK):
                        n_bytes = min(BLOCK, region.n_bytes - done)
                        file.read(bounce.address, n_bytes, region.offset + done)
                        to[done : done + n_bytes].copy_(bounce.tensor[:n_bytes])
                    self._here[region.name] = self._view(to, region)
                    taken += region.n_bytes
                elif tier is MemoryTier.HOST:
                    file.read(self._host.address + hosted, region.n_bytes, region.offset)
                    group.append(FromHost(self._host.tensor[hosted : hosted + region.n_bytes]))
                    hosted += region.n_bytes
                else:
                    group.append(FromDisk(len(extents), region.n_bytes))
                    on_disk.append(Extent(region.offset, region.n_bytes))
            groups.append(group)
            extents += [on_disk] if on_disk else []
        bounce.close()
        return groups, extents

    def _view(self, memory: torch.Tensor, region: Region) -> torch.Tensor:
        return self._packer.view(memory, region.n_out, region.n_in)

"""The operators of the decoder (`model.decoder`) as Triton kernels around matrix products, which are the library's.

Those with int4 weights are ours (`weft_kernels.triton.int4`).
A layer without adapters is 4 products and 5 kernels: two norms, rotation, attention, activation. Adapters add 4 shrinks
and 2 expands: those of q|k|v and gate|up happen in the kernels that read these next. Families with norms behind
attention and MLP, or of all heads of a token together, have a kernel more for each.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (its name everywhere)

from weft.domain.model.families import HeadNorms
from weft.domain.model.spec import ModelSpec
from weft_kernels.triton import fused, int4, lora
from weft_kernels.triton.lora import ChunkTable, DeferredExpand, PartialSums
from weft_kernels.triton.prepared import Launch
from weft_kernels.triton.tables import LoraTables, SiteTables
from weft_runner.model.cuda.attention import Attention
from weft_runner.model.cuda.step import DeviceStep
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.lora import QKV, SITES
from weft_runner.model.partition import Partition
from weft_runner.model.tensor_parallel import COLUMN_SITES, TensorParallel
from weft_runner.model.weights import LayerWeights

Widths = Callable[[int, int], int]  # (layer, site)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceContext:
    """What all steps share: the cache, the adapters, rotary tables (`executor.rotary_table`), multiprocessors.

    `spec` is of this device's `part` of the model; `tensor` are the others.
    """

    spec: ModelSpec
    part: Partition
    tensor: TensorParallel
    kv: KvCache
    tables: LoraTables
    cos_sin: tuple[torch.Tensor, ...]  # of each rope of the model
    sms: int
    side: torch.cuda.Stream | None  # where shrinks run beside the base's products; None: before them

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.kv.tensor.dtype, device=self.kv.tensor.device)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The library's product, or ours where the weight is packed."""
        if int4.is_packed(weight):
            return int4.linear(x, weight, int4.BLOCK_OUT * len(weight), sms=self.sms, bias=bias)
        return F.linear(x, weight, bias) if x.is_cuda else interpreted_product(x, weight, bias).to(x.dtype)


def interpreted_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 x W^T + b on a CPU, whose libraries sum in an order that depends on the number of rows and columns.

    Sums of bf16 products are exact in fp64 but for rare ranges of exponents, so that they are the same in any order.
    """
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).float()


class TritonOps:
    """`Operators` of one step on the device."""

    def __init__(
        self,
        device: DeviceContext,
        step: DeviceStep,
        attention: Attention,
        residual: torch.Tensor,
        widths: Widths | None,
    ) -> None:
        """`residual`: fp32 [T, H], written to. `widths(layer, site)`: ranks of the widest adapter of the step there.

        None: no token of the step has an adapter. It is asked once a site, before anything of an adapter is read.
        """
        self._device, self._step, self._attention = device, step, attention
        self._residual, self._widths = residual, widths
        self._chunked = step.base_chunked if widths is None else step.chunked
        self._pending: DeferredExpand | None = None  # of the projection that was made last, for who reads it
        self._launches: dict[object, Launch] = {}  # prepared by one layer for those after it
        self._norms_together = device.spec.family.head_norms is HeadNorms.ALL  # of a token, once they are whole

    def go_on(self, residual: torch.Tensor) -> None:
        """With the residual stream in another place."""
        self._residual = residual
        self._launches.pop(fused.prepare_add_norm, None)

    def add_norm(self, y: torch.Tensor | None, weight: torch.Tensor | None) -> torch.Tensor:
        x, spec = self._device.new(*self._residual.shape), self._device.spec
        if (launch := self._launches.get(key := fused.prepare_add_norm)) is None:
            launch = self._launches[key] = fused.prepare_add_norm(
                self._residual, spec.norm_eps, spec.residual_scale, layer_norm=spec.family.layer_norm
            )
        launch(x, y, weight)
        return x

    def norm(self, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x, spec = torch.empty_like(y), self._device.spec
        if (launch := self._launches.get(key := fused.prepare_norm)) is None:
            launch = self._launches[key] = fused.prepare_norm(y, spec.norm_eps, layer_norm=spec.family.layer_norm)
        launch(x, y, weight)
        return x

    def end(self, y: torch.Tensor | None) -> torch.Tensor:
        if y is not None:
            self._residual.add_(y, alpha=self._device.spec.residual_scale)
        return self._residual

    def project(
        self, x: torch.Tensor, weight: torch.Tensor, layer: int, site: int, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The shrink reads the same x as the product: beside it, where there is a stream for it."""
        width, device = 0 if self._widths is None else self._widths(layer, site), self._device
        if not width:
            return device.tensor.summed(device.linear(x, weight, bias), site)
        tables = device.tables.at(layer, site)
        whole, alone = self._step.whole, device.tensor.size == 1
        partials = lora.planes_of(tables, whole.chunks, whole.block_m, x.shape[0], device.sms, alone=alone)
        if (shrink := self._launches.get(key := (lora.prepare_shrink, site))) is None:
            shrink = self._launches[key] = lora.prepare_shrink(partials, x, tables, self._chunked)
        if device.side is None:
            shrink(partials.tensor, x, tables.shrinks)
            y = device.linear(x, weight, bias)
        else:
            here = torch.cuda.current_stream()
            device.side.wait_stream(here)
            with torch.cuda.stream(device.side):  # what is used there was allocated before
                shrink(partials.tensor, x, tables.shrinks)
            y = device.linear(x, weight, bias)
            here.wait_stream(device.side)
        self._add_lora(y, self._gathered(partials, site, width), tables, site)
        return device.tensor.summed(y, site)

    def _add_lora(self, y: torch.Tensor, partials: PartialSums, tables: SiteTables, site: int) -> None:
        """Leave it to the next kernel that reads y, at column sites; at others add it to this device's outputs."""
        if site in COLUMN_SITES and not (site == QKV and self._norms_together):
            self._pending = DeferredExpand(partials, tables)
            return
        own = y if self._device.tensor.size == 1 else y[:, self._device.part.outputs(SITES[site][0])]
        if (launch := self._launches.get(key := (lora.prepare_expand, site, partials.tensor.shape))) is None:
            launch = self._launches[key] = lora.prepare_expand(own, partials, tables, self._chunked)
        launch(own, partials.tensor, tables.expands)

    def _gathered(self, partials: PartialSums, site: int, width: int) -> PartialSums:
        """Shrunk by all devices together, see `model.tensor_parallel`."""
        tensor = self._device.tensor
        if tensor.size == 1:
            return partials
        own = partials.tensor[:, :, : tensor.own_width(width, site)].sum(dim=0)
        return PartialSums(tensor.shrunk(own, site)[None].contiguous())

    def attention(self, qkv: torch.Tensor, layer: int, weights: LayerWeights) -> torch.Tensor:
        device, step, spec, rope = self._device, self._step, self._device.spec, weights.spec.rope
        q = device.new(qkv.shape[0], spec.heads, spec.head_dim)  # not scaled
        norms, pending = self._head_norms(qkv, weights), self._taken()
        if (launch := self._launches.get(key := (fused.prepare_rope_write, _planes_shape(pending), rope))) is None:
            made = self._rotation(q, device.kv.tensor, qkv, step.pages, step.row_of, self._chunked, pending, rope)
            launch = self._launches[key] = made
        launch(q, qkv, *norms, layer, *lora.expand_arguments(pending))
        return self._attention.attend(q, layer, weights.spec.window)

    def _rotation(
        self, q: torch.Tensor, kv: torch.Tensor, qkv: torch.Tensor, pages: torch.Tensor, row_of: torch.Tensor,
        chunked: ChunkTable, pending: DeferredExpand | None, rope: int | None,
    ) -> Launch:  # fmt: skip
        """What rotates q and k of these chunks by a rope of the model (None: by none) and writes k and v."""
        device, spec, rows = self._device, self._device.spec, self._step.rows
        table = None if rope is None else device.cos_sin[rope]
        long = None if rope is None or not spec.ropes[rope].long else self._step.long
        growth = spec.query_growth, spec.growth_tokens
        return fused.prepare_rope_write(
            q, kv, qkv, rows, pages, row_of, chunked, table, long, spec.norm_eps, pending, growth
        )  # fmt: skip

    def _head_norms(
        self, qkv: torch.Tensor, weights: LayerWeights
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
        """The norms of q and k that are left to the rotation: those of all heads together are done here, in place."""
        if not self._norms_together:
            return weights.q_norm, weights.k_norm
        spec = self._device.spec
        if (launch := self._launches.get(key := fused.prepare_norm_heads)) is None:
            made = fused.prepare_norm_heads(qkv, spec.heads, spec.kv_heads, spec.norm_eps)
            launch = self._launches[key] = made
        launch(qkv, weights.q_norm, weights.k_norm)
        return None, None

    def gate(self, gate_up: torch.Tensor, layer: int) -> torch.Tensor:
        del layer
        spec, pending = self._device.spec, self._taken()
        out = self._device.new(gate_up.shape[0], spec.intermediate_size)
        if (launch := self._launches.get(key := (fused.prepare_gate, _planes_shape(pending)))) is None:
            launch = self._launches[key] = fused.prepare_gate(
                out, gate_up, self._chunked, pending, activation=spec.activation
            )
        launch(out, gate_up, *lora.expand_arguments(pending))
        return out

    def _taken(self) -> DeferredExpand | None:
        """The expand that the last projection left to the next kernel that reads it."""
        pending, self._pending = self._pending, None
        return pending


def _planes_shape(pending: DeferredExpand | None) -> torch.Size | None:
    """What tells launches of one kernel apart in a step: ranks that devices share may differ from layer to layer."""
    return None if pending is None else pending.partials.tensor.shape

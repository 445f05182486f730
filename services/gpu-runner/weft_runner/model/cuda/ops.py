"""The operators of the decoder (`model.decoder`) as Triton kernels around matrix products, which are the library's.

Those with int4 weights are ours (`weft_kernels.triton.int4`).
A layer without adapters is 4 products and 5 kernels: two norms, rotation, attention, silu. Adapters add 4 shrinks and 2
expands: those of q|k|v and gate|up happen in the kernels that read these next.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (its name everywhere)

from weft.domain.model.config import ModelSpec
from weft_kernels.triton import fused, int4, lora
from weft_kernels.triton.lora import PartialSums
from weft_kernels.triton.tables import LoraTables
from weft_runner.model.cuda.attention import Attention
from weft_runner.model.cuda.step import DeviceStep
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.lora import GATE_UP, QKV, SITES
from weft_runner.model.partition import Partition
from weft_runner.model.tensor_parallel import COLUMN_SITES, TensorParallel
from weft_runner.model.weights import LayerWeights

Widths = Callable[[int, int], int]  # (layer, site)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceContext:
    """What all steps share: the cache, the adapters, the rotary table fp32 [positions, 2, D / 2], multiprocessors.

    `spec` is of this device's `part` of the model; `tensor` are the others.
    """

    spec: ModelSpec
    part: Partition
    tensor: TensorParallel
    kv: KvCache
    tables: LoraTables
    cos_sin: torch.Tensor
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
        self._planes: PartialSums | None = None  # of the projection that was made last, if its expand is still to come

    def go_on(self, residual: torch.Tensor) -> None:
        """With the residual stream in another place."""
        self._residual = residual

    def add_norm(self, y: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        x = self._device.new(*self._residual.shape)
        fused.add_norm(x, self._residual, y, weight, self._device.spec.norm_eps)
        return x

    def end(self, y: torch.Tensor | None) -> torch.Tensor:
        if y is not None:
            self._residual.add_(y)
        return self._residual

    def project(
        self, x: torch.Tensor, weight: torch.Tensor, layer: int, site: int, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The shrink reads the same x as the product: beside it, where there is a stream for it."""
        width = 0 if self._widths is None else self._widths(layer, site)
        if not width:
            return self._device.tensor.summed(self._device.linear(x, weight, bias), site)
        partials = self._planes_for(x, layer, site)
        with self._beside():
            lora.shrink(partials, x, self._device.tables.at(layer, site), self._chunked)
        y = self._device.linear(x, weight, bias)
        self._join()
        self._add_lora(y, self._gathered(partials, site, width), layer, site)
        return self._device.tensor.summed(y, site)

    def _add_lora(self, y: torch.Tensor, partials: PartialSums, layer: int, site: int) -> None:
        """At column sites the next kernel that reads y adds it; at row sites it is added to this device's outputs."""
        if site in COLUMN_SITES:
            self._planes = partials
            return
        own = self._device.part.outputs(SITES[site][0])
        lora.expand(y[:, own], partials, self._device.tables.at(layer, site), self._chunked)

    def _gathered(self, partials: PartialSums, site: int, width: int) -> PartialSums:
        """Shrunk by all devices together, see `model.tensor_parallel`."""
        tensor = self._device.tensor
        if tensor.size == 1:
            return partials
        own = partials.tensor[:, :, : tensor.own_width(width, site)].sum(dim=0)
        return PartialSums(tensor.shrunk(own, site)[None].contiguous())

    def attention(self, qkv: torch.Tensor, layer: int, weights: LayerWeights) -> torch.Tensor:
        device, step, spec = self._device, self._step, self._device.spec
        q = device.new(qkv.shape[0], spec.heads, spec.head_dim)  # not scaled
        fused.rope_write(
            q, device.kv.tensor, qkv, step.rows, step.pages, step.row_of, self._chunked, device.cos_sin,
            layer=layer, q_norm=weights.q_norm, k_norm=weights.k_norm, eps=spec.norm_eps, heads=spec.heads,
            pending=self._pending(layer, QKV),
        )  # fmt: skip
        return self._attention.attend(q, layer, weights.window)

    def gate(self, gate_up: torch.Tensor, layer: int) -> torch.Tensor:
        out = self._device.new(gate_up.shape[0], self._device.spec.intermediate_size)
        fused.silu_mul(out, gate_up, self._chunked, pending=self._pending(layer, GATE_UP))
        return out

    @contextmanager
    def _beside(self) -> Generator[None]:
        """On the side stream, after what was launched so far. What is used there was allocated before."""
        side = self._device.side
        if side is None:
            yield
            return
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield

    def _join(self) -> None:
        if self._device.side is not None:
            torch.cuda.current_stream().wait_stream(self._device.side)

    def _planes_for(self, x: torch.Tensor, layer: int, site: int) -> PartialSums:
        tables, whole = self._device.tables.at(layer, site), self._step.whole
        alone = self._device.tensor.size == 1
        return lora.planes_of(tables, whole.chunks, whole.block_m, x.shape[0], self._device.sms, alone=alone)

    def _pending(self, layer: int, site: int) -> lora.DeferredExpand | None:
        """The expand that the last projection left to the next kernel that reads it."""
        partials, self._planes = self._planes, None
        return None if partials is None else lora.DeferredExpand(partials, self._device.tables.at(layer, site))

"""The reference executor: plain torch in fp32, the oracle of the other executors; it serves where none of them can.

ORCA's selective batching (section 4.3): everything but attention runs on the flattened tokens [T, H]; attention runs
per sequence over its own pages. Decode rows (one token each) are padded to one batched attention, so that 16 of them
are not 16 Python loops a layer; a row in prefill is attended alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (its name everywhere)

from weft_kernels.lora import LoraSite, add_lora
from weft_kernels.plan import SegmentPlan
from weft_runner.memory.kv_cache import KvCache
from weft_runner.model.executor import LayerDone
from weft_runner.model.lora import DOWN, GATE_UP, OUT, QKV
from weft_runner.model.rope import cos_sin, inverse_frequencies, rotate
from weft_runner.model.spec import ModelSpec
from weft_runner.model.step import Step, StepRow
from weft_runner.model.weights import LayerWeights, ModelWeights

VERSION = "1"


class Slots(Protocol):
    """The adapters on the device."""

    def sites(self, layer: int, site: int, /) -> Sequence[LoraSite | None]: ...


@dataclass(frozen=True, slots=True, eq=False)
class _PrefillRow:
    start: int
    end: int
    pages: torch.Tensor  # [pages of the context]
    context: int
    mask: torch.Tensor  # [tokens, context], 0 or -inf: causal, shifted by what is in KV already


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """The step as tensors, shared by all layers."""

    tokens: torch.Tensor  # [T]
    cos: torch.Tensor  # [T, 1, D]
    sin: torch.Tensor
    page: torch.Tensor  # [T], where each token's keys and values go
    offset: torch.Tensor  # [T]
    prefills: tuple[_PrefillRow, ...]
    decode_rows: torch.Tensor  # [B] indices of the decode tokens
    decode_pages: torch.Tensor  # [B * most pages of a row], padded with the row's own first page
    decode_mask: torch.Tensor  # [B, 1, 1, S], 0 or -inf
    sampled: torch.Tensor  # [rows that sample]
    plan: SegmentPlan


class ReferenceExecutor:
    """Llama in plain torch, fp32."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, kv: KvCache, slots: Slots) -> None:
        self._spec, self._weights, self._kv, self._slots = spec, weights, kv, slots
        self._inverse = inverse_frequencies(spec)
        self._scale = spec.head_dim**-0.5

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def numerics_class(self) -> str:
        return f"reference/{VERSION}/fp32/torch{torch.__version__.partition('+')[0]}/tp1"

    def clear_pages(self, pages: list[int]) -> None:
        self._kv.clear(pages)

    @torch.inference_mode()
    def run(
        self,
        step: Step,
        *,
        first: int = 0,
        last: int | None = None,
        hidden: torch.Tensor | None = None,
        layer_done: LayerDone | None = None,
    ) -> torch.Tensor:
        """See `model.executor.Executor.run`."""
        last = self._spec.layers if last is None else last
        prepared = self._prepare(step)
        x = F.embedding(prepared.tokens, self._weights.embedding) if hidden is None else hidden
        for layer in range(first, last):
            x = self._layer(x, layer, prepared)
            if layer_done is not None:
                layer_done(layer)
        return x if last < self._spec.layers else self._logits(x, prepared)

    def _logits(self, x: torch.Tensor, prepared: _Prepared) -> torch.Tensor:
        normed = self._norm(x[prepared.sampled], self._weights.norm)
        return F.linear(normed, self._weights.head)

    def _layer(self, x: torch.Tensor, layer: int, prepared: _Prepared) -> torch.Tensor:
        weights: LayerWeights = self._weights.layers[layer]
        attended = self._attention(self._norm(x, weights.attention_norm), layer, weights, prepared)
        x = x + self._project(attended, weights.o, layer, OUT, prepared.plan)
        gate_up = self._project(self._norm(x, weights.mlp_norm), weights.gate_up, layer, GATE_UP, prepared.plan)
        gate, up = gate_up.split(self._spec.intermediate_size, dim=-1)
        return x + self._project(F.silu(gate) * up, weights.down, layer, DOWN, prepared.plan)

    def _project(self, x: torch.Tensor, weight: torch.Tensor, layer: int, site: int, plan: SegmentPlan) -> torch.Tensor:
        """Base projection of all rows, then each segment's adapter on top."""
        y = F.linear(x, weight)
        if plan.segments:
            add_lora(y, x, self._slots.sites(layer, site), plan)
        return y

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._spec.norm_eps))

    # ---- attention

    def _attention(self, x: torch.Tensor, layer: int, weights: LayerWeights, prepared: _Prepared) -> torch.Tensor:
        """[T, H] -> [T, heads * D]; writes the new keys and values to their pages first."""
        spec = self._spec
        qkv = self._project(x, weights.qkv, layer, QKV, prepared.plan)
        q, k, v = qkv.split((spec.q_size, spec.kv_size, spec.kv_size), dim=-1)
        q = rotate(q.view(-1, spec.heads, spec.head_dim), prepared.cos, prepared.sin)
        k = rotate(k.view(-1, spec.kv_heads, spec.head_dim), prepared.cos, prepared.sin)
        keys, values = self._kv.layer(layer)
        keys[prepared.page, :, prepared.offset] = k
        values[prepared.page, :, prepared.offset] = v.view(-1, spec.kv_heads, spec.head_dim)
        out = torch.empty_like(q)
        for row in prepared.prefills:
            out[row.start : row.end] = self._attend_prefill(q[row.start : row.end], keys, values, row)
        if prepared.decode_rows.numel():
            out[prepared.decode_rows] = self._attend_decode(q[prepared.decode_rows], keys, values, prepared)
        return out.view(-1, spec.q_size)

    def _attend_prefill(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, row: _PrefillRow
    ) -> torch.Tensor:
        """q [t, heads, D] over the row's whole context: causal among its own tokens, open towards earlier ones."""
        k, v = (self._context(source, row.pages, row.context) for source in (keys, values))
        scores = self._grouped(q) @ k[:, None].transpose(-1, -2) * self._scale + row.mask  # [N, G, t, S]
        mixed = torch.softmax(scores, dim=-1) @ v[:, None]
        return mixed.permute(2, 0, 1, 3).reshape(q.shape)

    def _context(self, source: torch.Tensor, pages: torch.Tensor, context: int) -> torch.Tensor:
        """Pages of one sequence -> [N, S, D]."""
        gathered = source.index_select(0, pages)  # [pages, N, P, D]
        return gathered.transpose(0, 1).flatten(1, 2)[:, :context]

    def _grouped(self, q: torch.Tensor) -> torch.Tensor:
        """[t, heads, D] -> [N, G, t, D]: G query heads share one kv head."""
        spec = self._spec
        return q.view(-1, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim).permute(1, 2, 0, 3)

    def _attend_decode(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prepared: _Prepared
    ) -> torch.Tensor:
        """q [B, heads, D], each row over its own pages, padded to the longest."""
        spec, batch = self._spec, q.shape[0]
        k, v = (self._padded(source, prepared.decode_pages, batch) for source in (keys, values))
        grouped = q.view(batch, spec.kv_heads, -1, spec.head_dim)  # [B, N, G, D]
        scores = grouped @ k.transpose(-1, -2) * self._scale + prepared.decode_mask
        return (torch.softmax(scores, dim=-1) @ v).view(q.shape)

    def _padded(self, source: torch.Tensor, pages: torch.Tensor, batch: int) -> torch.Tensor:
        """Pages of B sequences -> [B, N, S, D]."""
        gathered = source.index_select(0, pages)
        _, n, p, d = gathered.shape
        return gathered.view(batch, -1, n, p, d).transpose(1, 2).reshape(batch, n, -1, d)

    # ---- the step as tensors

    def _prepare(self, step: Step) -> _Prepared:
        size = self._kv.page_tokens
        positions: list[int] = []
        pages: list[int] = []
        for row in step.rows:
            here = range(row.position, row.context)
            positions.extend(here)
            pages.extend(row.pages[position // size] for position in here)
        position = torch.tensor(positions)
        cos, sin = cos_sin(position, self._inverse)
        decodes = [row for row in step.rows if row.end - row.start == 1]
        table, mask = self._decode_table(decodes)
        return _Prepared(
            tokens=torch.tensor(step.tokens),
            cos=cos,
            sin=sin,
            page=torch.tensor(pages),
            offset=position % size,
            prefills=tuple(self._prefill_row(row) for row in step.rows if row.end - row.start > 1),
            decode_rows=torch.tensor([row.start for row in decodes], dtype=torch.int64),
            decode_pages=table,
            decode_mask=mask,
            sampled=torch.tensor([row.end - 1 for row in step.rows if row.samples], dtype=torch.int64),
            plan=step.plan,
        )

    def _prefill_row(self, row: StepRow) -> _PrefillRow:
        n_pages = -(-row.context // self._kv.page_tokens)
        allowed = torch.arange(row.context) <= torch.arange(row.position, row.context)[:, None]
        mask = torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)
        return _PrefillRow(row.start, row.end, torch.tensor(row.pages[:n_pages]), row.context, mask)

    def _decode_table(self, rows: Sequence[StepRow]) -> tuple[torch.Tensor, torch.Tensor]:
        """Page table and mask; padding points to the row's own first page, so no row ever reads another's."""
        size = self._kv.page_tokens
        used = [row.pages[: -(-row.context // size)] for row in rows]
        width = max((len(pages) for pages in used), default=0)
        table = [page for pages in used for page in (*pages, *[pages[0]] * (width - len(pages)))]
        contexts = torch.tensor([row.context for row in rows])
        allowed = torch.arange(width * size) < contexts[:, None]
        mask = torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)
        return torch.tensor(table, dtype=torch.int64), mask[:, None, None, :]

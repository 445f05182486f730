"""The reference executor: plain torch in fp32, the oracle of the other executors; it serves where none of them can.

ORCA's selective batching (section 4.3): everything but attention runs on the flattened tokens [T, H]; attention runs
per sequence over its own pages. Decode rows (one token each) are padded to one batched attention, so that 16 of them
are not 16 Python loops a layer; a row in prefill is attended alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (its name everywhere)

from weft_kernels.lora import add_lora
from weft_kernels.plan import SegmentPlan
from weft_runner.core.choice import Choice
from weft_runner.memory.kv_cache import KvCache
from weft_runner.memory.lora_table import LoraTable
from weft_runner.model.executor import LayerDone
from weft_runner.model.lora import DOWN, GATE_UP, OUT, QKV
from weft_runner.model.rope import cos_sin, inverse_frequencies, rotate
from weft_runner.model.sampling import Draw, choose
from weft_runner.model.spec import ModelSpec
from weft_runner.model.step import Step, StepRow
from weft_runner.model.weights import LayerWeights, ModelWeights

VERSION = "1"


@dataclass(frozen=True, slots=True, eq=False)
class _PrefillRow:
    start: int
    end: int
    context: int
    pages: torch.Tensor  # page index of its whole context
    masks: Mapping[int, torch.Tensor]  # by window: [tokens, context], 0 or -inf: causal, shifted by what is in KV


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeRows:
    rows: torch.Tensor | None  # [B] indices of the decode tokens; None: all of the step's tokens are
    pages: torch.Tensor  # page index [2, B, N, W], padded with the row's own first page
    masks: Mapping[int, torch.Tensor]  # by window: [B, 1, 1, W * P], 0 or -inf


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """The step as tensors, shared by all layers."""

    tokens: torch.Tensor  # [T]
    cos: torch.Tensor  # [T, 1, D]
    sin: torch.Tensor
    written: torch.Tensor  # token index [T, 2 N], where each token's keys and values go
    prefills: tuple[_PrefillRow, ...]
    decodes: _DecodeRows | None
    sampled: torch.Tensor  # [rows that sample]
    plan: SegmentPlan


class ReferenceExecutor:
    """Llama, Mistral, Qwen2 and Qwen3 in plain torch, fp32."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, kv: KvCache, adapters: LoraTable) -> None:
        self._spec, self._weights, self._kv, self._adapters = spec, weights, kv, adapters
        self._inverse = inverse_frequencies(spec)
        self._scale = spec.head_dim**-0.5
        self._torch_threads = torch.get_num_threads()
        self._windows = frozenset(spec.windows)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def numerics_class(self) -> str:
        return f"reference/{VERSION}/fp32/torch{torch.__version__.partition('+')[0]}/tp1"

    @property
    def torch_threads(self) -> int:
        return self._torch_threads

    @property
    def adapters(self) -> LoraTable:
        return self._adapters

    def choose(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[Choice | None]:
        return choose(logits, draws)

    @property
    def page_bytes(self) -> int:
        return self._kv.page_bytes

    def lend_pages(self, pages: list[int]) -> None:
        """Their memory stays with the tensor: this executor is the oracle, not the one that serves a full machine."""

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
        return F.linear(self._norm(x[prepared.sampled], self._weights.norm), self._weights.head)

    def _layer(self, x: torch.Tensor, layer: int, prepared: _Prepared) -> torch.Tensor:
        weights: LayerWeights = self._weights.layers[layer]
        attended = self._attention(self._norm(x, weights.attention_norm), layer, weights, prepared)
        x = x + self._project(attended, weights.o, layer, OUT, prepared.plan)
        gate_up = self._project(self._norm(x, weights.mlp_norm), weights.gate_up, layer, GATE_UP, prepared.plan)
        inner = self._spec.intermediate_size
        gated = F.silu(gate_up[:, :inner]) * gate_up[:, inner:]
        return x + self._project(gated, weights.down, layer, DOWN, prepared.plan)

    def _project(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        layer: int,
        site: int,
        plan: SegmentPlan,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Base projection of all rows, then each segment's adapter on top."""
        y = F.linear(x, weight, bias)
        if plan.segments:
            add_lora(y, x, self._adapters.sites(layer, site), plan)
        return y

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self._spec.norm_eps)

    # ---- attention

    def _attention(self, x: torch.Tensor, layer: int, weights: LayerWeights, prepared: _Prepared) -> torch.Tensor:
        """[T, H] -> [T, heads * D]; writes the new keys and values to their pages first."""
        heads, kv_heads, dim = self._spec.heads, self._spec.kv_heads, self._spec.head_dim
        qkv = self._project(x, weights.qkv, layer, QKV, prepared.plan, weights.qkv_bias)
        qkv = qkv.view(-1, heads + 2 * kv_heads, dim)
        qk = rotate(self._norm_heads(qkv[:, : heads + kv_heads], weights), prepared.cos, prepared.sin)
        self._kv.write(layer, prepared.written, torch.cat((qk[:, heads:], qkv[:, heads + kv_heads :]), dim=1))
        q = qk[:, :heads] * self._scale
        if prepared.decodes is not None and prepared.decodes.rows is None:
            return self._attend_decode(q, layer, weights.window, prepared.decodes)
        out = torch.empty_like(q).view(-1, heads * dim)
        for row in prepared.prefills:
            out[row.start : row.end] = self._attend_prefill(q[row.start : row.end], layer, weights.window, row)
        if prepared.decodes is not None:
            rows = prepared.decodes.rows
            out[rows] = self._attend_decode(q[rows], layer, weights.window, prepared.decodes)
        return out

    def _norm_heads(self, qk: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        """[T, heads + N, D], queries first: each head by itself, before it is rotated (Qwen3)."""
        if weights.q_norm is None or weights.k_norm is None:
            return qk
        heads = self._spec.heads
        return torch.cat((self._norm(qk[:, :heads], weights.q_norm), self._norm(qk[:, heads:], weights.k_norm)), dim=1)

    def _attend_prefill(self, q: torch.Tensor, layer: int, window: int, row: _PrefillRow) -> torch.Tensor:
        """q [t, heads, D] over the row's context: causal among its own tokens, earlier ones as far as the window."""
        spec = self._spec
        k, v = self._kv.read(layer, row.pages)[:, :, None, : row.context]  # each [N, 1, S, D]
        grouped = q.view(-1, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim).permute(1, 2, 0, 3)
        scores = grouped @ k.transpose(-1, -2) + row.masks[window]  # [N, G, t, S]
        mixed = torch.softmax(scores, dim=-1) @ v
        return mixed.permute(2, 0, 1, 3).reshape(q.shape[0], -1)

    def _attend_decode(self, q: torch.Tensor, layer: int, window: int, decodes: _DecodeRows) -> torch.Tensor:
        """q [B, heads, D], each row over its own pages, padded to the longest."""
        spec, batch = self._spec, q.shape[0]
        k, v = self._kv.read(layer, decodes.pages)  # each [B, N, S, D]
        grouped = q.reshape(batch, spec.kv_heads, -1, spec.head_dim)  # [B, N, G, D]: G heads share one kv head
        scores = grouped @ k.transpose(-1, -2) + decodes.masks[window]
        return (torch.softmax(scores, dim=-1) @ v).view(batch, -1)

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
        return _Prepared(
            tokens=torch.tensor(step.tokens),
            cos=cos,
            sin=sin,
            written=self._kv.token_index(torch.tensor(pages), position % size),
            prefills=tuple(self._prefill_row(row) for row in step.rows if row.end - row.start > 1),
            decodes=self._decode_rows(step),
            sampled=torch.tensor([row.end - 1 for row in step.rows if row.samples], dtype=torch.int64),
            plan=step.plan,
        )

    def _prefill_row(self, row: StepRow) -> _PrefillRow:
        n_pages = -(-row.context // self._kv.page_tokens)
        masks = self._masks(torch.arange(row.position, row.context)[:, None], row.context)
        return _PrefillRow(
            row.start, row.end, row.context, self._kv.page_index(torch.tensor(row.pages[:n_pages])), masks
        )

    def _masks(self, positions: torch.Tensor, width: int) -> dict[int, torch.Tensor]:
        """positions [..., 1] of tokens -> by window, 0 for what each may see of the first `width` tokens, else -inf."""
        seen = torch.arange(width)

        def mask(window: int) -> torch.Tensor:
            allowed = seen <= positions
            if window:
                allowed &= seen > positions - window
            return torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)

        return {window: mask(window) for window in self._windows}

    def _decode_rows(self, step: Step) -> _DecodeRows | None:
        """Page table and mask; padding points to the row's own first page, so no row ever reads another's."""
        size = self._kv.page_tokens
        rows = [row for row in step.rows if row.end - row.start == 1]
        if not rows:
            return None
        used = [row.pages[: -(-row.context // size)] for row in rows]
        width = max(len(pages) for pages in used)
        table = torch.tensor([[*pages, *[pages[0]] * (width - len(pages))] for pages in used])
        positions = torch.tensor([row.position for row in rows])[:, None, None, None]
        picked = None if len(rows) == len(step.rows) else torch.tensor([row.start for row in rows])
        return _DecodeRows(picked, self._kv.page_index(table), self._masks(positions, width * size))

"""The operators of the decoder (`model.decoder`) in plain torch: the oracle of those that are kernels.

Attention runs per sequence over its own pages. Decode rows (one token each) are padded to one batched attention, so
that 16 of them are not 16 Python loops a layer; a row in prefill is attended alone. A step is made into the tensors
that operators read once, for all layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (its name everywhere)

from weft.domain.model.spec import ModelSpec, RopeSpec
from weft_kernels.lora import LoraSite, add_lora, expand, shrink
from weft_kernels.plan import SegmentPlan
from weft_runner.model.decoder import cos_sin, rotate
from weft_runner.model.host_tensors import tensor_of
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.reference.adapters import TorchAdapterStore
from weft_runner.model.rope import inverse_frequencies
from weft_runner.model.step import StepInput, StepRow
from weft_runner.model.tensor_parallel import TensorParallel
from weft_runner.model.weights import LayerWeights


@dataclass(frozen=True, slots=True, eq=False)
class PrefillRow:
    """One row of several tokens, attended alone."""

    start: int
    end: int
    context: int
    pages: torch.Tensor  # page index of its whole context
    masks: Mapping[int, torch.Tensor]  # by window: [tokens, context], 0 or -inf: causal, shifted by what is in KV


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """All rows of one token, padded to the longest."""

    rows: torch.Tensor | None  # [B] indices of the decode tokens; None: all of the step's tokens are
    pages: torch.Tensor  # page index [2, B, N, W], padded with the row's own first page
    masks: Mapping[int, torch.Tensor]  # by window: [B, 1, 1, W * P], 0 or -inf


@dataclass(frozen=True, slots=True, eq=False)
class PreparedStep:
    """The step as tensors."""

    tokens: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    rotations: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # of each rope of the model: cos and sin [T, 1, R]
    written: torch.Tensor  # token index [T, 2 N], where each token's keys and values go
    prefills: tuple[PrefillRow, ...]
    decodes: DecodeRows | None
    sampled: torch.Tensor  # [S], as `StepArrays.sampled`
    plan: SegmentPlan


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Frequencies [R / 2] of one rope of the model, of short texts and of long ones, and the factor of cos and sin."""

    short: torch.Tensor
    long: torch.Tensor
    factor: float

    @classmethod
    def of(cls, rope: RopeSpec, head_dim: int) -> "Rotation":
        short, long = (tensor_of(inverse_frequencies(rope, head_dim, long=long)) for long in (False, True))
        return cls(short, long, rope.attention_factor)

    def of_tokens(self, long: torch.Tensor) -> torch.Tensor:
        """Frequencies [T, R / 2] of tokens of which some are in long texts, bool [T]."""
        return torch.where(long[:, None], self.long, self.short)


class StepMaker:
    """Steps -> tensors, for one cache. `ropes`: the model's; `windows`: those that layers have."""

    def __init__(self, kv: KvCache, ropes: Sequence[Rotation], windows: frozenset[int]) -> None:
        self._kv, self._ropes, self._windows = kv, ropes, windows

    def prepare(self, step: StepInput) -> PreparedStep:
        size = self._kv.page_tokens
        positions: list[int] = []
        pages: list[int] = []
        for row in step.rows:
            here = range(row.position, row.context)
            positions.extend(here)
            pages.extend(row.pages[position // size] for position in here)
        position = torch.tensor(positions)
        long = torch.tensor([row.long for row in step.rows for _ in range(row.end - row.start)])
        return PreparedStep(
            tokens=torch.tensor(step.tokens),
            positions=position,
            rotations=tuple(cos_sin(position, rope.of_tokens(long), rope.factor) for rope in self._ropes),
            written=self._kv.token_index(torch.tensor(pages), position % size),
            prefills=tuple(self._prefill_row(row) for row in step.rows if row.end - row.start > 1),
            decodes=self._decode_rows(step),
            sampled=torch.tensor([token for row in step.rows for token in row.wanted], dtype=torch.int64),
            plan=step.plan,
        )

    def _prefill_row(self, row: StepRow) -> PrefillRow:
        n_pages = -(-row.context // self._kv.page_tokens)
        masks = self._masks(torch.arange(row.position, row.context)[:, None], row.context)
        return PrefillRow(
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

    def _decode_rows(self, step: StepInput) -> DecodeRows | None:
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
        return DecodeRows(picked, self._kv.page_index(table), self._masks(positions, width * size))


class ReferenceOps:
    """`Operators` of one prepared step, of the part of the model that `spec` describes (`Partition.local`).

    `residual`: [T, H], what the first layer reads; it is not written to.
    """

    def __init__(
        self,
        spec: ModelSpec,
        kv: KvCache,
        adapters: TorchAdapterStore,
        tensor: TensorParallel,
        prepared: PreparedStep,
        residual: torch.Tensor,
    ) -> None:
        self._spec, self._kv, self._adapters, self._prepared = spec, kv, adapters, prepared
        self._tensor, self._residual = tensor, residual
        self._scale = spec.query_scale

    def add_norm(self, y: torch.Tensor | None, weight: torch.Tensor | None) -> torch.Tensor:
        x = self.end(y)
        return x if weight is None else self.norm(x, weight)

    def end(self, y: torch.Tensor | None) -> torch.Tensor:
        if y is not None:
            self._residual = self._residual + self._spec.residual_scale * y
        return self._residual

    def norm(self, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._spec.family.layer_norm:
            return F.layer_norm(y, weight.shape[1:], weight[0], weight[1], self._spec.norm_eps)
        return F.rms_norm(y, weight.shape, weight, self._spec.norm_eps)

    def project(
        self, x: torch.Tensor, weight: torch.Tensor, layer: int, site: int, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Base projection of all rows, then each segment's adapter on top."""
        y, plan = F.linear(x, weight, bias), self._prepared.plan
        sites = self._adapters.sites(layer, site)
        if self._tensor.size > 1:
            self._add_parts(y, x, sites, site)
        elif plan.segments:
            add_lora(y, x, sites, plan)
        return self._tensor.summed(y, site)

    def _add_parts(self, y: torch.Tensor, x: torch.Tensor, sites: Sequence[LoraSite | None], site: int) -> None:
        """`add_lora` with the other ranks: what is shrunk is whole, [T, width], before it is expanded."""
        plan = self._prepared.plan
        width = max((s.slices[-1].rank_end for one in plan.segments if (s := sites[one.slot]) is not None), default=0)
        if not width:
            return
        part = x.new_zeros(plan.rows, self._tensor.own_width(width, site))
        for segment, v in zip(plan.segments, shrink(x, sites, plan), strict=True):
            if v is not None:
                part[segment.start : segment.end, : v.shape[1]] = v
        whole = self._tensor.shrunk(part, site)
        expand(y, [whole[segment.start : segment.end] for segment in plan.segments], sites, plan)

    def gate(self, gate_up: torch.Tensor, layer: int) -> torch.Tensor:
        del layer  # its adapters are in already
        inner = self._spec.intermediate_size
        made = gate_up[:, :inner]
        made = F.silu(made) if self._spec.activation == "silu" else F.gelu(made, approximate="tanh")
        return made * gate_up[:, inner:] if self._spec.family.gated else made

    # ---- attention

    def attention(self, qkv: torch.Tensor, layer: int, weights: LayerWeights) -> torch.Tensor:
        heads, kv_heads, prepared = self._spec.heads, self._spec.kv_heads, self._prepared
        qkv = qkv.view(-1, heads + 2 * kv_heads, self._spec.head_dim)
        qk = self._norm_heads(qkv[:, : heads + kv_heads], weights)
        if weights.spec.rope is not None:
            qk = rotate(qk, *prepared.rotations[weights.spec.rope])
        self._kv.write(layer, prepared.written, torch.cat((qk[:, heads:], qkv[:, heads + kv_heads :]), dim=1))
        q, prefills, decodes = qk[:, :heads] * self._query_scale(), prepared.prefills, prepared.decodes
        window = weights.spec.window
        if decodes is not None and decodes.rows is None:
            return self._attend_decode(q, layer, window, decodes)
        out = q.new_empty(q.shape[0], self._spec.q_size)
        for row in prefills:
            out[row.start : row.end] = self._attend_prefill(q[row.start : row.end], layer, window, row)
        if decodes is not None:
            out[decodes.rows] = self._attend_decode(q[decodes.rows], layer, window, decodes)
        return out

    def _query_scale(self) -> torch.Tensor | float:
        """Return the factor of all queries, or where it grows with positions of each token's, [T, 1, 1]."""
        spec = self._spec
        if not spec.query_growth:
            return self._scale
        grown = torch.log(1 + torch.floor(self._prepared.positions / spec.growth_tokens))
        return self._scale * (1 + spec.query_growth * grown)[:, None, None]

    def _norm_heads(self, qk: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        """[T, heads + N, D], queries first: each head by itself, or all of a kind, before they are rotated."""
        if weights.q_norm is None or weights.k_norm is None:
            return qk
        norms, eps = (weights.q_norm, weights.k_norm), self._spec.norm_eps
        parts = zip(qk.split((self._spec.heads, self._spec.kv_heads), dim=1), norms, strict=True)
        normed = [F.rms_norm(x.reshape(len(x), -1, len(w)), w.shape, w, eps).view(x.shape) for x, w in parts]
        return torch.cat(normed, dim=1)

    def _attend_prefill(self, q: torch.Tensor, layer: int, window: int, row: PrefillRow) -> torch.Tensor:
        """q [t, heads, D] over the row's context: causal among its own tokens, earlier ones as far as the window."""
        spec = self._spec
        k, v = self._kv.read(layer, row.pages)[:, :, None, : row.context]  # each [N, 1, S, D]
        grouped = q.view(-1, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim).permute(1, 2, 0, 3)
        scores = capped(grouped @ k.transpose(-1, -2), spec.score_cap) + row.masks[window]  # [N, G, t, S]
        mixed = torch.softmax(scores, dim=-1) @ v
        return mixed.permute(2, 0, 1, 3).reshape(q.shape[0], -1)

    def _attend_decode(self, q: torch.Tensor, layer: int, window: int, decodes: DecodeRows) -> torch.Tensor:
        """q [B, heads, D], each row over its own pages, padded to the longest."""
        spec, batch = self._spec, q.shape[0]
        k, v = self._kv.read(layer, decodes.pages)  # each [B, N, S, D]
        grouped = q.reshape(batch, spec.kv_heads, -1, spec.head_dim)  # [B, N, G, D]: G heads share one kv head
        scores = capped(grouped @ k.transpose(-1, -2), spec.score_cap) + decodes.masks[window]
        return (torch.softmax(scores, dim=-1) @ v).view(batch, -1)


def capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Draw scores softly to within (-cap, cap); 0: they stay (Gemma 2, arXiv 2408.00118, section 2)."""
    return cap * torch.tanh(scores / cap) if cap else scores

"""A step as the tensors that the reference operators read: made once a step, shared by all layers."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft_kernels.plan import SegmentPlan
from weft_runner.model.decoder import cos_sin
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.step import StepInput, StepRow


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
    cos: torch.Tensor  # [T, 1, D]
    sin: torch.Tensor
    written: torch.Tensor  # token index [T, 2 N], where each token's keys and values go
    prefills: tuple[PrefillRow, ...]
    decodes: DecodeRows | None
    sampled: torch.Tensor  # [S], as `StepArrays.sampled`
    plan: SegmentPlan


class StepMaker:
    """Steps -> tensors, for one cache. `inverse`: rotary frequencies [D / 2]; `windows`: those that layers have."""

    def __init__(self, kv: KvCache, inverse: torch.Tensor, windows: frozenset[int]) -> None:
        self._kv, self._inverse, self._windows = kv, inverse, windows

    def prepare(self, step: StepInput) -> PreparedStep:
        size = self._kv.page_tokens
        positions: list[int] = []
        pages: list[int] = []
        for row in step.rows:
            here = range(row.position, row.context)
            positions.extend(here)
            pages.extend(row.pages[position // size] for position in here)
        position = torch.tensor(positions)
        cos, sin = cos_sin(position, self._inverse)
        return PreparedStep(
            tokens=torch.tensor(step.tokens),
            cos=cos,
            sin=sin,
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

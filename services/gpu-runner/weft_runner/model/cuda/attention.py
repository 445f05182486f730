"""Attention to the KV pages in a step on the device."""

from functools import partial
from typing import Protocol

import torch

from weft_kernels.triton import attention
from weft_kernels.triton.prepared import Launch
from weft_runner.model.cuda.step import DeviceStep

MAX_SPLITS, LONG_SPLITS = 32, 8  # of one context; those that a long one may use in a large batch


class Attention(Protocol):
    """Attention of one step, whose own keys and values are in their pages already."""

    def attend(self, q: torch.Tensor, layer: int, window: int) -> torch.Tensor:
        """Queries [T, heads, D], not scaled -> [T, heads * D]. A token sees the last `window` of its row, 0: all."""
        ...


class TritonAttention:
    """The kernels of `weft_kernels.triton.attention`: for rows of one token a split context, for others tiles.

    kv: [pages, L, 2, N, P, D]; `sms`: multiprocessors; `block_m`: tokens of a tile of rows in prefill; `scale`: of a
    query's scores; `cap`: theirs (`ModelSpec.score_cap`).
    """

    def __init__(
        self, kv: torch.Tensor, step: DeviceStep, sms: int, block_m: int, scale: float, cap: float = 0.0
    ) -> None:  # fmt: skip
        self._kv, self._step, self._block_m, self._scale, self._cap = kv, step, block_m, scale, cap
        self._usual = attention_splits(step.whole.rows, kv.shape[3], sms)
        self._scratch: attention.DecodeScratch | None = None
        self._launches: dict[int, list[Launch]] = {}  # of the whole step, by window

    def attend(self, q: torch.Tensor, layer: int, window: int) -> torch.Tensor:
        """Attend (`Attention`). In a captured step nothing here depends on what the rows are."""
        step = self._step
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        if (launches := self._launches.get(window)) is None:
            picked = step.picked if step.decodes else None
            launches = self._launches[window] = self._prepared(out, q, window, step.pages, picked, step.tiles)
        for launch in launches:
            launch(out, q, layer)
        return out

    def attend_rows(
        self, out: torch.Tensor, q: torch.Tensor, layer: int, window: int, pages: torch.Tensor,
        picked: torch.Tensor | None, tiles: torch.Tensor,
    ) -> None:  # fmt: skip
        """Some rows: those of one token in `picked` (None: there are none), and those of `tiles`.

        A row's sums do not depend on which others are attended with it: contexts are split as for the whole step.
        """
        for launch in self._prepared(out, q, window, pages, picked, tiles):
            launch(out, q, layer)

    def _prepared(
        self, out: torch.Tensor, q: torch.Tensor, window: int, pages: torch.Tensor, picked: torch.Tensor | None,
        tiles: torch.Tensor,
    ) -> list[Launch]:  # fmt: skip
        """Launches with out, q and a layer."""
        launches = list[Launch]()
        kv, step, scale, cap = self._kv, self._step, self._scale, self._cap
        if picked is not None and len(picked):
            splits = max(self._usual, LONG_SPLITS)
            if self._scratch is None:
                self._scratch = attention.DecodeScratch.make(step.whole.rows, q.shape[1], splits, q.shape[2], q.device)
            decode = partial(attention.prepare_decode, splits=splits, scratch=self._scratch, usual=self._usual)
            launches.append(decode(out, q, kv, step.rows, pages, picked, window=window, scale=scale, cap=cap))
        if len(tiles):
            prefill = partial(attention.prepare_prefill, block_m=self._block_m)
            launches.append(prefill(out, q, kv, step.rows, pages, tiles, window=window, scale=scale, cap=cap))
        return launches


def attention_splits(rows: int, kv_heads: int, sms: int) -> int:
    """Into how many parts a context is split: 1 where rows fill the device, else two programs a multiprocessor."""
    programs = rows * kv_heads
    return 1 if programs >= sms else min(MAX_SPLITS, -(-2 * sms // programs))

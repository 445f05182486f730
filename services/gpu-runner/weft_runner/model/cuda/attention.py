"""Who attends to the KV pages in a step on the device: our kernels, or for eager steps a library (`flashinfer`)."""

from typing import Protocol

import torch

from weft_kernels.triton import attention
from weft_runner.model.cuda.step import DeviceStep

MOST_SPLITS, LONG_SPLITS = 32, 8  # of one context; those that a long one may use in a large batch


class Attention(Protocol):
    """Of one step. The step's own keys and values are in their pages already."""

    def attend(self, q: torch.Tensor, layer: int, window: int) -> torch.Tensor:
        """Queries [T, heads, D], not scaled -> [T, heads * D]. A token sees the last `window` of its row, 0: all."""
        ...


class TritonAttention:
    """The kernels of `weft_kernels.triton.attention`: for rows of one token a split context, for others tiles.

    kv: [pages, L, 2, N, P, D]; `sms`: multiprocessors; `block_m`: tokens of a tile of rows in prefill.
    """

    def __init__(self, kv: torch.Tensor, step: DeviceStep, sms: int, block_m: int) -> None:
        self._kv, self._step, self._sms, self._block_m = kv, step, sms, block_m

    def attend(self, q: torch.Tensor, layer: int, window: int) -> torch.Tensor:
        """See `Attention`. In a captured step nothing here depends on what the rows are."""
        kv, step, scale = self._kv, self._step, q.shape[2] ** -0.5
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        if step.decodes:
            usual = attention_splits(step.shape.rows, kv.shape[3], self._sms)
            splits = max(usual, LONG_SPLITS)
            scratch = attention.DecodeScratch.make(step.shape.rows, q.shape[1], splits, q.shape[2], q.device)
            attention.attend_decode(
                out, q, kv, step.rows, step.pages, step.picked,
                layer=layer, window=window, scale=scale, splits=splits, scratch=scratch, usual=usual,
            )  # fmt: skip
        if step.shape.tiles:
            attention.attend_prefill(
                out, q, kv, step.rows, step.pages, step.tiles,
                layer=layer, window=window, scale=scale, block_m=self._block_m,
            )  # fmt: skip
        return out


def attention_splits(rows: int, kv_heads: int, sms: int) -> int:
    """Into how many parts a context is split, so that a batch of decode rows has two programs a multiprocessor."""
    return max(1, min(MOST_SPLITS, -(-2 * sms // (rows * kv_heads))))

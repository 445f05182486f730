"""KV pages in Punica's layout `[page, L, 2, N, P, D]`: batch outermost, so a sequence leaves as whole contiguous pages.

L layers, 2 = keys and values, N = kv heads, P tokens a page, D head size (Punica, arXiv 2310.18547, section 5.4).
"""

import torch

from weft_runner.model.spec import ModelSpec


class KvCache:
    """One tensor; which sequence a page belongs to is the page book's business."""

    def __init__(self, spec: ModelSpec, pages: int, page_tokens: int, dtype: torch.dtype = torch.float32) -> None:
        self.page_tokens = page_tokens
        shape = (pages, spec.layers, 2, spec.kv_heads, page_tokens, spec.head_dim)
        self.tensor = torch.zeros(shape, dtype=dtype)
        self._layers = [(self.tensor[:, layer, 0], self.tensor[:, layer, 1]) for layer in range(spec.layers)]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer: views [page, N, P, D]."""
        return self._layers[layer]

    def clear(self, pages: list[int]) -> None:
        """Zero pages before they get a new owner.

        Padding is read with weight zero, and 0 * NaN is NaN: what a broken adapter left behind must not reach anybody.
        """
        if pages:
            self.tensor[pages] = 0.0

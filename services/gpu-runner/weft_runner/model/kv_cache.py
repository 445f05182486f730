"""KV pages in Punica's layout `[page, L, 2, N, P, D]`: batch outermost, so a sequence leaves as whole contiguous pages.

L layers, 2 = keys and values, N = kv heads, P tokens a page, D head size (Punica, arXiv 2310.18547, section 5.4). Reads
and writes go through flat views with indices that are built once a step for layer 0 and shifted for the others.
"""

import math

import torch

from weft.domain.model.spec import ModelSpec


class KvCache:
    """One tensor; which sequence a page belongs to is the page book's business.

    `by_layer` [pages * L + slots, 1, 2, N, P, D]: the same memory as pages of one layer, layer l of page p is number
    p * L + l; behind them `slots` more, for layers of pages that lie elsewhere.
    """

    def __init__(
        self,
        spec: ModelSpec,
        pages: int,
        page_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        slots: int = 0,
    ) -> None:
        self.page_tokens = page_tokens
        self._layers, self._heads, self._head_dim = spec.layers, spec.kv_heads, spec.head_dim
        one = (2, spec.kv_heads, page_tokens, spec.head_dim)
        self.by_layer = torch.zeros(pages * spec.layers + slots, 1, *one, dtype=dtype, device=device)
        self.tensor = self.by_layer[: pages * spec.layers].view(pages, spec.layers, *one)
        self.page_bytes = spec.layers * math.prod(one) * self.tensor.element_size()
        self._by_page = self.tensor.view(-1, page_tokens * spec.head_dim)  # one row: a page's tokens of one head
        self._by_token = self.tensor.view(-1, spec.head_dim)

    def page_index(self, pages: torch.Tensor) -> torch.Tensor:
        """Pages [..., W] of sequences -> where `read` finds layer 0: [2, ..., N, W]."""
        head = torch.arange(2 * self._heads).view(2, *([1] * (pages.dim() - 1)), self._heads, 1)
        return pages.unsqueeze(-2) * (self._layers * 2 * self._heads) + head

    def token_index(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """A page and an offset for each of T tokens -> where `write` puts layer 0: [T, 2 N]."""
        head = pages[:, None] * (self._layers * 2 * self._heads) + torch.arange(2 * self._heads)
        return head * self.page_tokens + offsets[:, None]

    def read(self, layer: int, page_index: torch.Tensor) -> torch.Tensor:
        """[2, ..., N, W] -> keys and values [2, ..., N, W * P, D], a copy."""
        rows = self._by_page.index_select(0, (page_index + layer * 2 * self._heads).flatten())
        return rows.view(*page_index.shape[:-1], -1, self._head_dim)

    def write(self, layer: int, token_index: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Put new keys and values [T, 2 N, D] (keys first) at `token_index`."""
        shifted = token_index + layer * 2 * self._heads * self.page_tokens
        self._by_token.index_copy_(0, shifted.flatten(), keys_values.reshape(-1, self._head_dim))

    def clear(self, pages: list[int]) -> None:
        """Zero pages before they get a new owner.

        Padding is read with weight zero, and 0 * NaN is NaN: what a broken adapter wrote must not reach other requests.
        """
        if pages:
            self.tensor[pages] = 0.0

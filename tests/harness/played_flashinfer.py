"""FlashInfer's wrapper for prompts over a paged cache as its documentation describes it, in fp64 on any device.

The library itself computes on GPUs alone. What is played is the part that we use, strictly: a call that the library
would refuse, or a page that the plan does not name, is an error here. `make gpu-check` runs the real one where there is
a GPU and the library; that both take the same parameters is tested wherever it is installed.
"""

import math
from typing import Any

import torch


class BatchPrefillWithPagedKVCacheWrapper:
    """Causal attention of the last tokens of each row over its pages, after a plan."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"
        self._plan: tuple[list[int], list[int], list[int], list[int]] | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        ints = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(part.dtype == torch.int32 and part.is_contiguous() for part in ints)
        queries, bounds, pages, last = self._plan = tuple(part.tolist() for part in ints)
        assert causal
        assert len(queries) == len(bounds) == len(last) + 1
        assert bounds[-1] == len(pages)
        assert all(1 <= n <= page_size for n in last)
        self._heads, self._shape = num_qo_heads, (num_kv_heads, page_size, head_dim_qk)
        self._scale, self._cap = sm_scale or head_dim_qk**-0.5, logits_soft_cap
        self._window, self._dtypes = window_left, (q_data_type, kv_data_type or q_data_type)

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        assert self._plan is not None, "plan() first"
        queries, bounds, pages, last = self._plan
        assert q.shape == (queries[-1], self._heads, self._shape[2])
        assert paged_kv_cache.shape[1:] == (2, *self._shape)
        assert paged_kv_cache.stride(-1) == 1
        assert (q.dtype, paged_kv_cache.dtype) == self._dtypes
        out = torch.empty_like(q)
        for row, n_last in enumerate(last):
            own = torch.tensor(pages[bounds[row] : bounds[row + 1]], device=q.device)
            context = (len(own) - 1) * self._shape[1] + n_last
            keys, values = paged_kv_cache[own].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context].double()
            here = slice(queries[row], queries[row + 1])
            out[here] = self._attended(q[here], keys, values).to(q.dtype)
        return out

    def _attended(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[t, heads, D], each of keys and values [kv heads, context, D]. The last query sees the whole context."""
        group, context = self._heads // self._shape[0], keys.shape[1]
        keys, values = (half.repeat_interleave(group, dim=0) for half in (keys, values))
        scores = torch.einsum("thd,hsd->hts", q.double(), keys) * self._scale
        scores = self._cap * torch.tanh(scores / self._cap) if self._cap else scores
        seen = torch.arange(context, device=q.device)
        own = seen[context - len(q) :, None]
        visible = seen <= own
        if self._window >= 0:
            visible &= seen >= own - self._window
        return torch.einsum("hts,hsd->thd", torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1), values)

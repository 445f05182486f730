"""FlashInfer (arXiv 2501.01005) in place of our attention kernels, where `--attention flashinfer` asks for it.

It attends in eager steps, those with prompts in them: FlashInfer plans each step on the host, and a captured decode
step has no such moment, so those stay with our own kernels. One plan serves all layers of a window. The pages are ours
as they are: `kv[:, layer]` is FlashInfer's HND layout, with the stride of a page of all layers.

Nothing here is imported where the flag is not given: the package is no dependency of the runner.
"""

import importlib
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft_runner.errors import ExecutorUnavailable
from weft_runner.model.step import StepArrays

PACKAGE = "flashinfer"
HEAD_DIMS = (64, 128, 256)  # that its kernels for prompts are made for
WORKSPACE = 128 << 20  # bytes for partial results, what its documentation recommends
PLANNED = 8 << 20  # bytes of a plan, on the device and on the host
Ints = npt.NDArray[np.int32]


def unsupported_reason(head_dim: int, dtype: str, *, real: bool) -> str:
    """Why FlashInfer cannot attend here; empty when it can. `real`: there is a GPU."""
    if not real:
        return "--attention flashinfer needs a GPU: there is no interpreter for it"
    if find_spec(PACKAGE) is None:
        return "--attention flashinfer: it is not installed; pip install flashinfer-python, or leave the flag out"
    if dtype not in ("bf16", "int4"):
        return f"--attention flashinfer: it computes in 16 bits, not with --dtype {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"--attention flashinfer: head_dim {head_dim}, and it computes {', '.join(map(str, HEAD_DIMS))}"
    return ""


def workspace_bytes(windows: Iterable[int]) -> int:
    """What it takes of the device's memory; `windows`: those that layers have."""
    return WORKSPACE + PLANNED * len(set(windows))


class FlashInfer:
    """`Attention` of the step that was planned last, over one cache. Owned by the executor."""

    def __init__(self, kv: torch.Tensor, heads: int, windows: Iterable[int], scale: float, cap: float = 0.0) -> None:
        """kv: [pages, L, 2, N, P, D] in 16 bits; `scale`, `cap`: of a query's scores. Its kernels are built here.

        Raises ExecutorUnavailable.
        """
        self._kv, self._heads, self._scale, self._cap = kv, heads, scale, cap
        self._copied: torch.cuda.Event | None = None  # the last plan is on the device
        try:
            library: Any = importlib.import_module(PACKAGE)
            workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=kv.device)
            wrapper = library.BatchPrefillWithPagedKVCacheWrapper
            self._wrappers = {window: wrapper(workspace, kv_layout="HND") for window in sorted(set(windows))}
            self._try_out()
        except torch.OutOfMemoryError:
            raise
        except (ImportError, OSError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise ExecutorUnavailable(f"--attention flashinfer: the library fails: {error}") from error

    def plan(self, arrays: StepArrays) -> None:
        """Say which tokens see which pages. The step before may still run: its plan is on the device by now."""
        if self._copied is not None:
            self._copied.synchronize()  # a plan leaves the host in a buffer of its wrapper's, which the next one fills
        queries, bounds, pages, last = (torch.from_numpy(part) for part in page_table(arrays, self._kv.shape[4]))
        _, _, _, kv_heads, page_tokens, dim = self._kv.shape
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                queries, bounds, pages, last, self._heads, kv_heads, dim, page_tokens,
                causal=True, sm_scale=self._scale, logits_soft_cap=self._cap or None, window_left=window - 1,  # -1: all
                q_data_type=self._kv.dtype, kv_data_type=self._kv.dtype,
            )  # fmt: skip
        if self._kv.device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record()

    def attend(self, q: torch.Tensor, layer: int, window: int) -> torch.Tensor:
        return self._wrappers[window].run(q, self._kv[:, layer]).flatten(1)

    def _try_out(self) -> None:
        """A prompt of one token on whatever page 0 holds: what is built at first use is built now."""
        zero, one = np.zeros(1, np.int32), np.array([[0, 1, 0, 0]], np.int32)
        self.plan(StepArrays(zero, one, zero, np.empty((0, 3), np.int32), zero, taken=np.empty(0, np.int32)))
        q = torch.zeros(1, self._heads, self._kv.shape[5], dtype=self._kv.dtype, device=self._kv.device)
        for window in self._wrappers:
            self.attend(q, 0, window)


def page_table(arrays: StepArrays, page_tokens: int) -> tuple[Ints, Ints, Ints, Ints]:
    """A step as FlashInfer reads it, R rows: where each one's queries begin and end [R + 1], where its pages do
    [R + 1], the pages of all [...], and how many tokens are in each one's last page [R].

    Pages that a row has beyond its context are left out.
    """
    start, end, position, first = arrays.rows[:, :4].T
    contexts = position + end - start
    used = -(-contexts // page_tokens)
    bounds = np.concatenate(([0], np.cumsum(used)))
    places = np.arange(bounds[-1]) + np.repeat(first - bounds[:-1], used)
    queries = np.concatenate((start[:1], end)).astype(np.int32)
    return queries, bounds.astype(np.int32), arrays.pages[places], ((contexts - 1) % page_tokens + 1).astype(np.int32)

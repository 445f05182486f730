"""Decode attention alone: one token a row over its pages, as one layer of a captured step launches it."""

from dataclasses import dataclass

import torch

from weft_bench.gpu_context import Context
from weft_kernels.triton.attention import DecodeScratch, prepare_decode
from weft_runner.model.cuda.attention import LONG_SPLITS, attention_splits
from weft_stage.gpu_device import Gpu
from weft_stage.gpu_placed import Deck

PAGE_TOKENS = 16
GIGA = 1e9


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Rows of one context each, on random pages of random keys and values."""

    q: torch.Tensor
    out: torch.Tensor
    kv: torch.Tensor
    rows: torch.Tensor
    pages: torch.Tensor
    picked: torch.Tensor
    usual: int
    splits: int
    scratch: DecodeScratch

    @classmethod
    def made(cls, gpu: Gpu, n_rows: int, context: int, heads: int, group: int, dim: int) -> "Case":
        kv_heads, n_pages = heads // group, -(-context // PAGE_TOKENS)
        kv = torch.randn(n_rows * n_pages, 1, 2, kv_heads, PAGE_TOKENS, dim, device=gpu.device, dtype=gpu.dtype)
        q = torch.randn(n_rows, heads, dim, device=gpu.device, dtype=gpu.dtype)
        rows = [(row, row + 1, context - 1, row * n_pages) for row in range(n_rows)]
        usual, splits = splits_of(n_rows, kv_heads, gpu.sms)

        def ints(values: object) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=gpu.device)

        return cls(
            q, torch.empty(n_rows, heads * dim, device=gpu.device, dtype=gpu.dtype), kv, ints(rows),
            ints(Deck(len(kv)).rest()), ints(list(range(n_rows))), usual, splits,
            DecodeScratch.make(n_rows, heads, splits, dim, gpu.device),
        )  # fmt: skip

    def run(self) -> None:
        prepare_decode(
            self.out, self.q, self.kv, self.rows, self.pages, self.picked, window=0,
            scale=self.q.shape[-1] ** -0.5, splits=self.splits, usual=self.usual, scratch=self.scratch,
        )(self.out, self.q, 0)  # fmt: skip

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all contexts."""
        context = int(self.rows[0, 2]) + 1
        return len(self.q) * context * 2 * self.kv.shape[3] * self.kv.shape[5] * self.kv.element_size()

    @property
    def n_bytes(self) -> int:
        """Queries and outputs, too."""
        return self.kv_bytes + 2 * self.q.numel() * self.q.element_size()


def splits_of(rows: int, kv_heads: int, sms: int) -> tuple[int, int]:
    """Into how many parts the engine splits a context (`TritonAttention`): usually, and of a long one at most."""
    usual = attention_splits(rows, kv_heads, sms)
    return usual, max(usual, LONG_SPLITS)


def measure(context: Context) -> None:
    """Every context and grouping of the amounts."""
    heads, dim = context.amounts.heads
    for n_rows, length, group in context.amounts.attention:
        name = f"attention, {n_rows} rows, context {length}, GQA {group}"
        case = Case.made(context.gpu, n_rows, length, heads, group, dim)
        times = context.timer.graph(case.run)
        context.report_times(name, "time", "us", times, bound_s=case.n_bytes / context.machine.bytes_s)
        context.report(name, "keys and values", case.kv_bytes / times.median / GIGA, "GB/s")
        del case
        context.gpu.free()

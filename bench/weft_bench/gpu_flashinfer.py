"""FlashInfer beside our attention kernels, over the same pages in one run: rows of one token, and prompts.

As the engine uses both (`--attention`): FlashInfer's kernels for prompts, planned before the clock starts. Their
results are compared before they are timed. Where it is not installed nothing is measured.
"""

import logging
from dataclasses import dataclass

import torch

from weft_bench.gpu_amounts import attention_cases
from weft_bench.gpu_check import Rows, assert_near
from weft_bench.gpu_context import Context
from weft_bench.gpu_device import Gpu
from weft_bench.gpu_plan import LIBRARY, LIBRARY_RATIO, attention_name, prompt_name
from weft_kernels.triton.attention import prefill_block
from weft_runner.model.cuda import flashinfer
from weft_runner.model.cuda.attention import TritonAttention
from weft_runner.model.cuda.flashinfer import FlashInfer

log = logging.getLogger(__name__)
PAGE_TOKENS, A_CASE_S = 16, 3.0
NEAR = 2e-2  # two roundings of 16 bits, and sums in another order


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Rows of (position, tokens) on random pages of random keys and values, for both."""

    q: torch.Tensor
    ours: TritonAttention
    library: FlashInfer

    @classmethod
    def made(cls, gpu: Gpu, rows: list[tuple[int, int]], heads: int, group: int, dim: int) -> "Case":
        kv_heads, block_m = heads // group, prefill_block(heads, heads // group, dim, gpu.dtype)
        made = Rows.made(gpu.device, rows, [None] * len(rows), page_tokens=PAGE_TOKENS, prefill_tokens=block_m)
        kv = torch.randn(made.n_pages, 1, 2, kv_heads, PAGE_TOKENS, dim, device=gpu.device, dtype=gpu.dtype)
        q = torch.randn(len(made.step.tokens), heads, dim, device=gpu.device, dtype=gpu.dtype)
        library = FlashInfer(kv, heads, [0])
        library.plan(made.step.arrays)
        return cls(q, TritonAttention(kv, made.here, gpu.sms, block_m), library)

    def run_ours(self) -> torch.Tensor:
        return self.ours.attend(self.q, 0, 0)

    def run_library(self) -> torch.Tensor:
        return self.library.attend(self.q, 0, 0)


def measure(context: Context) -> None:
    """Every context and grouping of the plan, then a prompt of each grouping."""
    dim = context.amounts.heads[1]
    if why := flashinfer.unsupported_reason(dim, "bf16", real=context.gpu.is_real):
        log.warning("not measured: %s", why)
        return
    for n_rows, length, group in attention_cases(context.amounts):
        _measure(context, attention_name(n_rows, length, group), [(length - 1, 1)] * n_rows, group)
    for group in context.amounts.groups:
        name = prompt_name(context.plan, group)
        ours = _measure(context, name, [(0, context.amounts.prompt)], group)
        context.tell(name, "time p50", ours * 1e6)


def _measure(context: Context, name: str, rows: list[tuple[int, int]], group: int) -> float:
    """Seconds of ours."""
    context.needs(A_CASE_S, name)
    heads, dim = context.amounts.heads
    case = Case.made(context.gpu, rows, heads, group, dim)
    assert_near(case.run_library(), case.run_ours(), NEAR)
    ours, library = (context.timer.graph(work).median for work in (case.run_ours, case.run_library))
    context.tell(name, LIBRARY, library * 1e6)
    context.tell(name, LIBRARY_RATIO, library / ours)
    del case
    context.gpu.free()
    return ours

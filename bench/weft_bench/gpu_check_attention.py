"""Attention over pages against a softmax in fp64: contexts, grouped heads, head sizes, windows, splits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from weft_bench.gpu_attention import splits_of
from weft_bench.gpu_check import CheckContext, Checks, Differs, Rows, assert_near, short
from weft_kernels.triton.attention import DecodeScratch, attend_decode, attend_prefill, prefill_block
from weft_runner.model.cuda import flashinfer
from weft_runner.model.cuda.attention import MOST_SPLITS
from weft_runner.model.cuda.flashinfer import FlashInfer

PAGE_TOKENS, LAYERS = 16, 2
# of a row's length: keys' weights are rounded to the dtype before they meet the values
NEAR = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
CONTEXTS, TINY_CONTEXTS = (1, 15, 16, 17, 64, 127, 129, 1000, 4096, 8192), (1, 17, 40)
PROMPTS, TINY_PROMPTS = ((0, 300), (1000, 513), (17, 2), (0, 2048), (31, 65)), ((0, 21), (9, 18))


@dataclass(frozen=True, slots=True)
class Heads:
    heads: int
    kv_heads: int
    dim: int
    window: int = 0


WHOLE = (
    *(Heads(8, 8 // group, dim) for dim in (32, 64, 128) for group in (1, 4, 8)),
    Heads(9, 3, 64), Heads(8, 2, 128, window=100), Heads(8, 8, 64, window=4096),
)  # fmt: skip
TINY = (Heads(2, 1, 16), Heads(4, 1, 16, window=7))
EXACT = (Heads(9, 3, 64), Heads(8, 2, 128, window=100), *TINY)  # in all dtypes; the others in bf16


def checks(context: CheckContext) -> Checks:
    for family in TINY if context.tiny else WHOLE:
        for dtype in context.dtypes if family in EXACT else context.dtypes[1:2]:
            label = f"{short(dtype)}, {family.heads} heads, {family.kv_heads} kv, {family.dim}, window {family.window}"
            for splits in {1, MOST_SPLITS if not context.tiny else 3, 0}:
                yield f"{label}, decode, {splits or 'usual'} splits", partial(_decode, context, dtype, family, splits)
            yield f"{label}, prefill", partial(_prefill, context, dtype, family)
            if dtype == torch.bfloat16 and not flashinfer.unsupported_reason(
                family.dim, "bf16", real=context.gpu.is_real
            ):
                yield f"{label}, FlashInfer", partial(_library, context, dtype, family)


def _decode(context: CheckContext, dtype: torch.dtype, family: Heads, splits: int) -> None:
    """`splits` 0: as many as the engine takes, more of them for long contexts."""
    rows = [(length - 1, 1) for length in context.of(CONTEXTS, TINY_CONTEXTS)]
    case = Case.made(context, dtype, family, rows)
    usual = None if splits else 1
    splits = splits or splits_of(len(rows), family.kv_heads, context.gpu.sms)[1]
    scratch = DecodeScratch.make(len(rows), family.heads, splits, family.dim, context.device)
    here = case.rows.here
    attend_decode(
        case.out, case.q, case.kv, here.rows, here.pages, here.picked, layer=LAYERS - 1, window=family.window,
        scale=family.dim**-0.5, splits=splits, usual=usual, scratch=scratch,
    )  # fmt: skip
    case.check()


def _prefill(context: CheckContext, dtype: torch.dtype, family: Heads) -> None:
    rows = list(TINY_PROMPTS if context.tiny else PROMPTS)
    block_m = prefill_block(family.heads, family.kv_heads, family.dim, dtype)
    case = Case.made(context, dtype, family, rows, prefill_tokens=block_m)
    here = case.rows.here
    attend_prefill(
        case.out, case.q, case.kv, here.rows, here.pages, here.tiles, layer=LAYERS - 1, window=family.window,
        scale=family.dim**-0.5, block_m=block_m,
    )  # fmt: skip
    case.check()


def _library(context: CheckContext, dtype: torch.dtype, family: Heads) -> None:
    """Prompts and rows of one token in one step, as the engine hands them to it."""
    prompts = TINY_PROMPTS if context.tiny else PROMPTS
    rows = [*prompts, *((length - 1, 1) for length in context.of(CONTEXTS, TINY_CONTEXTS))]
    case = Case.made(context, dtype, family, rows)
    library = FlashInfer(case.kv, family.heads, [family.window])
    library.plan(case.rows.step.arrays)
    n_tokens = len(case.rows.step.tokens)
    case.out[:n_tokens] = library.attend(case.q[:n_tokens], LAYERS - 1, family.window)
    case.check()


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Rows whose keys and values are there; all else in the cache is NaN, and so is what nobody may write."""

    family: Heads
    rows: Rows
    q: torch.Tensor
    out: torch.Tensor
    kv: torch.Tensor

    @classmethod
    def made(
        cls, context: CheckContext, dtype: torch.dtype, family: Heads, rows: Sequence[tuple[int, int]],
        prefill_tokens: int = 1,
    ) -> "Case":  # fmt: skip
        slots: list[int | None] = [None] * len(rows)
        made = Rows.made(
            context.device, list(rows), slots, page_tokens=PAGE_TOKENS, prefill_tokens=prefill_tokens, padding=2
        )
        shape = (made.n_pages, LAYERS, 2, family.kv_heads, PAGE_TOKENS, family.dim)
        kv = torch.full(shape, math.nan, dtype=dtype, device=context.device)
        torch.manual_seed(len(rows))
        for row in made.step.rows:
            pages = torch.tensor(row.pages, device=context.device)
            at = torch.arange(row.context, device=context.device)
            filled = torch.randn(row.context, 2, family.kv_heads, family.dim, device=context.device).to(dtype)
            kv[pages[at // PAGE_TOKENS], LAYERS - 1, :, :, at % PAGE_TOKENS] = filled
        q = torch.randn(made.here.shape.tokens, family.heads, family.dim, device=context.device).to(dtype)
        out = torch.full((len(q), family.heads * family.dim), math.nan, dtype=dtype, device=context.device)
        return cls(family, made, q, out, kv)

    def check(self) -> None:
        """Row by row; tokens of no row are left alone."""
        for row in self.rows.step.rows:
            expected = self._attended(row.pages, row.context, self.q[row.start : row.end])
            assert_near(self.out[row.start : row.end], expected, NEAR[self.out.dtype])
        if not bool(self.out[len(self.rows.step.tokens) :].isnan().all()):
            raise Differs("tokens of no row were written to")

    def _attended(self, pages: Sequence[int], context: int, q: torch.Tensor) -> torch.Tensor:
        """The last tokens of a context over it, in fp64: [t, heads * D]."""
        family, t = self.family, len(q)
        both = self.kv[list(pages), LAYERS - 1].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context].double()
        group = family.heads // family.kv_heads
        keys, values = (half.repeat_interleave(group, dim=0) for half in both)  # each [heads, context, D]
        scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) * family.dim**-0.5
        position = torch.arange(context - t, context, device=q.device)[:, None]
        seen = torch.arange(context, device=q.device)[None]
        hidden = (seen > position) | ((seen <= position - family.window) if family.window else False)
        scores = scores.masked_fill(hidden, -math.inf)
        return (torch.softmax(scores, dim=-1) @ values).transpose(0, 1).flatten(1)

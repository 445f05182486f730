"""Shrink and expand against dense fp64: dtypes, ranks, popularities, batch sizes, prompts beside decode rows."""

from functools import partial

import torch

from weft_bench.cpu_shapes import POPULARITIES, adapter_of_row
from weft_bench.gpu_check import CheckContext, Checks, assert_close, assert_same, short
from weft_bench.gpu_check_adapters import Loaded, Slots
from weft_kernels.plan import plan_rows
from weft_kernels.triton.chunks import chunk_table
from weft_kernels.triton.lora import ChunkTable, expand
from weft_kernels.triton.tables import Layout, SiteShape
from weft_runner.model.cuda.executor import DECODE_CHUNK, PROMPT_CHUNK

WHOLE = Layout(2, (SiteShape(1024, (1024, 256, 256)), SiteShape(704, (1040,))), max_rank=128)
TINY = Layout(1, (SiteShape(80, (48, 16, 16)), SiteShape(48, (80,))), max_rank=40)
RANKS = (
    (4, 8, 16), (None, 64, None), (17, None, 8), (16, 16, 16), (None, None, None), (128, 128, 128), (32, 1, 33),
    (64, 64, 64),
)  # fmt: skip
TINY_RANKS = ((4, 8, 16), (None, 40, None), (17, None, 8), (None, None, None))
BATCHES, TINY_BATCHES = (1, 2, 3, 5, 16, 33, 64, 256), (6,)
PROMPT, BESIDE = 2048, 31
PADDING = 3  # chunks of a captured launch that a step does not have
WIDE_CHUNK = 128


def checks(context: CheckContext) -> Checks:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layout, ranks = (TINY, TINY_RANKS) if context.tiny else (WHOLE, RANKS)
        loaded = Loaded.made(context, layout, ranks, dtype)
        for rows in context.of(BATCHES, TINY_BATCHES):
            for workload in (*POPULARITIES, "base", "holes"):
                for site in (0, 1):
                    label = f"{short(dtype)}, {rows} rows, {workload}, site {site}"
                    yield label, partial(_equals, loaded, slots_of(workload, rows, len(loaded.adapters)), site)
        yield from _prompts(context, loaded, dtype)
        yield f"{short(dtype)}, rows without an adapter keep their bits", partial(_keeps, loaded)
        yield f"{short(dtype)}, a cleared slot adds nothing", partial(_cleared, loaded)


def slots_of(workload: str, rows: int, adapters: int) -> list[int | None]:
    """Punica's popularities over the adapters that there are, in the engine's order; holes: some rows have none."""
    if workload == "holes":
        return [None if row % 7 in (0, 3) else row // 7 % adapters for row in range(rows)]
    found = [None if number is None else number % adapters for number in adapter_of_row(workload, rows)]
    return sorted(found, key=lambda slot: -1 if slot is None else slot)


def _prompts(context: CheckContext, loaded: Loaded, dtype: torch.dtype) -> Checks:
    """A prompt of one adapter, and rows of others after it."""
    prompt, beside = context.of((PROMPT, BESIDE), (21, 3))
    slots = [*[2] * prompt, *(row % len(loaded.adapters) for row in range(beside))]
    for block_m in context.of((DECODE_CHUNK, PROMPT_CHUNK, WIDE_CHUNK), (PROMPT_CHUNK,)):
        for site in (0, 1):
            label = f"{short(dtype)}, prompt of {prompt} beside {beside} rows, chunks of {block_m}, site {site}"
            yield label, partial(_equals, loaded, slots, site, block_m)


def _equals(loaded: Loaded, slots: Slots, site: int, block_m: int = DECODE_CHUNK) -> None:
    y, expected, _ = _run(loaded, slots, site, block_m)
    assert_close(y, expected)


def _keeps(loaded: Loaded) -> None:
    slots = [None, 0, 0, None, loaded.nothing, None]
    y, _, before = _run(loaded, slots, 0)
    untouched = [row for row, slot in enumerate(slots) if slot != 0]
    assert_same(y[untouched], before[untouched])


def _cleared(loaded: Loaded) -> None:
    """Comes last: what was there is gone."""
    loaded.tables.clear(0)
    y, _, before = _run(loaded, [0] * 6, 0)
    assert_same(y, before)


def _run(
    loaded: Loaded, slots: Slots, site: int, block_m: int = DECODE_CHUNK
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator on random rows, in the last layer: what came out, what should have, what was there."""
    layout, device, dtype = loaded.tables.layout, loaded.context.device, loaded.tables.arena.dtype
    layer, shape = layout.layers - 1, layout.sites[site]
    torch.manual_seed(len(slots))
    x = torch.randn(len(slots), shape.n_in, device=device, dtype=dtype)
    y = torch.randn(len(slots), sum(shape.widths), device=device, dtype=dtype)
    before, expected = y.clone(), loaded.dense(y, x, slots, layer, site)
    table = chunk_table(plan_rows(slots, dict.fromkeys(range(len(loaded.adapters)), 1)), block_m)
    padding = torch.zeros(PADDING, 3, dtype=torch.int32)
    chunked = ChunkTable(torch.cat((torch.from_numpy(table), padding)).to(device), block_m)
    expand(y, loaded.shrunk(x, chunked, layer, site), loaded.tables.at(layer, site), chunked)
    return y, expected, before

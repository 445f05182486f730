"""Products with int4 weights against fp64 of the numbers that they stand for, and whole models with them."""

from functools import partial

import torch

from weft_bench.gpu_check import CheckContext, Checks, assert_close, short
from weft_bench.gpu_check_executor import play
from weft_bench.gpu_check_models import FAMILIES, LLAMA, TINY, TINY_FAMILIES, Pair, rounded_to_int4
from weft_kernels.triton import int4

# (inputs, outputs): split and not, groups and blocks of outputs that are not full, more outputs than a head has
SHAPES, TINY_SHAPES = ((4096, 6144), (14336, 4096), (4096, 28672), (4096, 128256), (1040, 1000)), ((80, 40),)
ROWS, TINY_ROWS = (1, 2, 3, 8, 9, 16, 31, 64, 65, 300, 2048), (3, 9)
CHECKED = 2  # families, the last ones: biases, a tied head
RECORDED, TINY_RECORDED = 17, 2
MOST_NUMBERS = 1 << 28  # of a product that is checked: fp64 takes its time


def checks(context: CheckContext) -> Checks:
    for n_in, n_out in TINY_SHAPES if context.tiny else SHAPES:
        for rows in context.of(ROWS, TINY_ROWS):
            if rows * n_out <= MOST_NUMBERS:
                for dtype in context.dtypes[:2]:
                    name = f"{short(dtype)}, int4 product of {rows} rows, {n_in} -> {n_out}"
                    yield name, partial(_product, context, rows, n_in, n_out, dtype)
    families, count = (TINY_FAMILIES, 1) if context.tiny else (FAMILIES, CHECKED)
    for name, spec in list(families.items())[-count:]:
        for dtype in context.dtypes[:2]:
            yield f"{name}, int4, {short(dtype)}", partial(play, context, spec, dtype, packed=True)
    yield "recorded steps, int4", partial(_recorded, context)


def _recorded(context: CheckContext) -> None:
    """Decode steps as graphs: few rows and more. Raises Differs."""
    spec, (rows,) = TINY if context.tiny else LLAMA, context.of((RECORDED,), (TINY_RECORDED,))
    pair = Pair.made(context, spec, context.dtypes[0], rows, rows, graphs=True, packed=True)
    for count in (rows, 1):
        pair.decode(list(range(count)), steps=1)
    context.gpu.free()


def _product(context: CheckContext, rows: int, n_in: int, n_out: int, dtype: torch.dtype) -> None:
    generator = torch.Generator(context.device).manual_seed(rows)
    weight = torch.randn(n_out, n_in, device=context.device, generator=generator) * n_in**-0.5
    x = torch.randn(rows, n_in, device=context.device, generator=generator).to(dtype)
    bias = torch.randn(n_out, device=context.device, generator=generator)
    y = int4.linear(x, int4.pack(weight), n_out, sms=context.gpu.sms, bias=bias)
    assert_close(y, x.double() @ rounded_to_int4(weight).double().T + bias.double())

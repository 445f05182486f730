# pyright: basic, reportArgumentType=false
"""The product of two tiles, the same under the interpreter and on a device."""

import triton
import triton.language as tl
from triton import knobs

_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def dot(a, b, c):
    """c [M, N] fp32 + a [M, K] b [K, N]. fp32 operands are multiplied as fp32, not as tf32: what exactness tests need.

    The interpreter (triton 3.6 to 3.9 at least) multiplies the bits of bf16 as if they were integers.
    """
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, c, input_precision="ieee")

"""The meaning of int4 weights: groups of 64 inputs of an output between their minimum and their maximum, in 15 steps.

w = minimum + scale * q, 0 <= q <= 15, scale and minimum in bf16 (FlexGen, section 5). The native kernels quantise by
the same arithmetic (`cpu/src/pack.cpp`), so that a base has the same codes on every executor.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import pad

GROUP = 64


class Groups(NamedTuple):
    """Quantised weights: `codes` [n_out, groups, 64], 0 to 15, and `scale`, `minimum` [n_out, groups, 1]; all fp32, the
    last two of bf16.

    Beyond n_in, codes mean nothing.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor


def quantised(matrix: torch.Tensor) -> Groups:
    """Quantise a matrix [n_out, n_in] of any float dtype, finite, on any device."""
    n_in, fill = matrix.shape[1], -matrix.shape[1] % GROUP
    wide = pad(matrix.float(), (0, fill)).unflatten(1, (-1, GROUP))
    inside = pad(torch.ones(n_in, dtype=torch.bool, device=matrix.device), (0, fill)).unflatten(0, (-1, GROUP))
    least = wide.masked_fill(~inside, torch.inf).amin(-1, keepdim=True)
    most = wide.masked_fill(~inside, -torch.inf).amax(-1, keepdim=True)
    scale, minimum = ((most - least) / 15).bfloat16().float(), least.bfloat16().float()
    codes = torch.where(scale > 0, (wide - minimum) / scale, 0.0).clamp(0, 15).round()
    return Groups(codes, scale, minimum)

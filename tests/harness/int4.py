"""What `--dtype int4` computes with, in torch: groups of 64 inputs, a minimum and a scale each, in bf16."""

import torch
from torch.nn.functional import pad

GROUP = 64


def int4_of(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of [n_out, n_in] the steps 0 to 15 [n_out, groups, 64], scales and minima [n_out, groups, 1]; all fp32."""
    n_in, fill = matrix.shape[1], -matrix.shape[1] % GROUP
    wide = pad(matrix.float(), (0, fill)).unflatten(1, (-1, GROUP))
    inside = pad(torch.ones(n_in, dtype=torch.bool), (0, fill)).unflatten(0, (-1, GROUP))
    least = wide.masked_fill(~inside, torch.inf).amin(-1, keepdim=True)
    most = wide.masked_fill(~inside, -torch.inf).amax(-1, keepdim=True)
    scale, minimum = ((most - least) / 15).bfloat16().float(), least.bfloat16().float()
    return torch.where(scale > 0, (wide - minimum) / scale, 0.0).clamp(0, 15).round(), scale, minimum


def rounded_to_int4(matrix: torch.Tensor) -> torch.Tensor:
    """[n_out, n_in] in its dtype: the numbers that int4 stands for, sixteen for each group of an output."""
    steps, scale, minimum = int4_of(matrix)
    return (minimum + scale * steps).flatten(1)[:, : matrix.shape[1]].to(matrix.dtype).contiguous()

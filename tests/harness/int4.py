"""What `--dtype int4` computes with: the numbers that int4 stands for, in the dtype of a matrix."""

import torch

from weft_kernels.int4 import Groups, quantised


def rounded_to_int4(matrix: torch.Tensor) -> torch.Tensor:
    """[n_out, n_in] in its dtype: sixteen numbers for each group of an output."""
    return dequantised(quantised(matrix), matrix.shape[1]).to(matrix.dtype).contiguous()


def dequantised(groups: Groups, n_in: int) -> torch.Tensor:
    """fp32 [n_out, n_in]: sixteen numbers for each group of an output."""
    return (groups.minimum + groups.scale * groups.codes).flatten(1)[:, :n_in]

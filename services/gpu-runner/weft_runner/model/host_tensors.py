"""Arrays in host memory as torch's executors read them, and back."""

from collections.abc import Mapping

import numpy as np
import torch

from weft_runner.model.arrays import BFLOAT16, Array


def tensor_of(array: Array) -> torch.Tensor:
    """The same numbers in the same memory. numpy's bf16 is a dtype that torch does not know: it passes as its bits."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of(tensor: torch.Tensor) -> Array:
    """The same numbers in the same memory. `tensor`: contiguous, on the host."""
    return tensor.view(torch.int16).numpy().view(BFLOAT16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def arrays_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """The same of each by its name, as a checkpoint or an adapter has them."""
    return {name: array_of(tensor) for name, tensor in tensors.items()}

"""What an executor returned, as the tests' oracles compute with it: in torch."""

import numpy as np
import torch

from weft_runner.model import Array
from weft_runner.model.host_tensors import tensor_of


def as_tensor(rows: torch.Tensor | Array) -> torch.Tensor:
    """What an executor returned, of whichever kind."""
    return tensor_of(rows) if isinstance(rows, np.ndarray) else rows

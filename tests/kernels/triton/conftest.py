"""Kernels run under Triton's interpreter (see tests/conftest.py), or on the GPU where TRITON_INTERPRET=0 says so."""

import pytest
import torch
import triton


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")

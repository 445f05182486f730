"""Kernels and the cuda executor, under Triton's interpreter (see tests/conftest.py) or on a GPU (`make gpu-check`)."""

from collections.abc import Generator

import pytest
import torch
import triton

from harness.interpreter import hurry
from weft_stage.gpu_device import Gpu, find


@pytest.fixture(autouse=True, scope="module")
def no_waste() -> Generator[None]:
    """What is as small as here gains nothing by a second thread, which other tests may have a use for."""
    if triton.knobs.runtime.interpret:
        hurry()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    return find()


@pytest.fixture(scope="session")
def device(gpu: Gpu) -> torch.device:
    return gpu.device

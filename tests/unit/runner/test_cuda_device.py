"""Whether a GPU can serve, and why not. What torch says of the machine is all that is faked."""

import pytest
import torch
from triton import knobs

from weft.domain.model.config import parse_spec
from weft_runner.errors import ExecutorLost
from weft_runner.model import Partition
from weft_runner.model.cuda import device as gpu
from weft_runner.model.cuda.device import GpuUnavailable, device_errors, find_gpu, unsupported_reason


@pytest.fixture
def machine(monkeypatch):
    """One GPU of a compute capability, and a compiler or none."""

    def make(capability: tuple[int, int] = (9, 0), compiler: str | None = "/usr/bin/gcc", count: int = 1) -> None:
        monkeypatch.setattr(knobs.runtime, "interpret", False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
        monkeypatch.setattr(gpu.shutil, "which", lambda name: compiler if name == "gcc" else None)

    return make


def test_the_interpreter_needs_no_gpu():
    assert not find_gpu().is_real


def test_a_gpu_that_can_serve_is_found(machine):
    machine(count=2)
    assert find_gpu(1).device == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"count": 0}, "torch sees 0 GPUs, and GPU 0 is needed"),
        ({"capability": (7, 5)}, "Some GPU has compute capability 7.5; the kernels need 8.0"),
        ({"compiler": None}, "Triton needs a C compiler"),
    ],
)
def test_why_there_is_none_is_told(machine, made, why):
    machine(**made)
    with pytest.raises(GpuUnavailable, match=why):
        find_gpu()


@pytest.mark.parametrize(
    ("changed", "dtype", "page_tokens", "why"),
    [
        ({}, "int8", 16, "--dtype int8"),
        ({}, "bf16", 24, "pages of 24 tokens"),
        ({"head_dim": 40}, "bf16", 16, "head_dim 40"),
        ({"head_dim": 272}, "bf16", 16, "head_dim 272"),
        ({"head_dim": 96}, "bf16", 16, ""),
        ({"intermediate_size": 100}, "bf16", 16, "intermediate_size 100"),
        ({"intermediate_size": 8192}, "bf16", 16, "a row of an adapter takes 8192 numbers"),
        ({}, "bf16", 16, ""),
        ({}, "int4", 16, ""),
    ],
)
def test_what_the_kernels_cannot_compute_is_told_by_name(small_config, changed, dtype, page_tokens, why):
    config = {**small_config, "hidden_size": 64, "head_dim": 16, "intermediate_size": 96, **changed}
    said = unsupported_reason(Partition(parse_spec(config)), dtype, page_tokens, 16)
    assert said.startswith(why)
    assert bool(said) == bool(why)


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (ValueError("a shape"), False),
    ],
)
def test_an_error_of_the_device_ends_the_runner_and_no_other_does(error, ends):
    with pytest.raises(ExecutorLost if ends else type(error)), device_errors():
        raise error

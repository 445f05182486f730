"""Where the threads of a pool run."""

import os
from pathlib import Path

import pytest
import torch

from weft_kernels.cpu.errors import NativeUnavailable
from weft_kernels.cpu.library import load
from weft_kernels.cpu.structs import FP32
from weft_kernels.cpu.tensors import pack


def tasks() -> dict[int, set[int]]:
    """CPUs of every thread of this process."""
    found = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    return {task: os.sched_getaffinity(task) for task in found}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
@pytest.mark.parametrize("fewer", [0, 1])
def test_of_as_many_threads_as_cpus_each_worker_has_its_own_and_the_callers_are_as_before(fewer: int):
    try:
        library = load()
    except NativeUnavailable as error:
        pytest.skip(f"no CPU kernels here: {error.reason}")
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) - fewer < 2:
        pytest.skip("one CPU: no workers")
    before = tasks().keys()
    with library.pool(len(cpus) - fewer) as pool:
        pack(library, pool, torch.ones(64, 64), FP32)
        assert os.sched_getaffinity(0) == {*cpus}
        workers = [on for task, on in sorted(tasks().items()) if task not in before]
    assert workers == [{cpu} if not fewer else {*cpus} for cpu in cpus[1 : len(cpus) - fewer]]

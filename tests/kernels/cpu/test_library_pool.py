"""The CPUs that the threads of a pool run on."""

import os
from pathlib import Path

import pytest
import torch

from harness.native_library import native_library
from harness.native_tensors import FP32, pack

LIBRARY = native_library()


def tasks() -> dict[int, set[int]]:
    """CPUs of every thread of this process."""
    found = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    return {task: os.sched_getaffinity(task) for task in found}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_of_as_many_threads_as_cpus_each_worker_has_its_own_and_the_callers_are_as_before(more: int):
    cpus, before = sorted(os.sched_getaffinity(0)), tasks().keys()
    with LIBRARY.pool(max(1, len(cpus) + more)) as pool:
        pack(LIBRARY, pool, torch.ones(64, 64), FP32)
        assert os.sched_getaffinity(0) == {*cpus}
        workers = [on for task, on in sorted(tasks().items()) if task not in before]
    count = max(0, len(cpus) + more - 1)
    assert workers == ([{*cpus}] * count if more else [{cpu} for cpu in cpus[1:]])

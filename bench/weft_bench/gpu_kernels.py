"""Kernels that the device ran, and for how long: as CUPTI tells torch's profiler, those of graphs among them."""

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

MAX_NAME_CHARS = 60
_ARGUMENTS = re.compile(r"[(<].*")


class Kernel(NamedTuple):
    """Every launch of one kernel in a run."""

    name: str
    launches: int
    seconds: float


def kernel_times(run: Callable[[], object]) -> list[Kernel]:
    """Run once under the profiler: each kernel, copies and fills too, the costliest first."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        run()
        torch.cuda.synchronize()
    found = dict[str, Kernel]()
    for event in profiled.key_averages():
        if event.self_device_time_total > 0:
            name = short(event.key)
            before = found.get(name, Kernel(name, 0, 0.0))
            found[name] = Kernel(
                name, before.launches + event.count, before.seconds + event.self_device_time_total * 1e-6
            )
    return sorted(found.values(), key=lambda kernel: -kernel.seconds)


def short(name: str) -> str:
    """A kernel's name without return type, template and arguments."""
    return _ARGUMENTS.sub("", name.removeprefix("void ")).strip()[:MAX_NAME_CHARS] or name[:MAX_NAME_CHARS]

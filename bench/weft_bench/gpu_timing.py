"""How long device work takes: CUDA events round it, the caches cold, never a wall clock round a sync.

What is measured is captured as a graph and replayed, so that launches from Python are in no figure; steps that the
engine runs eagerly are run eagerly here, too, and the device has work queued before them, so that it never waits for
Python. Before each run a buffer of more than twice the L2 is written and another one read: the caches hold nothing of
the run, and nothing that must be written back meanwhile (as in a step, where weights have streamed through before).

Under Triton's interpreter there are neither graphs nor events: the work is run as it is, once, by the clock. That shows
that a case works; its times mean nothing.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weft_stage.lines import percentile

Work = Callable[[], object]
WARM_UPS = 3
FLUSH_BYTES = 256 << 20  # at least; as Punica's benchmark (`benchmark_utils.bench`)
MANY, FEW = 100, 20  # runs: enough for a p99, enough for a p90
FEW_PERCENT = 90


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each run."""

    seconds: Sequence[float]

    @property
    def median(self) -> float:
        return percentile(self.seconds, 50)

    def tail(self, percent: int) -> float:
        return percentile(self.seconds, percent)


class Timer(Protocol):
    def graph(self, work: Work, runs: int = MANY) -> Times:
        """Time work that only launches: captured, replayed."""
        ...

    def eager(self, work: Work, runs: int = FEW) -> Times:
        """Time work as it is launched; it may not wait for the device."""
        ...


def timer(device: torch.device) -> Timer:
    return DeviceTimer(device) if device.type == "cuda" else HostTimer()


class DeviceTimer:
    """A Timer by events of one device."""

    def __init__(self, device: torch.device) -> None:
        n_bytes = max(FLUSH_BYTES, 2 * torch.cuda.get_device_properties(device).L2_cache_size)
        self._written = torch.zeros(n_bytes // 4, device=device)
        self._read = torch.zeros(n_bytes // 4, device=device)

    def graph(self, work: Work, runs: int = MANY) -> Times:
        graph = captured(work)
        times = self._times(graph.replay, runs)
        graph.reset()
        return times

    def eager(self, work: Work, runs: int = FEW) -> Times:
        return self._times(work, runs)

    def _times(self, run: Work, runs: int) -> Times:
        for _ in range(WARM_UPS):
            self._flush()
            run()
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
        for before, after in pairs:
            self._flush()
            before.record()
            run()
            after.record()
        torch.cuda.synchronize()
        return Times([before.elapsed_time(after) * 1e-3 for before, after in pairs])

    def _flush(self) -> None:
        self._written.zero_()
        self._read.sum()


class HostTimer:
    """A Timer by the clock, where there is no device."""

    def graph(self, work: Work, runs: int = MANY) -> Times:
        return self.eager(work, runs)

    def eager(self, work: Work, runs: int = FEW) -> Times:
        del runs
        started = time.perf_counter()
        work()
        return Times([time.perf_counter() - started])


def captured(work: Work) -> torch.cuda.CUDAGraph:
    """Capture the work as a graph, after warm-ups on a stream of their own: kernels compiled, workspaces made."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph

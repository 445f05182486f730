"""splitwise-sim's models, machines and policies (github.com/Mutinifni/splitwise-sim @8f99e7d), to compare with it.

Requests of `data/splitwise_ref_*` come out to 1e-6 of its times. What it does otherwise than ours: a request's output
is reserved in full when its token phase starts; prompts are not chunked; transfers do not share a link; memory that a
finished request frees is found when the next task arrives or the next iteration ends.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from typing import Any

from weft_sim.clock import Clock
from weft_sim.performance.splitwise_table import Key, SplitwiseTable, published
from weft_sim.planning.cluster import KvLink, Rules, ServedModel
from weft_sim.planning.machine import MachineKind, Stepping

GIB = 1 << 30
GPU_BYTES = 80 * GIB

BLOOM_176B = ServedModel("bloom-176b", 70, 4 * 14_336 * 70, 329_000_000_000)
LLAMA2_70B = ServedModel("llama2-70b", 80, 4 * 8_192 * 80, 135_000_000_000)
A100, H100, H100_CAPPED = "a100-80gb", "h100-80gb", "h100-80gb-pcap"

SPLIT = Rules(
    "mixed_pool", Stepping("mixed", lazy=True), KvLink(200 * GIB, layer_wise_from=inf, one_at_a_time=False, retry_s=1.0)
)
BASELINE = replace(SPLIT, scheduling="shortest_queue")


def machine_kind(
    hardware: str, model: ServedModel = BLOOM_176B, gpus: int = 8, tables: Mapping[Key, SplitwiseTable] | None = None
) -> MachineKind:
    """A machine of splitwise-sim with all its GPUs as one tensor-parallel instance. Raises KeyError."""
    table = (tables or published())[model.name, hardware, gpus]
    return MachineKind(hardware, table, gpus * GPU_BYTES - model.weight_bytes)


class HeapClock(Clock):
    """Orders events only by time. Simultaneous events come in the order of a binary heap, as in splitwise-sim."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self._heap: list[_Event] = []
        self._ended = False

    def at(self, time: float, rank: int, action: Callable[..., None], *arguments: Any) -> None:
        heappush(self._heap, _Event(time, action, arguments))

    def stop(self) -> None:
        self._ended = True

    def run(self, end_s: float = inf) -> None:
        self._ended = False
        while self._heap and self._heap[0].time <= end_s and not self._ended:
            event = heappop(self._heap)
            self.now = event.time
            event.action(*event.arguments)


class _Event:
    __slots__ = ("action", "arguments", "time")

    def __init__(self, time: float, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.time, self.action, self.arguments = time, action, arguments

    def __lt__(self, second: "_Event") -> bool:
        return self.time < second.time

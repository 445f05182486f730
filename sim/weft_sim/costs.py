"""`python -m weft_sim costs`: CPU seconds of each event on this machine, for `hosts.MEASURED`.

The machine's handler and the encoding of what it sends, in a run of quickstart-like requests. What a shell adds is not
in a simulation: gRPC's CPU for each message and HTTP's for each request are measured apart (hosts.py).
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Generator

from weft.domain.machine import Kind, Received
from weft.domain.request import Step
from weft_sim.clock import random_of
from weft_sim.process import Process
from weft_sim.simulate import Pool, simulate
from weft_sim.traces import adapter_draw, poisson

LEVEL = 0.25  # of an event's times: other processes on the machine only ever add to them


Times = defaultdict[tuple[Kind, str], list[tuple[float, int]]]  # seconds and sequences of each event


@contextlib.contextmanager
def stopwatch() -> Generator[Times]:
    """Times of the events of all processes in the block."""
    times: Times = defaultdict(list)
    handle = Process.handle

    def timed(self: Process, event: object) -> None:
        message = event.message if isinstance(event, Received) else event
        items = len(message.sequences) if isinstance(message, Step) else 0
        began = time.perf_counter()
        handle(self, event)
        times[self.kind, type(message).__name__].append((time.perf_counter() - began, items))

    Process.handle = timed
    try:
        yield times
    finally:
        Process.handle = handle


def main(_: object = None) -> int:
    arrivals = poisson(40.0, 600, [(24, 60)], adapter_draw("skewed", 6, random_of(1)), random_of(2))
    pool = Pool(runners=2, step_ms_1=4.0, step_ms_best=8.0, adapters=6, cpu=False)
    simulate(pool, arrivals[:50])
    with stopwatch() as watched:
        simulate(pool, arrivals)
    for (kind, name), events in sorted(watched.items(), key=lambda item: (item[0][0].value, item[0][1])):
        seconds, items = sorted(event[0] for event in events), sum(event[1] for event in events) / len(events)
        beside = f"  ({items:.1f} sequences)" if items else ""
        print(
            f"{kind.value:<10} {name:<18} {seconds[int(LEVEL * len(seconds))] * 1e6:>9.1f} us x {len(events)}{beside}"
        )
    return 0

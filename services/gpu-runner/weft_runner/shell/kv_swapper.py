"""KV pages to host memory and back, in slices: between steps where steps compute on the same cores, else on one thread.

On a thread the engine's, which drops a copy whose sequence has ended, waits for the slice under way at most.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from weft_runner.core.events import DropSwap, SwapAction, SwapDone, SwapFailed, SwapIn, SwapOut
from weft_runner.model.kv_memory import Guard, KvMemory
from weft_runner.shell.step_gaps import StepGaps

log = logging.getLogger(__name__)
SLICE_BYTES = 2 << 20  # of whole pages, about: some 200 us
SPARE_BYTES = 64 << 20  # of host pages that are kept for the next copy: touching new memory takes as long as copying


class KvSwapper:
    """Executes the pool's orders; `report` takes results, from whichever thread copies."""

    def __init__(self, memory: KvMemory, report: Callable[[SwapDone | SwapFailed], None], gaps: StepGaps) -> None:
        self._memory, self._report, self._gaps = memory, report, gaps
        self._copies: dict[int, Guard] = {}  # under way, by number; the copying thread removes what is complete
        self._host: dict[int, Any] = {}  # pages by number; the copying thread adds them, under its copy's lock
        self._spare: deque[Any] = deque(maxlen=max(1, SPARE_BYTES // memory.page_bytes))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-swap")

    def execute(self, action: SwapAction) -> None:
        """Act on an order, between two iterations of the engine's thread."""
        match action:
            case SwapOut(number) | SwapIn(number):
                copy = self._copies[number] = Guard()
                self._begin(self._run(copy, action, self._memory.fence()))
            case DropSwap(numbers, hosts):
                for number in numbers:
                    if (copy := self._copies.pop(number, None)) is not None:
                        copy.drop()  # no slice after the present one
                self._spare.extend(page for host in hosts if (page := self._host.pop(host, None)) is not None)

    def close(self) -> None:
        """End running copies early and stop the thread."""
        self.execute(DropSwap(tuple(self._copies), ()))
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _begin(self, slices: Iterator[None]) -> None:
        if self._memory.between_steps:
            self._gaps.add(slices)
        else:
            self._thread.submit(deque, slices, maxlen=0)

    def _run(self, copy: Guard, order: SwapOut | SwapIn, fence: Any) -> Iterator[None]:
        """Copy a slice at each step."""
        seconds = 0.0  # of copying, without the steps between slices
        at_once = max(1, SLICE_BYTES // self._memory.page_bytes)
        try:
            for begin in range(0, len(order.pages), at_once):
                with copy as allowed:
                    if not allowed:
                        return
                    began = time.perf_counter()
                    self._copy(order, slice(begin, begin + at_once), fence)
                    seconds += time.perf_counter() - began
                yield
        except Exception as error:  # whatever it is, the sequence must not wait for ever
            log.warning("a copy of %d pages of KV failed", len(order.pages), exc_info=error)
            self._report(SwapFailed(order.number, f"{type(error).__name__}: {error}"))
        else:
            self._copies.pop(order.number, None)
            self._report(SwapDone(order.number, len(order.pages), seconds))

    def _copy(self, order: SwapOut | SwapIn, part: slice, fence: Any) -> None:
        is_out = isinstance(order, SwapOut)
        for host in order.hosts[part] if is_out else ():  # a copy back fails where a page is missing
            self._host[host] = self._spare.pop() if self._spare else self._memory.host_page()
        transfer = self._memory.copy_out if is_out else self._memory.copy_in
        transfer(order.pages[part], [self._host[host] for host in order.hosts[part]], fence)

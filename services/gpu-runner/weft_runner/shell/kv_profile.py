"""How fast KV leaves, and from how many prompt tokens on it is sent layer by layer: measured, not assumed.

Sent as it is computed, a prompt's KV takes cores, locks and small writes from the step that computes it; sent after
that, its transfer is there to be waited for (Splitwise, section 4.2, figure 14). Prompts of some lengths are computed
and sent to a thread of this process, over a socket pair by the streams that serve later, in both ways.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from weft.domain.ids import Epoch, RunnerId
from weft.domain.kv_transfer import KvAck, KvComplete, KvHello, KvReady
from weft.domain.machine import Closed, Kind, Peer, Received
from weft.wire.codec.kv_transfer import KV_FROM_RECEIVER, KV_FROM_SENDER, KvPages
from weft_kernels.plan import SegmentPlan
from weft_runner.core.admission import PoolLimits
from weft_runner.core.events import SendKv
from weft_runner.model.executor import Executor
from weft_runner.model.kv_memory import KvMemory
from weft_runner.model.layer_progress import CalledLayerCounter, LayerReports
from weft_runner.model.step import StepInput, StepRow
from weft_runner.shell.kv_connection import KvConnection, KvConnectionClosed
from weft_runner.shell.kv_stream import KvEvent, KvSender, count_nothing

BUDGET_S = 0.5
REPEATS = 3
LENGTHS = (32, 64, 128, 256, 512, 1024)
STALL_S = 5.0
RECEIVER = RunnerId("profile", "1")
EPOCH = Epoch(1, 1)


class KvProfile(NamedTuple):
    """`layer_by_layer_tokens`: the shortest measured prompt from which on sending as computed is over first."""

    layer_by_layer_tokens: float = inf  # inf: none is
    bytes_per_s: float = 0.0  # of the longest measured prompt's KV to another thread; 0: not measured


def measure_kv(
    executor: Executor, memory: KvMemory, limits: PoolLimits, clock: Callable[[], float] = time.perf_counter
) -> KvProfile:
    """Clears its pages.

    Executors whose steps are launched complete them as a whole: nothing of a layer is known before, and nothing is
    measured.
    """
    if executor.can.launches:
        return KvProfile()
    both_ways = _BothWays(executor, memory)
    max_tokens = min(limits.batch.max_batch_tokens, limits.max_context_tokens)
    faster: list[tuple[int, bool]] = []
    try:
        both_ways.seconds(min(LENGTHS[0], max_tokens), limits.page_tokens, layer_by_layer=True)  # brings memory in
        end, expected_s = clock() + BUDGET_S, 0.0
        for tokens in (length for length in LENGTHS if length <= max_tokens):
            if clock() + expected_s > end:
                break
            began = clock()
            times = [
                min(both_ways.seconds(tokens, limits.page_tokens, layer_by_layer=way) for _ in range(REPEATS))
                for way in (False, True)
            ]
            faster.append((tokens, times[1] < times[0]))
            expected_s = 2.0 * (clock() - began)
        pages = range(-(-faster[-1][0] // limits.page_tokens)) if faster else range(1)
        transfer_s = min(both_ways.transfer_s(tuple(pages)) for _ in range(REPEATS))
    finally:
        both_ways.close()
        executor.clear_pages(list(range(-(-max_tokens // limits.page_tokens))))
    return KvProfile(threshold(faster), len(pages) * memory.page_bytes / transfer_s)


def threshold(faster: list[tuple[int, bool]]) -> float:
    """Return the shortest length from which all lengths (ascending) are faster; inf if there is none."""
    shortest = inf
    for tokens, is_faster in reversed(faster):
        if not is_faster:
            break
        shortest = tokens
    return shortest


class _BothWays:
    """A sender of the executor's pages, and a thread that takes them."""

    def __init__(self, executor: Executor, memory: KvMemory) -> None:
        self._executor, self._memory = executor, memory
        counter, self._reports = CalledLayerCounter(), LayerReports()
        progress = executor.can.layer_counter or counter
        if progress is counter:
            self._reports.raise_counter(counter)
        self._events: queue.SimpleQueue[KvEvent] = queue.SimpleQueue()
        here, there = socket.socketpair()
        self._taking = threading.Thread(target=_take, args=(KvConnection(there, STALL_S),), daemon=True)
        self._taking.start()
        connection = KvConnection(here, STALL_S)
        peer = Peer(Kind.RUNNER, f"{RECEIVER.uuid}/{RECEIVER.incarnation}")
        hello = KvHello(RECEIVER, RECEIVER.incarnation, "", "", "")
        self._sender = KvSender(
            peer, hello, lambda: (connection, connection), memory.window(), progress, self._events.put,
            lambda _stream: None, count_nothing,
        )  # fmt: skip
        self._peer = peer
        self._sender.start()
        self._events.get(timeout=STALL_S)

    def seconds(self, tokens: int, page_tokens: int, *, layer_by_layer: bool) -> float:
        """From the step's begin until the receiver has all of its KV. Raises KvConnectionClosed."""
        pages = tuple(range(-(-tokens // page_tokens)))
        row = StepRow(0, tokens, 0, pages, samples=True)
        step = StepInput([1] * tokens, (row,), SegmentPlan(tokens, ()))
        order = SendKv(self._peer, "r", EPOCH, 0, pages, layer_by_layer)
        began = time.perf_counter()
        if layer_by_layer:
            self._sender.send_pages(order, self._memory.fence(), 0)
        self._executor.run(step, **self._reports.options)
        if not layer_by_layer:
            self._sender.send_pages(order, self._memory.fence(), 0)
        self._complete(tokens)
        return time.perf_counter() - began

    def transfer_s(self, pages: tuple[int, ...]) -> float:
        """From the order until the receiver has the KV of these pages. Raises KvConnectionClosed."""
        began = time.perf_counter()
        self._sender.send_pages(SendKv(self._peer, "r", EPOCH, 0, pages, False), self._memory.fence(), 0)
        self._complete(len(pages))
        return time.perf_counter() - began

    def _complete(self, tokens: int) -> None:
        """End a transfer, and wait for its acknowledgement."""
        self._sender.send(KvComplete("r", EPOCH, tokens))
        event = self._events.get(timeout=STALL_S)
        if not isinstance(event, Received):
            raise KvConnectionClosed(event.reason if isinstance(event, Closed) else str(event))

    def close(self) -> None:
        self._sender.close("measured")
        self._sender.join(STALL_S)
        self._taking.join(STALL_S)


def _take(connection: KvConnection) -> None:
    """A receiver that keeps nothing."""
    scratch = bytearray(0)
    try:
        while True:
            envelope = KV_FROM_SENDER.envelope()
            envelope.ParseFromString(connection.receive_frame())
            match KV_FROM_SENDER.decode(envelope):
                case KvHello():
                    _answer(connection, KvReady(RECEIVER))
                case KvPages(bytes=n_bytes):
                    if len(scratch) < n_bytes:
                        scratch = bytearray(n_bytes)
                    connection.receive([memoryview(scratch)[:n_bytes]])
                case KvComplete(request_id, epoch):
                    _answer(connection, KvAck(request_id, epoch))
                case _:
                    return
    except KvConnectionClosed:
        return
    finally:
        connection.close()


def _answer(connection: KvConnection, message: KvReady | KvAck) -> None:
    connection.send_frame(KV_FROM_RECEIVER.encode(message).SerializeToString())

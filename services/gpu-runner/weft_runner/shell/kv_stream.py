"""One stream of KV between two runners: a thread that writes what is queued, in order, and a thread that reads.

The engine's thread queues messages and jobs and never waits for a socket. A stream ends once, by the machine's order,
a lost connection, a deadline or a peer that breaks the contract; what it does not get rid of is bounded by MAX_QUEUED.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import DecodeError, Message

from weft.domain.ids import Epoch
from weft.domain.kv_transfer import KvAck, KvComplete, KvHello, KvOffer, KvReady, KvRefuse
from weft.domain.machine import Closed, Connected, Peer, Received
from weft.telemetry.logs import kv
from weft.wire.codec.direction import Direction
from weft.wire.codec.kv_transfer import KV_FROM_RECEIVER, KV_FROM_SENDER, KvPages
from weft.wire.errors import PeerError, report_peer_error
from weft_runner.core.events import DropKv, ReceiveKv, SendKv
from weft_runner.model.kv_memory import Guard, KvWindow
from weft_runner.model.layer_progress import LayerProgress
from weft_runner.shell.kv_arrivals import BrokenOrder, Key, OfferedKv, WrongPages
from weft_runner.shell.kv_connection import KvConnection, KvConnectionClosed

log = logging.getLogger(__name__)
MAX_QUEUED = 4096  # messages and jobs that wait for a stream: those of a thousand sequences, several each
LAYER_WAIT_S = 0.05  # then a job looks whether it was dropped

KvEvent = Connected | Received | Closed
Post = Callable[[KvEvent], None]
Count = Callable[..., None]  # the runner's metrics: a name, what is added, labels; any thread's


@dataclass(slots=True)
class KvTransfer:
    """A sequence's KV between its first job, or its acceptance, and its end."""

    began: float
    layer_wise: bool = False


def count_nothing(name: str, value: float = 1, *labels: str) -> None:
    """A `Count` for callers without metrics: counts nothing."""


class Payload(Protocol):
    """What carries the bytes of pages: the channel itself, or shared memory beside it."""

    carrier: str

    def send(self, parts: list[memoryview], guard: Guard) -> bool: ...

    def receive(self, parts: list[memoryview], guard: Guard) -> bool: ...

    def shutdown(self) -> None: ...

    def close(self) -> None: ...


class Job(Guard):
    """A SendKv. `base`: layers that all steps had completed when it was ordered; None: its pages are complete."""

    def __init__(self, order: SendKv, fence: Any, base: int | None) -> None:
        super().__init__()
        self.order, self.fence, self.base = order, fence, base

    @property
    def key(self) -> Key:
        return self.order.request_id, self.order.epoch


class KvStream(ABC):
    """The common part of both ends. `_lock` protects state changed by the engine's thread and the stream's threads."""

    _encodes: Direction[Any, Any]
    _decodes: Direction[Any, Any]
    _way: str  # of pages: "out" or "in"

    def __init__(self, window: KvWindow, post: Post, on_end: Callable[["KvStream"], None], count: Count) -> None:
        """`on_end`: called from its thread as the last that it does."""
        self._window, self._post, self._on_end, self._count = window, post, on_end, count
        self._transfers: dict[Key, KvTransfer] = {}  # that are not complete, or not acknowledged
        self.peer: Peer | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Message | Job] = deque()
        self._job: Job | None = None  # under way
        self._goodbye = ""
        self._over = False
        self._channel: KvConnection | None = None
        self._payload: Payload | None = None
        self._threads = [
            threading.Thread(target=work, name=f"kv-{self._way}", daemon=True)
            for work in (self._live, lambda: self._guard(self._write))
        ]

    def start(self) -> None:
        self._threads[0].start()

    def join(self, timeout_s: float) -> None:
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout_s)

    # ---- the engine's thread

    def send(self, message: object) -> None:
        """Queue a message."""
        self._put(self._encodes.encode(message))

    @abstractmethod
    def drop(self, order: DropKv) -> None:
        """Forget a transfer: no page of it is read or written for this stream when this returns."""

    def close(self, reason: str) -> None:
        """End it by the machine's order: no Closed follows, and no page is read or written when this returns."""
        self._end(reason, ordered=True)

    def _put(self, item: Message | Job) -> None:
        with self._lock:
            if self._over:
                return
            full = len(self._queue) >= MAX_QUEUED
            if not full:
                self._queue.append(item)
                self._changed.notify()
        if full:
            self._end(f"{MAX_QUEUED} messages wait for the other end")

    # ---- its threads

    @abstractmethod
    def _run(self) -> None:
        """Open, then read until the end."""

    def _live(self) -> None:
        self._guard(self._run)
        if self._threads[1].is_alive():
            self._threads[1].join()
        if self._channel is not None and self._payload is not None:
            self._channel.close()
            self._payload.close()
        self._on_end(self)

    def _guard(self, work: Callable[[], None]) -> None:
        """Run a thread's work; whatever ends it ends the stream, by name, and nothing else."""
        try:
            work()
        except PeerError as error:
            report_peer_error("runner", error, stream=self.peer.name if self.peer else "")
            self._end(str(error))
        except KvConnectionClosed as error:
            self._end(str(error))
        except Exception as error:
            log.exception("a stream of KV failed")
            self._end(f"{type(error).__name__}: {error}")

    def _use(self, channel: KvConnection, payload: Payload) -> None:
        """Both threads use it from now on. Raises KvConnectionClosed."""
        with self._lock:
            over = self._over
            if not over:
                self._channel, self._payload = channel, payload
                self._threads[1].start()
        if over:
            channel.close()
            payload.close()
            raise KvConnectionClosed("closed before it was open")

    def _receive(self, *, hello: bool = False) -> Any:
        """The next message. `hello`: it has to come at once."""
        assert self._channel is not None, "not open"
        envelope = self._decodes.envelope()
        try:
            envelope.ParseFromString(self._channel.receive_frame(patient=not hello))
        except DecodeError as error:
            raise PeerError(f"a message that cannot be read: {error}") from error
        return self._decodes.decode(envelope)

    def _post_event(self, event: KvEvent) -> None:
        """Post an event in order, and none after the end. Raises KvConnectionClosed."""
        with self._lock:
            if self._over:
                raise KvConnectionClosed("over")
            self._post(event)

    def _write(self) -> None:
        channel = self._channel
        assert channel is not None, "not open"
        while (item := self._next()) is not None:
            self._write_item(channel, item)
        channel.send_goodbye(self._goodbye)
        channel.shutdown()
        if self._payload is not None:
            self._payload.shutdown()

    def _next(self) -> Message | Job | None:
        with self._changed:
            self._job = None
            self._changed.wait_for(lambda: self._queue or self._over)
            item = None if self._over else self._queue.popleft()
            if isinstance(item, Job):
                self._job = item
            return item

    def _write_item(self, channel: KvConnection, item: Any) -> None:
        """Write one item. Raises KvConnectionClosed."""
        channel.send_frame(item.SerializeToString())

    # ---- the end

    def _end(self, reason: str, *, ordered: bool = False) -> None:
        """Once; the first reason counts. Any thread."""
        with self._lock:
            if self._over:
                return
            self._over = True
            self._queue.clear()
            self._goodbye = reason
            for key in list(self._transfers):
                self._finished(key, "lost")
            guards = self._guards()
            writer = self._threads[1]
            # between two messages it says why before it closes; within pages nobody waits for it
            ends_with_reason = writer.is_alive() and threading.current_thread() is not writer and self._job is None
            self._changed.notify()
            if not ordered and self.peer is not None:
                self._post(Closed(self.peer, reason))
        for guard in guards:
            guard.drop()
        if self._channel is not None and self._payload is not None and not ends_with_reason:
            self._channel.shutdown()
            self._payload.shutdown()
        log.info("stream of KV closed", extra=kv(peer=self.peer.name if self.peer else "", reason=reason))

    @abstractmethod
    def _guards(self) -> list[Guard]:
        """Give what still reads or writes pages; the stream is over. Under the lock."""

    def _finished(self, key: Key, result: str) -> None:
        """Count the end of a transfer: complete, refused, dropped or lost. Under the lock."""
        if (transfer := self._transfers.pop(key, None)) is not None:
            as_computed = "as_computed" if transfer.layer_wise else "after"
            self._count("kv_transfers", 1, self._way, result, as_computed)
            self._count("kv_transfer_seconds", time.monotonic() - transfer.began, self._way)

    def _count_bytes(self, carrier: str, n_bytes: int, seconds: float) -> None:
        self._count("kv_bytes", n_bytes, self._way, carrier)
        self._count("kv_seconds", seconds, self._way, carrier)


class KvSender(KvStream):
    """To a runner that takes KV. `connect` opens the connection, sends the hello, and may take its time."""

    _encodes, _decodes, _way = KV_FROM_SENDER, KV_FROM_RECEIVER, "out"

    def __init__(
        self, peer: Peer, hello: KvHello, connect: Callable[[], tuple[KvConnection, Payload]], window: KvWindow,
        progress: LayerProgress, post: Post, on_end: Callable[[KvStream], None], count: Count,
    ) -> None:  # fmt: skip
        super().__init__(window, post, on_end, count)
        self.peer, self._connect, self._progress = peer, connect, progress
        self._queue.append(KV_FROM_SENDER.encode(hello))

    # ---- the engine's thread

    def send_pages(self, order: SendKv, fence: Any, steps_ahead: int) -> None:
        """`fence`: after what was written so far. `steps_ahead`: layers of steps in flight, not counted yet."""
        job = Job(order, fence, self._progress.count + steps_ahead if order.layer_by_layer else None)
        with self._lock:
            transfer = self._transfers.setdefault(job.key, KvTransfer(time.monotonic()))
        transfer.layer_wise = transfer.layer_wise or order.layer_by_layer
        self._put(job)

    def drop(self, order: DropKv) -> None:
        """No page of it is read for this stream when this returns, nor is it called complete."""
        key = order.request_id, order.epoch
        with self._lock:
            self._queue = deque(item for item in self._queue if _key(item) != key)
            job = self._job
            self._finished(key, "dropped")
        if job is not None and job.key == key:
            job.drop()

    def step_failed(self) -> None:
        """What a step had counted as complete is computed again: layers may have left that are not right."""
        with self._lock:
            waiting = [item for item in (self._job, *self._queue) if isinstance(item, Job) and item.base is not None]
        if waiting:
            self._end("a step failed whose layers were being sent")

    # ---- its threads

    def _run(self) -> None:
        assert self.peer is not None
        self._use(*self._connect())
        ready = self._receive(hello=True)
        if not isinstance(ready, KvReady):
            raise BrokenOrder("the first message of a receiver is its answer to the hello")
        if f"{ready.runner.uuid}/{ready.runner.incarnation}" != self.peer.name:
            raise BrokenOrder(f"this is runner {ready.runner.uuid}, incarnation {ready.runner.incarnation}")
        self._post_event(Connected(self.peer, ready))
        while True:
            message = self._receive()
            if isinstance(message, KvReady):
                raise BrokenOrder("a second answer to the hello")
            if isinstance(message, KvAck | KvRefuse):
                with self._lock:
                    key = message.request_id, message.epoch
                    self._finished(key, "complete" if isinstance(message, KvAck) else "refused")
            self._post_event(Received(self.peer, message))

    def _write_item(self, channel: KvConnection, item: Any) -> None:
        if not isinstance(item, Job):
            super()._write_item(channel, item)
            return
        for first_layer, layers in self._complete_layers(item):
            if not self._send_layers(channel, item, first_layer, layers):
                return

    def _complete_layers(self, job: Job) -> Iterator[tuple[int, int]]:
        """(first, count) of layers, as they are complete, until the job is dropped or the stream over."""
        layers = self._window.layers
        if job.base is None:
            yield 0, layers
            return
        sent = 0
        while sent < layers and not (job.dropped or self._over):
            if self._progress.wait_for(job.base + sent + 1, LAYER_WAIT_S):
                done = min(layers, self._progress.count - job.base)
                yield sent, done - sent
                sent = done

    def _send_layers(self, channel: KvConnection, job: Job, first_layer: int, layers: int) -> bool:
        """False: it was dropped. Raises KvConnectionClosed."""
        order, window = job.order, self._window
        for at, pages, first, count in pieces(window, order.pages, first_layer, layers):
            with job as allowed:
                if not allowed:
                    return False
                parts = window.outgoing(pages, first, count, job.fence)
            n_bytes = len(pages) * count * window.layer_bytes
            named = KvPages(order.request_id, order.epoch, order.first_page + at, len(pages), first, count, n_bytes)
            channel.send_frame(KV_FROM_SENDER.encode(named).SerializeToString())
            assert self._payload is not None
            began = time.perf_counter()
            is_complete = self._payload.send(parts, job)
            self._count_bytes(self._payload.carrier, n_bytes, time.perf_counter() - began)
            if not is_complete:
                return False
        return True

    def _guards(self) -> list[Guard]:
        return [] if self._job is None else [self._job]


class KvReceiver(KvStream):
    """From a runner that sends KV. `accept` makes the connection secure, and may refuse it by PeerError."""

    _encodes, _decodes, _way = KV_FROM_RECEIVER, KV_FROM_SENDER, "in"

    def __init__(
        self, accept: Callable[[], tuple[KvConnection, Payload]], name_of: "Callable[[KvReceiver, KvHello], Peer]",
        window: KvWindow, page_tokens: int, post: Post, on_end: Callable[[KvStream], None], count: Count,
    ) -> None:  # fmt: skip
        """`name_of`: checks a hello, and gives the peer its name from there on; raises PeerError."""
        super().__init__(window, post, on_end, count)
        self._accept, self._name_of = accept, name_of
        self._arrivals = OfferedKv(window.layers, page_tokens)

    # ---- the engine's thread

    def send(self, message: object) -> None:
        if isinstance(message, KvRefuse):
            self._forget((message.request_id, message.epoch), "refused")
        super().send(message)

    def expect(self, order: ReceiveKv, fence: Any) -> None:
        """Expect pages. `fence`: the end of earlier writes to these pages."""
        with self._lock:
            if not self._over:
                key = order.request_id, order.epoch
                self._arrivals.expect(key, order.first_page, order.pages, fence)
                self._transfers[key] = KvTransfer(time.monotonic())

    def drop(self, order: DropKv) -> None:
        """Nothing is written to its pages when this returns."""
        self._forget((order.request_id, order.epoch), "dropped")

    def _forget(self, key: Key, result: str) -> None:
        with self._lock:
            arrival = self._arrivals.drop(key)
            self._finished(key, result)
        if arrival is not None:
            arrival.drop()

    # ---- its threads

    def _run(self) -> None:
        self._use(*self._accept())
        hello = self._receive(hello=True)
        if not isinstance(hello, KvHello):
            raise BrokenOrder("the first message of a sender is its hello")
        peer = self._name_of(self, hello)
        with self._lock:
            self.peer = peer
        self._post_event(Connected(peer, hello))
        while True:
            message = self._receive()
            match message:
                case KvPages():
                    self._receive_part(message)
                case KvOffer():
                    with self._lock:
                        self._arrivals.offer(message)
                    self._post_event(Received(peer, message))
                case KvComplete():
                    with self._lock:
                        there = self._arrivals.complete(message)
                        self._finished((message.request_id, message.epoch), "complete")
                    if there:
                        self._post_event(Received(peer, message))
                case _:
                    raise BrokenOrder("a second hello")

    def _receive_part(self, part: KvPages) -> None:
        """To where its pages are, or nowhere. Raises PeerError, KvConnectionClosed."""
        window = self._window
        if part.bytes != part.pages * part.layers * window.layer_bytes or part.bytes > window.piece_bytes:
            raise WrongPages(
                f"{part.request_id}: {part.bytes} bytes for {part.layers} layers of {part.pages} pages: "
                f"{window.layer_bytes} each, {window.piece_bytes} at a time"
            )
        with self._lock:
            found = self._arrivals.part(part)
        began = time.perf_counter()
        assert self._payload is not None
        if found is None:
            nowhere = Guard()
            nowhere.drop()
            self._payload.receive([memoryview(bytearray(part.bytes))], nowhere)
            return
        arrival, pages = found
        if self._payload.receive(window.incoming(pages, part.first_layer, part.layers), arrival):
            with arrival as allowed:
                if allowed:
                    window.publish(pages, part.first_layer, part.layers, arrival.fence)
        self._count_bytes(self._payload.carrier, part.bytes, time.perf_counter() - began)

    def _guards(self) -> list[Guard]:
        return list(self._arrivals.end())


def _key(item: Any) -> Key | None:
    """Return the key of the pages of a job, or of the end in a message."""
    if isinstance(item, Job):
        return item.key
    if item.WhichOneof("message") != "complete":
        return None
    return item.complete.request_id, Epoch(item.complete.epoch.term, item.complete.epoch.counter)


def pieces(
    window: KvWindow, pages: tuple[int, ...], first_layer: int, layers: int
) -> Iterator[tuple[int, tuple[int, ...], int, int]]:
    """(index of the first page, pages, first layer, layers) of pieces that are small enough, page by page."""
    max_layers = max(1, window.piece_bytes // window.layer_bytes)  # layers of single pages
    at_once, layers_at_once = max(1, max_layers // layers), min(layers, max_layers)
    for at in range(0, len(pages), at_once):
        for layer in range(first_layer, first_layer + layers, layers_at_once):
            count = min(layers_at_once, first_layer + layers - layer)
            yield at, pages[at : at + at_once], layer, count

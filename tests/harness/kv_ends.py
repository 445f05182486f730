"""Ends of streams of KV in one process, with real sockets: whole ones, and one that writes what it wants."""

import queue
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.waiting import PATIENCE_S
from weft.domain.ids import Epoch, RunnerId
from weft.domain.kv_transfer import KvAccept, KvComplete, KvHello, KvOffer, KvReady
from weft.domain.machine import Closed, Connected, Kind, Peer, Received
from weft.wire.codec.kv_transfer import KV_FROM_RECEIVER, KV_FROM_SENDER, KvPages
from weft.wire.tls import Tls
from weft_runner.core import OpenKvStream, ReceiveKv, SendKv
from weft_runner.core.events import DropKv
from weft_runner.model import CalledLayerCounter, LocalKvMemory
from weft_runner.shell.kv_connection import KvConnection
from weft_runner.shell.kv_ring import NO_RING
from weft_runner.shell.kv_transfer import PREFACE, KvPlace, KvStreamShell

PAGES, LAYERS, LAYER_BYTES, PAGE_TOKENS = 64, 4, 1536, 16
PAGE_BYTES = LAYERS * LAYER_BYTES
POOL = "acme/demo"
EPOCH = Epoch(1, 1)


class CountedFigures:
    """Counts in lists."""

    def __init__(self) -> None:
        self.moved: list[tuple[str, str, int]] = []
        self.results: list[tuple[str, str, bool]] = []

    def count(self, name: str, value: float, *labels: str) -> None:
        match name, labels:
            case "kv_bytes", (direction, carrier):
                self.moved.append((direction, carrier, round(value)))
            case "kv_transfers", (direction, result, layers):
                self.results.append((direction, result, layers == "as_computed"))
            case _:
                pass

    def bytes(self, direction: str) -> int:
        return sum(n_bytes for way, _, n_bytes in self.moved if way == direction)


class Machine:
    """The test as the machine of a runner: events of the shell, in their order."""

    def __init__(self) -> None:
        self.events: queue.Queue[Any] = queue.Queue()

    def next(self, of: type[Any]) -> Any:
        event = self.events.get(timeout=PATIENCE_S)
        assert isinstance(event, of), event
        return event

    def message(self, of: type[Any]) -> Any:
        message = self.next(Received).message
        assert isinstance(message, of), message
        return message


class End(Machine):
    """A runner's shell for KV, with pages of its own; the test is its machine."""

    def __init__(
        self,
        name: str,
        *,
        fill: int = 0,
        pages: int = PAGES,
        layers: int = LAYERS,
        layer_bytes: int = LAYER_BYTES,
        tls: Tls | None = None,
        pool: str = POOL,
        stall_s: float = PATIENCE_S,
        shared_memory: bool = False,
        wrap: Callable[[Any], Any] = lambda memory: memory,
    ) -> None:
        super().__init__()
        self.runner = RunnerId(f"{pool.partition('/')[0]}.{name}", secrets.token_hex(8))
        self.pages = np.full((pages, layers * layer_bytes), fill, np.uint8)
        self.progress, self.figures = CalledLayerCounter(), CountedFigures()
        place = KvPlace("127.0.0.1:0", self.runner, pool, PAGE_TOKENS, tls, shared_memory, stall_s)
        memory = wrap(LocalKvMemory(self.pages, layers, "test"))
        self.shell = KvStreamShell(place, memory, self.progress, self.events.put, self.figures.count)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.shell.port}"

    def peer(self) -> Peer:
        """The name that a sender's machine has for this end."""
        return Peer(Kind.RUNNER, f"{self.runner.uuid}/{self.runner.incarnation}")

    def hello(self, to: "End") -> KvHello:
        return KvHello(self.runner, to.runner.incarnation, POOL, "sha256:" + "0" * 64, "test")

    def ready(self) -> KvReady:
        return KvReady(self.runner)

    def draw(self, seed: int = 1) -> None:
        """Fill the pages with random content."""
        self.pages[:] = np.random.default_rng(seed).integers(0, 256, self.pages.shape, dtype=np.uint8)

    def close(self) -> None:
        self.shell.close()


@dataclass
class Pair:
    """A sender and a receiver with an open stream, of any kind of ends. `incoming`: the receiver's name for it."""

    sender: Any
    receiver: Any
    incoming: Peer

    @property
    def outgoing(self) -> Peer:
        return self.receiver.peer()

    def accept(self, request_id: str, pages: tuple[int, ...], first_page: int = 0, epoch: Epoch = EPOCH) -> None:
        """Offer a sequence, and let the receiver answer."""
        self.sender.shell.send(self.outgoing, KvOffer(request_id, epoch, ""))
        assert self.receiver.message(KvOffer) == KvOffer(request_id, epoch, "")
        self.receiver.shell.execute(ReceiveKv(self.incoming, request_id, epoch, first_page, pages))
        self.receiver.shell.send(self.incoming, KvAccept(request_id, epoch, first_page))
        assert self.sender.message(KvAccept).first_page == first_page

    def send(self, request_id: str, pages: tuple[int, ...], first_page: int = 0, **how: Any) -> None:
        self.sender.shell.execute(SendKv(self.outgoing, request_id, EPOCH, first_page, pages, **how))

    def complete(self, request_id: str, in_kv: int) -> None:
        self.sender.shell.send(self.outgoing, KvComplete(request_id, EPOCH, in_kv, (7,)))

    def drop(self, request_id: str, at: str) -> None:
        end, peer = (self.sender, self.outgoing) if at == "sender" else (self.receiver, self.incoming)
        end.shell.execute(DropKv(peer, request_id, EPOCH))

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def opened(sender: Any, receiver: Any) -> Peer:
    """Open a stream that has to be answered; the receiver's name for it."""
    sender.shell.execute(OpenKvStream(receiver.peer(), receiver.address, sender.hello(receiver)))
    return receiver.next(Connected).peer


def connect(sender: Any, receiver: Any) -> Pair:
    """Open the stream, as both machines do."""
    incoming = opened(sender, receiver)
    receiver.shell.send(incoming, receiver.ready())
    assert sender.next(Connected).peer == receiver.peer()
    return Pair(sender, receiver, incoming)


class Liar:
    """A sender that keeps to no contract: a socket to a receiver, on a stream that is open."""

    def __init__(self, receiver: End, token: bytes = NO_RING) -> None:
        self.receiver, self.runner = receiver, RunnerId("acme.liar", "liar-1")
        sock = socket.create_connection(("127.0.0.1", receiver.shell.port))
        self.channel = KvConnection(sock, PATIENCE_S)
        self.channel.send([memoryview(PREFACE + token)])
        self.say(KvHello(self.runner, receiver.runner.incarnation, POOL, "sha256:" + "0" * 64, "test"))

        self.peer: Peer = receiver.next(Connected).peer
        receiver.shell.send(self.peer, KvReady(receiver.runner))
        assert isinstance(self.hear(), KvReady)

    def offer(self, request_id: str, pages: tuple[int, ...] | None = None, first_page: int = 0) -> None:
        """Offer a sequence. The receiver accepts it into `pages`; None: nothing is accepted."""
        self.say(KvOffer(request_id, EPOCH, ""))
        assert self.receiver.message(KvOffer).request_id == request_id
        if pages is not None:
            self.receiver.shell.execute(ReceiveKv(self.peer, request_id, EPOCH, first_page, pages))

    def say(self, message: Any) -> None:
        self.channel.send_frame(KV_FROM_SENDER.encode(message).SerializeToString())

    def hear(self) -> Any:
        envelope = KV_FROM_RECEIVER.envelope()
        envelope.ParseFromString(self.channel.receive_frame())
        return KV_FROM_RECEIVER.decode(envelope)

    def part(
        self, request_id: str, first_page: int, pages: int, first_layer: int = 0, layers: int = LAYERS,
        n_bytes: int | None = None, epoch: Epoch = EPOCH,
    ) -> bytes:  # fmt: skip
        """Announce a part and send it. Returns its bytes."""
        size = pages * layers * LAYER_BYTES if n_bytes is None else n_bytes
        self.say(KvPages(request_id, epoch, first_page, pages, first_layer, layers, size))
        content = bytes([first_page + first_layer + 1]) * size
        self.channel.send([memoryview(content)])
        return content

    def close(self) -> None:
        self.channel.close()


def closed(end: End) -> Closed:
    """Return the next end of a stream."""
    while True:
        event = end.events.get(timeout=PATIENCE_S)
        if isinstance(event, Closed):
            return event

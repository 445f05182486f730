"""Two ends of a stream of KV in two processes: the runner's own shell, a machine that accepts whatever is offered."""

import multiprocessing
import queue
import resource
import secrets
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from weft.domain.ids import Epoch, RunnerId
from weft.domain.kv_transfer import KvAccept, KvAck, KvComplete, KvHello, KvOffer, KvReady
from weft.domain.machine import Connected, Kind, Peer, Received
from weft.wire.tls import load_tls
from weft_runner.core import OpenKvStream, ReceiveKv, SendKv
from weft_runner.model import KvMemory, LayerProgress, LocalKvMemory
from weft_runner.shell.kv_transfer import KvPlace, KvStreamShell
from weft_stage.errors import EngineRefused

PAGE_TOKENS, POOL, PATIENCE_S = 16, "bench/bench", 60.0
EPOCH, BASE_DIGEST = Epoch(1, 1), f"sha256:{0:064}"


@dataclass(frozen=True, slots=True)
class Geometry:
    """Pages of the receiver."""

    pages: int
    layers: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Carrier:
    """What bytes travel by. `tls`: a folder as `--tls-dir`, or None."""

    name: str
    shared_memory: bool = False
    tls: Path | None = None


class NoLayers:
    """Nothing is sent layer by layer."""

    count = 0

    def wait_for(self, count: int, timeout_s: float) -> bool:
        del count
        time.sleep(timeout_s)
        return False


def cpu_s() -> float:
    """Return the CPU seconds of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class SenderEnd:
    """Sends to the other process. One transfer at a time."""

    def __init__(self, memory: KvMemory, progress: LayerProgress, carrier: Carrier, to: RunnerId, address: str) -> None:
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._shell = _shell(_runner("sender"), memory, progress, carrier, self._events)
        self._peer = Peer(Kind.RUNNER, f"{to.uuid}/{to.incarnation}")
        hello = KvHello(_runner("sender"), to.incarnation, POOL, BASE_DIGEST, memory.layout)
        self._shell.execute(OpenKvStream(self._peer, address, hello))
        self._await(Connected)
        self._numbers = 0

    def offer(self) -> str:
        """Offer a sequence, which the receiver expects from here on."""
        self._numbers += 1
        name = f"r{self._numbers}"
        self._shell.send(self._peer, KvOffer(name, EPOCH, ""))
        self._await(Received)
        return name

    def send(self, name: str, pages: tuple[int, ...], *, layer_by_layer: bool = False) -> None:
        self._shell.execute(SendKv(self._peer, name, EPOCH, 0, pages, layer_by_layer))
        self._shell.send(self._peer, KvComplete(name, EPOCH, len(pages) * PAGE_TOKENS, (1,)))

    def acknowledged(self) -> None:
        """Wait for the receiver's ack. Raises EngineRefused."""
        self._await(Received)

    def close(self) -> None:
        self._shell.close()

    def _await(self, of: type[Any]) -> None:
        event = self._events.get(timeout=PATIENCE_S)
        if not isinstance(event, of):
            raise EngineRefused(f"a stream of KV ended: {event}")


@dataclass(frozen=True, slots=True)
class ReceiverEnd:
    """The other process, from here."""

    runner: RunnerId
    address: str
    asks: "Connection[Any, Any]"

    def cpu_s(self) -> float:
        self.asks.send("cpu")
        return self.asks.recv()


@contextmanager
def receiver(geometry: Geometry, carrier: Carrier) -> Generator[ReceiverEnd]:
    """Start the other process, and end it with the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_receive, args=(there, geometry, carrier), daemon=True)
    process.start()
    try:
        runner, address = here.recv()
        yield ReceiverEnd(runner, address, here)
        here.send("end")
        process.join(PATIENCE_S)
    finally:
        process.kill()


def _receive(asks: "Connection[Any, Any]", geometry: Geometry, carrier: Carrier) -> None:
    """Run the other process: pages are given out in turn, all of them touched before."""
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    pages = np.ones((geometry.pages, geometry.page_bytes), np.uint8)
    runner = _runner("receiver")
    shell = _shell(runner, LocalKvMemory(pages, geometry.layers, ""), NoLayers(), carrier, events)
    asks.send((runner, f"127.0.0.1:{shell.port}"))
    threading.Thread(target=_accept_all, args=(shell, runner, geometry.pages, events), daemon=True).start()
    while asks.recv() != "end":
        asks.send(cpu_s())
    shell.close()


def _accept_all(shell: KvStreamShell, runner: RunnerId, total: int, events: "queue.SimpleQueue[Any]") -> None:
    """Handle events as the receiver's machine."""
    at = 0
    while True:
        match events.get():
            case Connected(peer):
                shell.send(peer, KvReady(runner))
            case Received(peer, KvOffer(name, epoch)):
                at = (at + total // 4) % total
                pages = tuple((at + page) % total for page in range(total // 4))
                shell.execute(ReceiveKv(peer, name, epoch, 0, pages))
                shell.send(peer, KvAccept(name, epoch, 0))
            case Received(peer, KvComplete(name, epoch)):
                shell.send(peer, KvAck(name, epoch))
            case _:
                return


def _shell(
    runner: RunnerId, memory: KvMemory, progress: LayerProgress, carrier: Carrier, events: "queue.SimpleQueue[Any]"
) -> KvStreamShell:
    tls = load_tls(carrier.tls, "runner")
    place = KvPlace("127.0.0.1:0", runner, POOL, PAGE_TOKENS, tls, carrier.shared_memory)
    return KvStreamShell(place, memory, progress, events.put)


def _runner(name: str) -> RunnerId:
    return RunnerId(f"bench.{name}", secrets.token_hex(8))

"""KV from this runner to others of its pool, and from them: the listener, and the streams that the machine orders.

Contract: `weft/wire/v1/kv_transfer.proto`; how it is carried: docs/adr/0017. A sender connects to `--kv-listen` of the
receiver over TCP, under mutual TLS where there are certificates, and sends a preface and its hello; between runners of
one host the bytes of pages pass through shared memory beside it (`kv_ring`). The machine decides
everything but who may call: only runners whose certificates speak for the namespace of this runner's pool.
"""

import contextlib
import itertools
import logging
import socket
import ssl
import threading
from dataclasses import dataclass

from weft.domain.ids import RunnerId
from weft.domain.kv_transfer import KvHello
from weft.domain.machine import Close, Closed, Kind, Peer
from weft.process import listen, split_address
from weft.telemetry.logs import kv
from weft.wire.errors import PeerError
from weft.wire.roles import KV_CALLERS, pool_namespaces_of, refusal, roles_of
from weft.wire.tls import Tls
from weft_runner.core.events import DropKv, KvAction, OpenKvStream, ReceiveKv, SendKv
from weft_runner.model.kv_memory import KvMemory
from weft_runner.model.layer_progress import LayerProgress
from weft_runner.shell.kv_connection import KvConnection, KvConnectionClosed, accept_until
from weft_runner.shell.kv_ring import NO_RING, TOKEN_BYTES, RingListener, hand_over
from weft_runner.shell.kv_stream import Count, KvReceiver, KvSender, KvStream, Payload, Post, count_nothing

log = logging.getLogger(__name__)
PREFACE = b"weft-kv1"
MAX_STREAMS = 256  # that come in: one for each other runner of the pool that sends, two while it reconnects
CONNECT_S = 5.0  # and as long for the handshake
STALL_S = 10.0  # without a byte in the middle of a message, or of pages
CLOSE_S = 2.0


class NotOfThisPool(PeerError):
    """The caller's certificate is not that of a runner of this pool's namespace, or it asks for another runner."""


@dataclass(frozen=True, slots=True)
class KvPlace:
    """Addresses and name with which this runner takes and sends KV. `pool`: NAMESPACE/NAME."""

    listen: str
    runner: RunnerId
    pool: str
    page_tokens: int
    tls: Tls | None = None
    shared_memory: bool = True  # with runners of this host
    stall_s: float = STALL_S

    @property
    def namespace(self) -> str:
        return self.pool.partition("/")[0]


class KvStreamShell:
    """Executes the machine's orders about KV. `post` and `count` are called from the streams' threads."""

    def __init__(
        self, place: KvPlace, memory: KvMemory, progress: LayerProgress, post: Post, count: Count = count_nothing
    ) -> None:
        """Listen from now on. Raises AddressInUse."""
        self._place, self._memory, self._progress, self._post, self._count = place, memory, progress, post, count
        self._lock = threading.Lock()
        self._by_peer: dict[Peer, KvStream] = {}
        self._streams: set[KvStream] = set()  # with those that end, and those that have no name yet
        self._numbers = itertools.count(1)
        self._ended = threading.Event()
        self._rings = _listen_for_rings(place)
        self._listener = listen(place.listen, "--kv-listen")
        self._listener.setblocking(True)
        self.port: int = self._listener.getsockname()[1]
        listening = self._ended, self._listener, self._take_or_refuse, "a connection of a runner"
        self._thread = threading.Thread(target=accept_until, args=listening, name="kv-listen", daemon=True)
        self._thread.start()

    # ---- the engine's thread

    def execute(self, action: KvAction, steps_ahead: int = 0) -> None:
        """Execute an order of the machine without waiting for sockets. `steps_ahead`: layers of steps in flight.

        Where its stream is over it is dropped.
        """
        match action, self._by_peer.get(action.peer):
            case OpenKvStream(), before:
                self._open(action, before)
            case SendKv(), KvSender() as stream:
                stream.send_pages(action, self._memory.fence(), steps_ahead)
            case ReceiveKv(), KvReceiver() as stream:
                stream.expect(action, self._memory.fence())
            case DropKv(), KvStream() as stream:
                stream.drop(action)
            case Close(_, reason), KvStream() as stream:
                stream.close(reason)
            case _:
                pass

    def send(self, peer: Peer, message: object) -> None:
        """Queue a message to a runner; dropped where there is no stream."""
        if (stream := self._by_peer.get(peer)) is not None:
            stream.send(message)

    def step_failed(self) -> None:
        """Note that the rows of a step run again: what left of it may be wrong."""
        for stream in list(self._by_peer.values()):
            if isinstance(stream, KvSender):
                stream.step_failed()

    def close(self) -> None:
        """End all streams and the listener; their threads have ended, or hold no page, when this returns."""
        self._ended.set()
        with contextlib.suppress(OSError):  # closed before; closing it would not wake who waits for a connection
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(CLOSE_S)
        if self._rings is not None:
            self._rings.close()
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.close("the runner ends")
        for stream in streams:
            stream.join(CLOSE_S)

    def _open(self, order: OpenKvStream, previous: KvStream | None) -> None:
        if previous is not None:
            previous.close("opened again")
        try:
            window = self._memory.window()
        except (MemoryError, RuntimeError) as error:
            self._post(Closed(order.peer, f"no memory for a stream: {error}"))
            return
        stream = KvSender(
            order.peer, order.hello, lambda: self._connect(order), window, self._progress, self._post, self._remove,
            self._count,
        )  # fmt: skip
        with self._lock:
            self._by_peer[order.peer] = stream
            self._streams.add(stream)
        stream.start()

    # ---- the streams' threads

    def _connect(self, order: OpenKvStream) -> tuple[KvConnection, Payload]:
        """Connect, with a ring where both ends are on one host. Raises KvConnectionClosed, PeerError."""
        try:
            sock = socket.create_connection(split_address(order.address), CONNECT_S)
        except (OSError, ValueError) as error:
            raise KvConnectionClosed(f"{order.address} cannot be reached: {error}") from error
        channel = self._secured(sock, server=False)
        handed_over = hand_over(order.peer.name, self._place.stall_s) if self._place.shared_memory else None
        token, payload = handed_over or (NO_RING, channel)
        channel.send([memoryview(PREFACE + token)])
        return channel, payload

    def _accept(self, sock: socket.socket) -> tuple[KvConnection, Payload]:
        """Accept a connection, with the ring that its preface names. Raises KvConnectionClosed, PeerError."""
        channel = self._secured(sock, server=True)
        preface = bytearray(len(PREFACE) + TOKEN_BYTES)
        channel.receive([memoryview(preface)])
        magic, token = bytes(preface[: len(PREFACE)]), bytes(preface[len(PREFACE) :])
        if magic != PREFACE:
            channel.close()
            raise PeerError(f"{magic!r} instead of {PREFACE!r}")
        if token == NO_RING:
            return channel, channel
        ring = self._rings.claim(token) if self._rings is not None else None
        if ring is None:
            channel.close()
            raise PeerError("shared memory that was not handed over")
        return channel, ring

    def _secured(self, sock: socket.socket, *, server: bool) -> KvConnection:
        """Make it a connection, under TLS where there is. Raises KvConnectionClosed, PeerError."""
        try:
            sock.settimeout(CONNECT_S)
            sock = secure_end(sock, self._place.tls, self._place.namespace, "KvTransfer", server=server)
            return KvConnection(sock, self._place.stall_s)
        except OSError as error:
            sock.close()
            raise KvConnectionClosed(f"no secure connection: {error}") from error

    def _name(self, stream: KvReceiver, hello: KvHello) -> Peer:
        """Return the peer of a hello.

        Raises NotOfThisPool: the hello is to another runner, or of a pool that its certificate is not for.
        """
        runner = self._place.runner
        if hello.incarnation != runner.incarnation:
            raise NotOfThisPool(f"this is incarnation {runner.incarnation} of runner {runner.uuid}")
        if self._place.tls is not None and hello.runner.uuid.partition(".")[0] != self._place.namespace:
            raise NotOfThisPool(f"runner {hello.runner.uuid} is not of namespace {self._place.namespace}")
        peer = Peer(Kind.RUNNER, f"{hello.runner.uuid}/{hello.runner.incarnation}/{next(self._numbers)}")
        with self._lock:
            self._by_peer[peer] = stream
        return peer

    def _remove(self, stream: KvStream) -> None:
        with self._lock:
            self._streams.discard(stream)
            if stream.peer is not None and self._by_peer.get(stream.peer) is stream:
                del self._by_peer[stream.peer]

    def _take_or_refuse(self, sock: socket.socket, address: object) -> None:
        if self._ended.is_set() or not self._take(sock):
            log.warning("a stream of KV too many", extra=kv(address=address, most=MAX_STREAMS))
            sock.close()

    def _take(self, sock: socket.socket) -> bool:
        with self._lock:
            if sum(isinstance(stream, KvReceiver) for stream in self._streams) >= MAX_STREAMS:
                return False
        try:
            window = self._memory.window()
        except (MemoryError, RuntimeError):
            log.exception("no memory for a stream")
            return False
        stream = KvReceiver(
            lambda: self._accept(sock), self._name, window, self._place.page_tokens, self._post, self._remove,
            self._count,
        )  # fmt: skip
        with self._lock:
            self._streams.add(stream)
        stream.start()
        return True


def kv_address(listen: str, advertise: str) -> str:
    """Return the address at which other runners reach `--kv-listen`: on the host of `--advertise`."""
    host, port = advertise.rpartition(":")[0], listen.rpartition(":")[2]
    return f"{host}:{port}"


def secure_end(sock: socket.socket, tls: Tls | None, namespace: str, subject: str, *, server: bool) -> socket.socket:
    """Put TLS around a connection where there is any, and check the other end. `subject`: it asks for.

    Raises OSError; NotOfThisPool, with the connection closed, unless the other end is a runner that may speak for pools
    of that namespace.
    """
    if tls is None:
        return sock
    context = tls.server_context() if server else tls.client_context("runner")
    secure = context.wrap_socket(sock, server_side=server)
    try:
        _check_certificate(secure, namespace, subject)
    except PeerError:
        secure.close()
        raise
    return secure


def _check_certificate(secure: ssl.SSLSocket, namespace: str, subject: str) -> None:
    certificate = secure.getpeercert() or {}
    names = [str(value) for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]  # pyright: ignore[reportGeneralTypeIssues]
    if (message := refusal(roles_of(names), KV_CALLERS, subject)) is not None:
        raise NotOfThisPool(message)
    namespaces = pool_namespaces_of(names)
    if namespaces and namespace not in namespaces:
        raise NotOfThisPool(f"its certificate is for runners of {', '.join(sorted(namespaces))}, not of {namespace}")


def _listen_for_rings(place: KvPlace) -> RingListener | None:
    """Listen for rings; None if other runners of this host must use TCP."""
    try:
        return RingListener(place.runner, place.stall_s)
    except OSError as error:
        log.warning("no shared memory with runners of this host: they use TCP", extra=kv(error=error))
        return None

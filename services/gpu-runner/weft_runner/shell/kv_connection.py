"""A connection of two runners: frames, and bytes between them that pass between sockets and KV pages without a copy.

A frame is its length (4 bytes, the highest first) and a protobuf envelope; with the highest bit of the length set it is
the reason for which the other end closes. The socket does not block: a thread waits for it holding nothing, and holds
the lock of a guard only while bytes are copied. No wait within a frame or a payload is longer than `stall_s`.
"""

import contextlib
import logging
import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any

from weft.telemetry.logs import kv
from weft.wire.errors import PeerError
from weft_runner.model.kv_memory import Guard

log = logging.getLogger(__name__)
MAX_FRAME = 4 << 20
GOODBYE = 1 << 31
MAX_REASON = 500
MAX_PARTS = 512  # of one system call; 1,024 is what Linux takes
RECORD = 16 << 10  # of TLS
ZEROS = bytes(64 << 10)
ACCEPT_AGAIN_S = 0.1
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 15_000}


class KvConnectionClosed(Exception):
    """The connection is over, for the reason that the message gives."""


class KvConnection:
    """A KV connection. One thread sends and one thread receives; any thread may close it."""

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        self._sock, self._stall_ms = sock, stall_s * 1e3
        sock.setblocking(False)
        self._secure = isinstance(sock, ssl.SSLSocket)
        self.carrier = "tls" if self._secure else "tcp"
        # OpenSSL lets one thread at a time use a connection
        self._alone: Any = threading.Lock() if self._secure else contextlib.nullcontext()
        if sock.family != socket.AF_UNIX:
            tune(sock)

    # ---- frames

    def send_frame(self, envelope: bytes) -> None:
        self.send([memoryview(len(envelope).to_bytes(4) + envelope)])

    def send_goodbye(self, reason: str) -> None:
        text = reason.encode()[:MAX_REASON]
        self.send([memoryview((len(text) | GOODBYE).to_bytes(4) + text)])

    def receive_frame(self, *, patient: bool = True) -> bytes:
        """Take the next frame; `patient`: however long until it begins. Raises KvConnectionClosed, PeerError."""
        header = bytearray(4)
        self.receive([memoryview(header)], patient=patient)
        length = int.from_bytes(header)
        if length & GOODBYE:
            length &= GOODBYE - 1
            text = self._receive_bytes(min(length, MAX_REASON))
            raise KvConnectionClosed(text.decode(errors="replace") or "the other end gave no reason")
        if length > MAX_FRAME:
            raise PeerError(f"a message of {length} bytes: at most {MAX_FRAME} are taken")
        return self._receive_bytes(length)

    def _receive_bytes(self, length: int) -> bytes:
        data = bytearray(length)
        self.receive([memoryview(data)])
        return bytes(data)

    # ---- bytes

    def send(self, parts: Sequence[memoryview], guard: Guard | None = None) -> bool:
        """Send all of them; zeros instead, once the guard says no: False. Raises KvConnectionClosed."""
        return self._pass(parts, guard, out=True)

    def receive(self, parts: Sequence[memoryview], guard: Guard | None = None, *, patient: bool = False) -> bool:
        """Fill all of them; elsewhere, once the guard says no: False. `patient`: as long as nothing has come.

        Raises KvConnectionClosed.
        """
        return self._pass(parts, guard, out=False, patient=patient)

    def _pass(self, parts: Sequence[memoryview], guard: Guard | None, *, out: bool, patient: bool = False) -> bool:
        parts, left, guard = list(parts), sum(map(len, parts)), guard or Guard()
        is_complete = empty = True
        while left:
            with guard as allowed:
                if not allowed and is_complete:
                    is_complete, nowhere = False, memoryview(ZEROS if out else bytearray(len(ZEROS)))
                    parts = [nowhere] * -(-left // len(ZEROS))
                    parts[-1] = parts[-1][: left - (len(parts) - 1) * len(ZEROS)]
                n_bytes = self._transmit(parts, out=out)
            left -= n_bytes
            empty = empty and not n_bytes
            skip(parts, n_bytes)
            if not n_bytes and out:
                self._wait(select.POLLOUT, self._stall_ms, "takes nothing")
            elif not n_bytes:
                self._wait(select.POLLIN, None if patient and empty else self._stall_ms, "sends nothing more")
        return is_complete

    def _transmit(self, parts: list[memoryview], *, out: bool) -> int:
        """Pass on what goes at once; 0: nothing.

        OpenSSL keeps a record that did not go: the next call, of as many bytes or more, sends it. Raises
        KvConnectionClosed.
        """
        try:
            with self._alone:
                if out:
                    return self._sock.send(parts[0][:RECORD]) if self._secure else self._sock.sendmsg(parts[:MAX_PARTS])
                got = self._sock.recv_into(parts[0]) if self._secure else self._sock.recvmsg_into(parts[:MAX_PARTS])[0]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except OSError as error:
            raise KvConnectionClosed(f"the connection was lost: {error.strerror or error}") from error
        if not got:
            raise KvConnectionClosed("the connection was closed")
        return got

    def _wait(self, event: int, timeout_ms: float | None, action: str) -> None:
        waiting = select.poll()
        try:
            waiting.register(self._sock, event)
        except (ValueError, OSError) as error:  # closed meanwhile
            raise KvConnectionClosed("the connection was closed") from error
        if not waiting.poll(timeout_ms):
            raise KvConnectionClosed(f"the other end {action} for {self._stall_ms / 1e3:g} s")

    # ---- end

    def shutdown(self) -> None:
        """Wake both threads: whatever they do ends with KvConnectionClosed. Any thread; harmless when done."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # not TLS's: it would need both ends

    def close(self) -> None:
        """Once no thread uses it any more."""
        self._sock.close()


def tune(sock: socket.socket) -> None:
    """Small messages go at once; a peer that is gone is noticed on a stream where nothing passes, too."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def accept_until(
    closed: threading.Event, listener: socket.socket, take: Callable[[socket.socket, Any], None], subject: str
) -> None:
    """Give each connection, with its address, to `take`, until `closed` is set; the listener is closed then."""
    while not closed.is_set():
        try:
            connection = listener.accept()
        except OSError as error:  # no descriptors left, or it was shut down
            if not closed.wait(ACCEPT_AGAIN_S):
                log.error("%s could not be taken", subject, extra=kv(error=error))
            continue
        take(*connection)
    listener.close()


def skip(parts: list[memoryview], count: int) -> None:
    """Remove `count` bytes, which are done, from the front."""
    done = 0
    while count and count >= len(parts[done]):
        count -= len(parts[done])
        done += 1
    del parts[:done]
    if count:
        parts[0] = parts[0][count:]

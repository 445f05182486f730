"""Messages between ranks of one runner on several hosts: as `parallel.ipc`, over TCP, under mutual TLS where there is.

Both ends are one program of one version, and have shown certificates of a runner of one pool before anything is
unpacked.
"""

import os
import select
import socket
import ssl
import struct
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from weft_runner.parallel.ipc import Users, memfd
from weft_runner.parallel.messages import ChannelLost, pack_message, unpack_message

MAX_MESSAGE = 1 << 32  # bytes: of an adapter's tensors, which go as one
CHUNK = 1 << 20
IDLE_S, PROBES_S, PROBES = 5, 2, 3  # a host that is gone is noticed within some 11 s
_LENGTH = struct.Struct(">Q")


@contextmanager
def _lost(doing: str) -> Generator[None]:
    try:
        yield
    except TimeoutError as error:
        raise ChannelLost(f"{doing}: timed out") from error
    except (OSError, ValueError, ssl.SSLError) as error:
        raise ChannelLost(f"{doing}: {error}") from error


class TcpChannel:
    """One end; what it raises is ChannelLost.

    One thread uses it at a time, but for `wait_for_end` and `close`; an end that never receives is sent from any.
    """

    def __init__(self, end: socket.socket) -> None:
        """`end` is connected, and belongs to this."""
        self._end, self._sending = end, threading.Lock()
        self._users = Users(end, _lost, lambda: socket.socket.shutdown(end, socket.SHUT_RDWR))  # without TLS's goodbye
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", PROBES_S), ("TCP_KEEPCNT", PROBES)):
            if hasattr(socket, name):  # not everywhere
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)

    @property
    def local_host(self) -> str:
        return str(self._end.getsockname()[0])

    def set_patience(self, timeout_s: float | None) -> None:
        """How long a send or a receive may stand still; None: for ever, or until the other host is gone."""
        self._end.settimeout(timeout_s)

    def send(self, message: Any, file: int | None = None) -> None:
        """Returns once the kernel has it."""
        body = pack_message(message)
        with self._sending:
            self.send_bytes(body)
            if file is not None:
                self._send_file(file)

    def receive(self) -> Any:
        return unpack_message(self.receive_bytes(MAX_MESSAGE), self.send)

    def receive_file(self) -> int:
        """A copy of what came with the message before; the caller closes it."""
        file = memfd("weft-adapter")
        try:
            left = self._receive_length(MAX_MESSAGE)
            while left:
                part = self._receive_some(min(left, CHUNK))
                os.write(file, part)
                left -= len(part)
        except BaseException:
            os.close(file)
            raise
        return file

    def send_bytes(self, body: bytes) -> None:
        with self._users.one("sending"):
            self._end.sendall(_LENGTH.pack(len(body)) + body)

    def receive_bytes(self, most: int) -> bytes:
        body = bytearray()
        length = self._receive_length(most)
        while len(body) < length:
            body += self._receive_some(min(length - len(body), CHUNK))
        return bytes(body)

    def has_data(self, timeout_s: float) -> bool:
        """Within that time something can be received, if only that the other end is gone."""
        with self._users.one("waiting"):
            if isinstance(self._end, ssl.SSLSocket) and self._end.pending():
                return True
            watch = select.poll()
            watch.register(self._end.fileno(), select.POLLIN)
            return bool(watch.poll(timeout_s * 1e3))

    def wait_for_end(self) -> None:
        """Block until an end is closed, without receiving what arrives before. Any thread."""
        self._users.wait_for_end()

    def close(self) -> None:
        """Wakes the threads that wait at either end."""
        self._users.close()

    def _send_file(self, file: int) -> None:
        length = os.fstat(file).st_size
        with self._users.one("sending"):
            self._end.sendall(_LENGTH.pack(length))
            for offset in range(0, length, CHUNK):
                self._end.sendall(os.pread(file, CHUNK, offset))

    def _receive_length(self, most: int) -> int:
        head = bytearray()
        while len(head) < _LENGTH.size:
            head += self._receive_some(_LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        if length > most:
            raise ChannelLost(f"a message of {length} bytes, where {most} are the most")
        return length

    def _receive_some(self, most: int) -> bytes:
        with self._users.one("receiving"):
            part = self._end.recv(most)
        if not part:
            raise ChannelLost("the other end closed")
        return part

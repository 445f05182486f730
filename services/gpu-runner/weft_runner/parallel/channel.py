"""Messages between the ranks of one runner, perhaps with a file: over a socket pair, or TCP under TLS where there is.

Both ends are one program of one version. One has started the other, and no other process can reach their pair, or both
have shown certificates of a runner of one pool before anything is unpacked.
"""

import os
import select
import socket
import struct
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

from weft_runner.parallel.messages import ChannelLost, pack_message, unpack_message

MAX_MESSAGE, MAX_FILE = 1 << 26, 1 << 32  # bytes; an adapter's tensors go as one file over TCP
CHUNK = 1 << 20
IDLE_S, PROBES_S, PROBES = 5, 2, 3  # a host that is gone is noticed within some 11 s
_LENGTH = struct.Struct(">Q")


class Channel:
    """An end of a channel. Its errors are ChannelLost. Any thread sends, and a single thread receives.

    Under TLS an end that receives is one thread's, but for `wait_for_end` and `close`. The last thread that uses an end
    closes its descriptor: one that is about to read would else read from whatever file has its number by then.
    """

    def __init__(self, end: socket.socket) -> None:
        """`end` is connected, and belongs to this."""
        self._end, self._sending, self._is_pair = end, threading.Lock(), end.family == socket.AF_UNIX
        self._state, self._n_users, self._closed = threading.Lock(), 0, False
        end.settimeout(None)
        if self._is_pair:
            return
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", PROBES_S), ("TCP_KEEPCNT", PROBES)):
            if hasattr(socket, name):  # not everywhere
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)

    @property
    def local_host(self) -> str:
        """The TCP address of this host as seen by the peer."""
        return str(self._end.getsockname()[0])

    def set_patience(self, timeout_s: float | None) -> None:
        """How long a send or a receive may stand still; None: for ever, or until the other host is gone."""
        self._end.settimeout(timeout_s)

    def send(self, message: Any, file: int | None = None) -> None:
        """Return once the kernel has the message, and the file or what is in it."""
        body = pack_message(message)
        with self._sending, self._use("sending"):
            self._send_part(body)
            if file is None:
                return
            if self._is_pair:
                socket.send_fds(self._end, [b"\0"], [file])
            else:
                length = os.fstat(file).st_size
                self._send_all(_LENGTH.pack(length))
                for offset in range(0, length, CHUNK):
                    self._send_all(os.pread(file, CHUNK, offset))

    def receive(self) -> Any:
        """Wait for the next message."""
        return unpack_message(self.receive_bytes(MAX_MESSAGE), self.send)

    def receive_file(self) -> int:
        """Receive what came with the message before, or a copy of it; the caller closes it."""
        with self._use("receiving"):
            if self._is_pair:
                _, files, _, _ = socket.recv_fds(self._end, 1, 1)
                if not files:
                    raise ChannelLost("the other end closed")
                os.set_inheritable(files[0], False)
                return files[0]
            file = os.memfd_create("weft-adapter")
            try:
                for part in self._receive_part(MAX_FILE):
                    os.write(file, part)
            except BaseException:
                os.close(file)
                raise
            return file

    def send_bytes(self, body: bytes) -> None:
        """Send bytes for `receive_bytes`, without unpacking at the receiver."""
        with self._sending, self._use("sending"):
            self._send_part(body)

    def receive_bytes(self, max_bytes: int) -> bytes:
        """Wait for the next message as it came."""
        with self._use("receiving"):
            return b"".join(self._receive_part(max_bytes))

    def has_data(self, timeout_s: float) -> bool:
        """Return whether data, or the end of the peer, can be received within `timeout_s`."""
        with self._use("waiting"):
            if getattr(self._end, "pending", int)():  # TLS has it already
                return True
            watch = select.poll()
            watch.register(self._end.fileno(), select.POLLIN)
            return bool(watch.poll(timeout_s * 1e3))

    def wait_for_end(self) -> None:
        """Block until an end is closed, without receiving what arrives before. Any thread."""
        with suppress(ChannelLost), self._use("waiting"):
            watch = select.poll()
            watch.register(self._end.fileno(), select.POLLRDHUP)
            watch.poll()

    def close(self) -> None:
        """Wake the threads that wait at either end. Any thread."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            with suppress(OSError):  # the other end was faster
                socket.socket.shutdown(self._end, socket.SHUT_RDWR)  # without TLS's goodbye
            if not self._n_users:
                self._end.close()

    @contextmanager
    def _use(self, doing: str) -> Generator[None]:
        """Keep the descriptor open meanwhile. Raises ChannelLost."""
        with self._state:
            if self._closed:
                raise ChannelLost("this end is closed")
            self._n_users += 1
        try:
            yield
        except TimeoutError as error:
            raise ChannelLost(f"{doing}: timed out") from error
        except (OSError, ValueError) as error:
            raise ChannelLost(f"{doing}: {error}") from error
        finally:
            with self._state:
                self._n_users -= 1
                if self._closed and not self._n_users:
                    self._end.close()

    def _send_part(self, body: bytes) -> None:
        self._send_all(_LENGTH.pack(len(body)) + body)

    def _send_all(self, data: bytes) -> None:
        """Send in chunks: it is each of them that may stand still for so long."""
        left = memoryview(data)
        while left:
            left = left[self._end.send(left[:CHUNK]) :]

    def _receive_part(self, max_bytes: int) -> Generator[bytes]:
        """A length, then as many bytes."""
        (length,) = _LENGTH.unpack(b"".join(self._receive_exactly(_LENGTH.size)))
        if length > max_bytes:
            raise ChannelLost(f"a message of {length} bytes, where {max_bytes} are the most")
        yield from self._receive_exactly(length)

    def _receive_exactly(self, n_bytes: int) -> Generator[bytes]:
        while n_bytes:
            part = self._end.recv(min(n_bytes, CHUNK))
            if not part:
                raise ChannelLost("the other end closed")
            yield part
            n_bytes -= len(part)

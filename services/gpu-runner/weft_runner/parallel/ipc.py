"""Frames between the processes of one runner, over a unix socket pair: a kind, a body of bytes, perhaps a file.

    kind u8 | length u32 | body

Both ends are one program of one version, and no other process can reach the pair: a malformed frame is a bug.
"""

import os
import select
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

HEADER = struct.Struct("<BI")
MOST_BYTES = 1 << 30  # no step of 2^20 tokens comes near


class ChannelLost(Exception):
    """The other end is gone, or does not take or send anything in time."""


@dataclass(frozen=True, slots=True)
class Frame:
    """`file`: a descriptor that came with it and now is this process's; the receiver of the frame closes it."""

    kind: int
    body: bytes
    file: int | None = None


class Channel:
    """One end. One thread sends and one receives at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def set_patience(self, timeout_s: float | None) -> None:
        """How long a send or a receive may stand still; None: for ever."""
        self._end.settimeout(timeout_s)

    def send(self, kind: int, body: bytes = b"", file: int | None = None) -> None:
        """Returns once the kernel has it. Raises ChannelLost."""
        assert len(body) <= MOST_BYTES, len(body)
        header = HEADER.pack(kind, len(body))
        try:
            if file is None:
                self._end.sendall(header + body)
            else:
                sent = socket.send_fds(self._end, [header], [file])
                self._end.sendall(header[sent:] + body)
        except OSError as error:
            raise ChannelLost(f"sending: {error or type(error).__name__}") from error

    def receive(self) -> Frame:
        """The next frame. Raises ChannelLost, also where the other end closed in good order."""
        try:
            header, files, _, _ = socket.recv_fds(self._end, HEADER.size, 1)
            header += self._exactly(HEADER.size - len(header)) if header else b""
            if not header:
                raise ChannelLost("the other end closed")
            for file in files:
                os.set_inheritable(file, False)
            kind, length = HEADER.unpack(header)
            return Frame(kind, self._exactly(length), files[0] if files else None)
        except OSError as error:
            raise ChannelLost(f"receiving: {error or type(error).__name__}") from error

    def has_data(self, timeout_s: float) -> bool:
        """Within that time something can be received, if only that the other end is gone."""
        return bool(select.select([self._end], [], [], timeout_s)[0])

    def wait_for_end(self) -> None:
        """Block until the other end is closed, without receiving what arrives before. Any thread."""
        watch = select.poll()
        watch.register(self._end, select.POLLRDHUP)
        watch.poll()

    def close(self) -> None:
        """Wakes the threads that wait at either end."""
        with suppress(OSError):  # the other end was faster
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _exactly(self, length: int) -> bytes:
        body = bytearray(length)
        view = memoryview(body)
        while view:
            count = self._end.recv_into(view)
            if not count:
                raise ChannelLost("the other end closed within a frame")
            view = view[count:]
        return bytes(body)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends; a child inherits only what it is given by name."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def memfd(name: str) -> int:
    """A file in memory that is gone with the last process that has it open. `name` is for people, in /proc alone."""
    return os.memfd_create(name)

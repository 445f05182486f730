"""Messages between the processes of one runner, over a unix socket pair, perhaps with a file.

Both ends are one program of one version, one of which has started the other, and no other process can reach the pair.
"""

import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, Protocol

from weft_runner.parallel.messages import ChannelLost, pack_message, unpack_message


@contextmanager
def _lost(doing: str) -> Generator[None]:
    try:
        yield
    except BlockingIOError as error:
        raise ChannelLost(f"{doing}: timed out") from error
    except EOFError as error:
        raise ChannelLost("the other end closed") from error
    except OSError as error:
        raise ChannelLost(f"{doing}: {error}") from error


class RankChannel(Protocol):
    """What a rank sees of a channel, over whatever it goes; each method as `Channel`'s."""

    def set_patience(self, timeout_s: float) -> None: ...
    def send(self, message: Any, file: int | None = None) -> None: ...
    def receive(self) -> Any: ...
    def receive_file(self) -> int: ...
    def has_data(self, timeout_s: float) -> bool: ...
    def wait_for_end(self) -> None: ...
    def close(self) -> None: ...


class Users:
    """The threads that use one end of a channel: the last one closes its descriptor.

    One that is about to read would else read from whatever file has its number by then.
    """

    def __init__(
        self,
        end: "Connection[Any, Any] | socket.socket",
        lost: Callable[[str], AbstractContextManager[None]],
        shut_down: Callable[[], None],
    ) -> None:
        """`lost`: raises ChannelLost for the end's errors, with what was done. `shut_down`: wakes who waits in it."""
        self._end, self._lost, self._shut_down = end, lost, shut_down
        self._state, self._n_users, self._closed = threading.Lock(), 0, False

    @contextmanager
    def one(self, doing: str) -> Generator[None]:
        """Raises ChannelLost."""
        with self._state:
            if self._closed:
                raise ChannelLost("this end is closed")
            self._n_users += 1
        try:
            with self._lost(doing):
                yield
        finally:
            with self._state:
                self._n_users -= 1
                if self._closed and not self._n_users:
                    self._end.close()

    def wait_for_end(self) -> None:
        """Block until an end is closed, without receiving what arrives before."""
        with suppress(ChannelLost), self.one("waiting"):
            watch = select.poll()
            watch.register(self._end.fileno(), select.POLLRDHUP)
            watch.poll()

    def close(self) -> None:
        """None uses the end any more."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            with suppress(OSError):  # the other end was faster
                self._shut_down()
            if not self._n_users:
                self._end.close()


class Channel:
    """One end; what it raises is ChannelLost. Any thread sends, one receives at a time."""

    def __init__(self, file: int) -> None:
        self._end, self._sending = Connection(file), threading.Lock()
        self._users = Users(self._end, _lost, self._shut_down)

    def set_patience(self, timeout_s: float) -> None:
        """How long a send or a receive may stand still."""
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        with self._socket() as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, message: Any, file: int | None = None) -> None:
        """Returns once the kernel has it."""
        body = pack_message(message)
        with self._sending, self._users.one("sending"):
            self._end.send_bytes(body)
            if file is not None:
                reduction.send_handle(self._end, file, os.getpid())

    def receive(self) -> Any:
        with self._users.one("receiving"):
            body = self._end.recv_bytes()
        return unpack_message(body, self.send)

    def receive_file(self) -> int:
        """What came with the message before; the caller closes it."""
        with self._users.one("receiving"):
            file = reduction.recv_handle(self._end)
        os.set_inheritable(file, False)
        return file

    def has_data(self, timeout_s: float) -> bool:
        """Within that time something can be received, if only that the other end is gone."""
        with self._users.one("waiting"):
            return self._end.poll(timeout_s)

    def wait_for_end(self) -> None:
        """Block until an end is closed, without receiving what arrives before. Any thread."""
        self._users.wait_for_end()

    def close(self) -> None:
        """Wakes the threads that wait at either end."""
        self._users.close()

    def _shut_down(self) -> None:
        with self._socket() as end:
            end.shutdown(socket.SHUT_RDWR)

    def _socket(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self._end.fileno()))


def memfd(name: str) -> int:
    """A file in memory that is gone with the last process that has it open. `name` is for people, in /proc alone."""
    return os.memfd_create(name)

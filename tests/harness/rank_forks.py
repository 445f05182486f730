"""Ranks that are forked from a process which has imported what they import: torch alone takes a rank two CPU seconds.

    python -m harness.rank_forks CONTROL

Each message on CONTROL, a socket, has the descriptors of one rank, the last of them a socket for its pid and, in the
end, its exit code. From the first HURRIED on, Triton's interpreter hurries in ranks as in who asks. Everything after
the imports is the rank's own start: `weft_runner.worker.__main__`.
"""

import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NoReturn

from weft.process import long_lived_imports
from weft_runner.worker import __main__ as worker

NUMBER = struct.Struct("i")
MAX_FILES = 16
RANK, HURRIED = b"rank", b"hurried rank"


class ForkedRank:
    """A `RankProcess`, and no child of this process."""

    def __init__(self, said: socket.socket) -> None:
        self._said = said
        (self.pid,) = NUMBER.unpack(said.recv(NUMBER.size, socket.MSG_WAITALL))

    def wait(self, timeout: float | None = None) -> int:
        """Any thread may, and several at a time: what is said stays to be read."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._said, selectors.EVENT_READ)
            if not selector.select(timeout):
                raise subprocess.TimeoutExpired(f"rank with pid {self.pid}", timeout or 0.0)
        (code,) = NUMBER.unpack(self._said.recv(NUMBER.size, socket.MSG_PEEK | socket.MSG_WAITALL))
        return code

    def kill(self) -> None:
        """End it, unless it has ended: its pid may be another process's then."""
        try:
            self.wait(0.0)
        except subprocess.TimeoutExpired:
            os.kill(self.pid, signal.SIGKILL)


class RankForks:
    """The process that forks, started when the first rank is."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control, self._its_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ranks = ExitStack()

    def start_rank(self, files: Sequence[int]) -> ForkedRank:
        """In place of `worker_group.start_rank`."""
        if self._process is None:
            number = self._its_control.fileno()
            command = [sys.executable, "-m", "harness.rank_forks", str(number)]
            path = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(command, pass_fds=[number], env={**os.environ, "PYTHONPATH": path})
            self._its_control.close()
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [HURRIED if _is_hurried() else RANK], [*files, theirs.fileno()])
        return ForkedRank(self._ranks.enter_context(ours))

    def close(self) -> None:
        self._control.close()
        self._its_control.close()
        if self._process is not None:
            self._process.wait()
        self._ranks.close()


@contextmanager
def rank_forks() -> Generator[RankForks]:
    """Until the block is left; no rank is left then."""
    forks = RankForks()
    try:
        yield forks
    finally:
        forks.close()


def serve(control: socket.socket) -> None:
    """Fork a rank for each message, and tell how it ended, until the other end is closed and all ranks have ended."""
    ranks: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                if key.fd in ranks:
                    selector.unregister(key.fd)
                    pid, said = ranks.pop(key.fd)
                    os.close(key.fd)
                    with said:
                        _say(said, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    continue
                message, received, _, _ = socket.recv_fds(control, 16, MAX_FILES)
                if not message:
                    selector.unregister(control)
                    continue
                if message == HURRIED:
                    from harness.interpreter import hurry  # most ranks need no Triton

                    hurry()
                *files, last = received
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    for inherited in (control.fileno(), last, *ranks, *(said.fileno() for _, said in ranks.values())):
                        os.close(inherited)
                    _be_rank(files)
                for file in files:
                    os.close(file)
                watched, said = os.pidfd_open(pid), socket.socket(fileno=last)
                _say(said, pid)
                selector.register(watched, selectors.EVENT_READ)
                ranks[watched] = pid, said


def _be_rank(files: Sequence[int]) -> NoReturn:
    """What `subprocess.Popen` does for it otherwise, and its own start."""
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        worker.main([str(file) for file in files])
    except BaseException:  # noqa: BLE001 (it must never go on as what it was forked from)
        traceback.print_exc()
    os._exit(1)


def _is_hurried() -> bool:
    """Does Triton's interpreter hurry in this process?"""
    interpreter = sys.modules.get("harness.interpreter")
    return interpreter is not None and interpreter.hurry.cache_info().currsize > 0


def _say(said: socket.socket, number: int) -> None:
    with suppress(BrokenPipeError):  # whoever asked for the rank has gone
        said.sendall(NUMBER.pack(number))


if __name__ == "__main__":
    with long_lived_imports():
        import weft_runner.worker.loop  # noqa: F401
    serve(socket.socket(fileno=int(sys.argv[1])))

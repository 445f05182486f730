"""Bytes of pages between two runners of one host: slots of shared memory beside the connection that carries messages.

Both ends copy once, at the same time: the sender from its pages to a slot, the receiver from there to its pages. Pages
leave when the sender says so, and no runner sees more of another's memory than it is sent. Whether both are on one host
is found and not assumed: the receiver listens at a name of its incarnation among the abstract Unix sockets, which only
processes of its network namespace reach. The sender hands the memory over there, as a descriptor, with a token that it
repeats on the connection; both check by SO_PEERCRED that the other is of the same user.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weft.domain.ids import RunnerId
from weft.telemetry.logs import kv
from weft_runner.model.kv_memory import Guard
from weft_runner.shell.kv_connection import KvConnectionClosed, accept_until, skip

log = logging.getLogger(__name__)
SLOT_BYTES, SLOTS = 512 << 10, 8  # what is in flight at most: it stays in the cores' caches
RING_BYTES = SLOT_BYTES * SLOTS
TOKEN_BYTES = 32
NO_RING = bytes(TOKEN_BYTES)
HANDOVER_S = 2.0
UNCLAIMED, UNCLAIMED_S = 64, 10.0  # rings whose connection has not come yet
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
Bytes = npt.NDArray[np.uint8]


class KvRing:
    """An end of a ring, used by one thread. Any thread may shut it down. `stall_s`: the longest wait for the peer."""

    carrier = "memory"

    def __init__(self, memory: int, signals: socket.socket, stall_s: float, *, free: int) -> None:
        """`memory`: a descriptor, which is closed here. `free`: slots that this end may use at once."""
        with contextlib.ExitStack() as closing:
            closing.callback(os.close, memory)
            self._map = mmap.mmap(memory, RING_BYTES)
        slots = np.frombuffer(self._map, np.uint8).reshape(SLOTS, SLOT_BYTES)
        self._slots: list[Bytes] = list(slots)
        self._signals, self._stall_s, self._free, self._next = signals, stall_s, free, 0
        signals.setblocking(False)

    def send(self, parts: Sequence[memoryview], guard: Guard) -> bool:
        """All of them; none any more, once the guard says no: False. Raises KvConnectionClosed."""
        return self._pass(parts, guard, to_slot=True)

    def receive(self, parts: Sequence[memoryview], guard: Guard) -> bool:
        """Fill all of them; none any more, once the guard says no: False. Raises KvConnectionClosed."""
        return self._pass(parts, guard, to_slot=False)

    def _pass(self, parts: Sequence[memoryview], guard: Guard, *, to_slot: bool) -> bool:
        parts, left, is_complete = list(parts), sum(map(len, parts)), True
        while left:
            slot, size = self._take(), min(left, SLOT_BYTES)
            with guard as allowed:
                if allowed:
                    _copy(slot[:size], parts, to_slot=to_slot)
                elif to_slot:
                    slot[:size] = 0  # not what the slot held before
                is_complete = is_complete and allowed
            skip(parts, size)
            self._give()
            left -= size
        return is_complete

    def _take(self) -> Bytes:
        """The next slot, when the other end has given it. Raises KvConnectionClosed."""
        while not self._free:
            try:
                n_slots = len(self._signals.recv(SLOTS))
            except BlockingIOError:
                waiting = select.poll()
                waiting.register(self._signals, select.POLLIN)
                if not waiting.poll(self._stall_s * 1e3):
                    raise KvConnectionClosed(f"the other end gives no memory for {self._stall_s:g} s") from None
                continue
            except (OSError, ValueError) as error:
                raise KvConnectionClosed(f"shared memory was closed: {error}") from error
            if not n_slots:
                raise KvConnectionClosed("shared memory was closed")
            self._free = min(self._free + n_slots, SLOTS)
        self._free -= 1
        slot = self._slots[self._next]
        self._next = (self._next + 1) % SLOTS
        return slot

    def _give(self) -> None:
        try:
            self._signals.send(b"\1")
        except OSError as error:
            raise KvConnectionClosed(f"shared memory was closed: {error}") from error

    def shutdown(self) -> None:
        """Wake its thread. Any thread; harmless when done."""
        with contextlib.suppress(OSError):
            self._signals.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Once no thread uses it any more."""
        self._signals.close()


def hand_over(receiver: str, stall_s: float) -> tuple[bytes, KvRing] | None:
    """A ring to a receiver ("uuid/incarnation") and its token; None: it is not on this host, or of another user."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(HANDOVER_S)
        sock.connect(_name(receiver))
        if peer_user(sock) != os.geteuid():
            log.warning("shared memory is refused: a process of another user listens", extra=kv(receiver=receiver))
            sock.close()
            return None
        token, memory = secrets.token_bytes(TOKEN_BYTES), _make_memory()
        try:
            socket.send_fds(sock, [token], [memory])
            if sock.recv(1) != b"\1":
                raise ConnectionError("it was refused")
        except OSError:
            os.close(memory)
            raise
    except OSError as error:
        sock.close()
        log.info("no shared memory with that runner", extra=kv(receiver=receiver, reason=error))
        return None
    return token, KvRing(memory, sock, stall_s, free=SLOTS)


class RingListener:
    """Takes rings from senders of this host, and keeps each until its connection names the token."""

    def __init__(self, runner: RunnerId, stall_s: float) -> None:
        """Listen at this runner's address. Raises OSError."""
        self._stall_s, self._lock = stall_s, threading.Lock()
        self._unclaimed: dict[bytes, tuple[float, KvRing]] = {}  # the oldest first
        self._closed = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(_name(f"{runner.uuid}/{runner.incarnation}"))
        self._listener.listen(UNCLAIMED)
        listening = self._closed, self._listener, self._take_or_refuse, "shared memory"
        self._thread = threading.Thread(target=accept_until, args=listening, name="kv-rings", daemon=True)
        self._thread.start()

    def claim(self, token: bytes) -> KvRing | None:
        """The ring that was handed over with it. Any thread."""
        with self._lock:
            _, ring = self._unclaimed.pop(token, (0.0, None))
            return ring

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(HANDOVER_S)
        self._forget(all_of_them=True)

    def _take_or_refuse(self, sock: socket.socket, _address: object) -> None:
        try:
            self._take(sock)
        except (OSError, ValueError) as error:
            log.warning("shared memory refused", extra=kv(error=error))
            sock.close()

    def _take(self, sock: socket.socket) -> None:
        """Take a ring from a connection. Raises OSError, ValueError for what is no ring of this user's."""
        sock.settimeout(HANDOVER_S)
        if (user := peer_user(sock)) != os.geteuid():
            raise ValueError(f"user {user} is not {os.geteuid()}")
        token, descriptors, _, _ = socket.recv_fds(sock, TOKEN_BYTES, 1)
        if len(token) != TOKEN_BYTES or len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ValueError("no token with one descriptor")
        memory = descriptors[0]
        try:
            _check_memory(memory)
        except (OSError, ValueError):
            os.close(memory)
            raise
        ring = KvRing(memory, sock, self._stall_s, free=0)
        self._forget()
        with self._lock:
            self._unclaimed[token] = (time.monotonic() + UNCLAIMED_S, ring)
        sock.send(b"\1")

    def _forget(self, *, all_of_them: bool = False) -> None:
        """Forget the rings that nobody has claimed in time, and the oldest beyond the bound."""
        with self._lock:
            now = time.monotonic()
            late = [token for token, (deadline, _) in self._unclaimed.items() if deadline < now or all_of_them]
            oldest = list(self._unclaimed)[: max(0, len(self._unclaimed) - UNCLAIMED + 1)]
            for token in {*late, *oldest}:
                self._unclaimed.pop(token)[1].close()


def peer_user(sock: socket.socket) -> int:
    """The user of the process at the other end, by the kernel."""
    return struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1]


def _name(runner: str) -> str:
    return f"\0weft-kv/{runner}"


def _make_memory() -> int:
    memory = os.memfd_create("weft-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, RING_BYTES)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
    return memory


def _check_memory(memory: int) -> None:
    """Check that the memory is sealed at its size: a sender that shrank it would end this process by SIGBUS.

    Raises ValueError.
    """
    if fcntl.fcntl(memory, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(memory).st_size != RING_BYTES:
        raise ValueError("it is not sealed, or has another size")


def _copy(slot: Bytes, parts: Sequence[memoryview], *, to_slot: bool) -> None:
    """Copy between a slot and the parts that it is filled from, or into; the GIL is free meanwhile."""
    at = 0
    for part in parts:
        if at == len(slot):
            break
        size = min(len(part), len(slot) - at)
        here, there = slot[at : at + size], np.frombuffer(part, np.uint8, size)
        if to_slot:
            np.copyto(here, there)
        else:
            np.copyto(there, here)
        at += size

"""The ranks of one runner on several hosts: how they find each other. Rank 0 listens, the others connect.

The first rank of each host starts the others there (`worker.__main__`), and they end with it.

Each of the others has a connection for each channel of a child (`parallel.worker_group`). A connection begins with a
line of JSON: which rank, which channel, of which pool, base and version. Rank 0 answers it with a refusal
by name, or with none. Tensors go over connections that Gloo (NCCL) makes, found through a store of rank 0.
"""

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from weft_kernels.cpu.ranks import FetchedSlots
from weft_runner.errors import ExecutorLost, ExecutorUnavailable, MachineInvalid, StoppedAtStart
from weft_runner.offload.machine import MachineRates, machine_of
from weft_runner.parallel.channel import Channel
from weft_runner.parallel.messages import ChannelLost, pack_message
from weft_runner.parallel.worker_group import END_S, POLL_S, START_S, RankChannels, Worker
from weft_runner.settings import RunnerSettings

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from weft_runner.parallel.process_group import TensorGroup

log = logging.getLogger(__name__)
HANDSHAKE_S = 10.0
RETRY_S = 0.5
MAX_HELLO = 1 << 16
CHANNELS = RankChannels._fields
Secure = Callable[[socket.socket], socket.socket]  # mutual TLS around it; raises OSError where the peer may not


@dataclass(frozen=True, slots=True)
class RankHello:
    """The first message of a connection. `group`: what all ranks of a runner have to agree on, by name.

    `machine`: what its host can do (`MachineRates`), of the first rank there, if the runner finds a policy.
    """

    rank: int
    channel: str
    pid: int
    group: Mapping[str, str]
    machine: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RemoteProcess:
    """A rank on another host, as far as it shows: it has ended when its connection has."""

    pid: int
    loads: Channel

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its connection alone: its pod waits for the process."""
        if timeout is None:
            self.loads.wait_for_end()
        return -1

    def kill(self) -> None:
        """Do nothing: its connection is closed, which ends it."""


class HostsMeeting:
    """A RankMeeting of several hosts. `local_host`: the address of this host that the others reach."""

    def __init__(self, store: "Store", local_host: str) -> None:
        self.store, self.interface = store, interface_of(local_host)

    @classmethod
    def of_rank_0(cls, size: int, local_host: str, timeout_s: float) -> tuple["HostsMeeting", int]:
        """Open the store of rank 0. Returns also the port that the others need."""
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        store = TCPStore(
            local_host, 0, size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
        return cls(store, local_host), store.port

    @classmethod
    def of_another(cls, host: str, port: int, size: int, local_host: str, timeout_s: float) -> "HostsMeeting":
        """Connect to the store of rank 0. Raises ExecutorLost."""
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        try:
            store = TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise ExecutorLost(f"the store of rank 0 at {host}:{port} does not answer: {error}") from error
        return cls(store, local_host)

    def open_store(self, size: int) -> "Store":
        del size  # it knows
        return self.store

    def slots(self, native: Any, tensor: "TensorGroup", stage: int, slot_bytes: int, patience_s: float) -> FetchedSlots:
        """Make slots fetched by Gloo, which has a separate patience."""
        del native, stage, patience_s
        slots = FetchedSlots(rank=tensor.rank, size=tensor.size, slot_bytes=slot_bytes)
        slots.fetch = tensor.fetch_slots
        return slots

    def close(self) -> None:
        """Drop the store, which ends with its last reference."""
        del self.store


def interface_of(host: str) -> str:
    """Find the name of the network interface with this address. Raises ExecutorUnavailable."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return name
    raise ExecutorUnavailable(f"no network interface of this host has the address {host}")


# ---- rank 0


class RankListener:
    """The socket for connections of the other ranks, until all ranks are connected."""

    def __init__(self, listener: socket.socket, group: Mapping[str, str], secure: Secure) -> None:
        """Own `listener`, which listens already."""
        self._listener, self._group, self._secure = listener, dict(group), secure
        self._last_refused = ""
        listener.settimeout(POLL_S)

    def gather(self, size: int, stopping: Callable[[], bool], ended: Sequence[str] = ()) -> list[Worker]:
        """Take ranks 1 .. size - 1, each with all its connections.

        `ended`: why a rank started here will not come, once that is known. Raises ExecutorLost, StoppedAtStart.
        """
        channels: dict[tuple[int, str], tuple[RankHello, Channel]] = {}
        deadline = time.monotonic() + START_S
        with self._listener, ExitStack() as unneeded:
            unneeded.callback(lambda: [channel.close() for _, channel in channels.values()])
            while len(channels) < len(CHANNELS) * (size - 1):
                missing = sorted({rank for rank in range(1, size) for c in CHANNELS if (rank, c) not in channels})
                if stopping():
                    raise StoppedAtStart(f"stopped before ranks {missing} had connected")
                if ended:
                    raise ExecutorLost(ended[0])
                if time.monotonic() >= deadline:
                    message = f"; the last that was refused: {self._last_refused}" if self._last_refused else ""
                    raise ExecutorLost(f"ranks {missing} have not connected within {START_S:.0f} s{message}")
                with suppress(TimeoutError):
                    self._admit(self._listener.accept()[0], size, channels)
            unneeded.pop_all()
        return [self._worker(rank, channels) for rank in range(1, size)]

    def _admit(self, end: socket.socket, size: int, channels: dict[tuple[int, str], tuple[RankHello, Channel]]) -> None:
        """Admit a connection; one that comes again, because it was started anew, takes the place of its former self."""
        end.settimeout(HANDSHAKE_S)
        peer = end.getpeername()
        try:
            channel = Channel(self._secure(end))
        except (OSError, ValueError) as error:
            self._refuse(f"a rank from {peer[0]}: {error}")
            end.close()
            return
        channel.set_patience(HANDSHAKE_S)
        try:
            hello = RankHello(**json.loads(channel.receive_bytes(MAX_HELLO)))
            refused = self._refusal(hello, size)
            channel.send_bytes(json.dumps({"refused": refused}).encode())
        except (ChannelLost, ValueError, TypeError) as error:
            self._refuse(f"a rank from {peer[0]} that did not say who it is: {error}")
            channel.close()
            return
        if refused:
            self._refuse(f"rank {hello.rank} from {peer[0]}: {refused}")
            channel.close()
            return
        channel.set_patience(None)
        previous = channels.pop((hello.rank, hello.channel), None)
        if previous is not None:
            previous[1].close()
        channels[hello.rank, hello.channel] = hello, channel

    def _refuse(self, who_and_why: str) -> None:
        """Log who was refused; rank 0 waits on, since the right one may still come."""
        log.warning("refused: %s", who_and_why)
        self._last_refused = who_and_why

    def _refusal(self, hello: RankHello, size: int) -> str:
        if not 0 < hello.rank < size or hello.channel not in CHANNELS:
            return f"rank {hello.rank} ({hello.channel}) is none of the {size} ranks of this runner"
        try:
            _machine(hello)
        except MachineInvalid as error:
            return f"rates of a machine that are none: {error}"
        differences = [name for name in self._group if hello.group.get(name) != self._group[name]]
        return f"another {', '.join(sorted(differences))} than rank 0 has" if differences else ""

    @staticmethod
    def _worker(rank: int, found: Mapping[tuple[int, str], tuple[RankHello, Channel]]) -> Worker:
        hello, loads = found[rank, "loads"]
        channels = RankChannels(*(found[rank, name][1] for name in CHANNELS))
        return Worker(rank, RemoteProcess(hello.pid, loads), channels, _machine(hello))


def _machine(hello: RankHello) -> MachineRates | None:
    """Read the rates of a rank's host. Raises MachineInvalid."""
    return None if hello.machine is None else machine_of(hello.machine)


# ---- the ranks of a host


@contextmanager
def local_ranks(
    settings: RunnerSettings, files: Mapping[str, Path], on_ended: Callable[[str], None]
) -> Generator[None]:
    """Start the further ranks of this host as processes, which connect to rank 0 themselves.

    They run until rank 0 closes, or the block is left; `on_ended` is told, from any thread, which one did not.
    """
    left = threading.Event()

    def watch(rank: int, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        if code and not left.is_set():  # 0: rank 0 is gone
            on_ended(f"rank {rank} (pid {process.pid}), started here, ended with {code}, see its log")

    with ExitStack() as ending:
        for rank in settings.ranks_here[1:]:
            command = [sys.executable, "-m", "weft_runner.worker"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603
            ending.callback(_end, process)
            assert process.stdin is not None
            process.stdin.write(pack_message(("beside", settings, files, rank)))
            process.stdin.flush()
            threading.Thread(target=watch, args=(rank, process), name=f"watch-rank-{rank}", daemon=True).start()
        ending.callback(left.set)
        yield


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Close a process's standard input, which ends it, and kill it after END_S."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended
        process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---- another rank


def connect(
    address: tuple[str, int], rank: int, group: Mapping[str, str], secure: Secure, stopping: Callable[[], bool],
    machine: MachineRates | None = None,
) -> RankChannels:  # fmt: skip
    """Connect a rank to rank 0, which may not listen yet. `machine`: see `RankHello`.

    Raises ExecutorLost, StoppedAtStart.
    """
    measured = None if machine is None else asdict(machine)
    hellos = [RankHello(rank, channel, os.getpid(), dict(group), measured) for channel in CHANNELS]
    deadline = time.monotonic() + START_S
    waiting = threading.Event()
    while True:
        try:
            return RankChannels(*(_connect(address, hello, secure) for hello in hellos))
        except (OSError, ChannelLost) as error:
            if stopping():
                raise StoppedAtStart(f"rank {rank} was stopped before rank 0 listened") from error
            if time.monotonic() >= deadline:
                raise ExecutorLost(f"rank 0 at {address} has not answered within {START_S:.0f} s: {error}") from error
            waiting.wait(RETRY_S)


def _connect(address: tuple[str, int], hello: RankHello, secure: Secure) -> Channel:
    """Connect one channel. Raises OSError, ChannelLost: try again; ExecutorUnavailable: refused by name."""
    end = socket.create_connection(address, HANDSHAKE_S)
    try:
        made = Channel(secure(end))
    except BaseException:
        end.close()
        raise
    made.set_patience(HANDSHAKE_S)
    try:
        made.send_bytes(json.dumps(asdict(hello)).encode())
        refused = json.loads(made.receive_bytes(MAX_HELLO))["refused"]
        if refused:
            raise ExecutorUnavailable(f"rank 0 refuses rank {hello.rank}: {refused}")
        made.set_patience(None)
    except BaseException:
        made.close()
        raise
    return made

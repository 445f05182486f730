"""The ranks of a runner on several hosts, under mutual TLS: rank 0 gathers them, each of the others serves one."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from weft.process import listen, split_address
from weft.wire.errors import PeerError
from weft.wire.tls import Tls
from weft_runner.offload.machine import MachineRates
from weft_runner.parallel.channel import Channel
from weft_runner.parallel.commands import RankStart, RankStopping
from weft_runner.parallel.hosts import HostsMeeting, RankListener, Secure, connect, local_ranks
from weft_runner.parallel.messages import ChannelLost
from weft_runner.parallel.worker_group import PATIENCE_S, GatheredRanks, GatherRanks, RankChannels
from weft_runner.settings import RunnerSettings
from weft_runner.shell.kv_transfer import secure_end

log = logging.getLogger(__name__)


def group_of(settings: RunnerSettings) -> dict[str, str]:
    """Name what all ranks of a runner have in common."""
    return {
        "pool": settings.pool,
        "base": settings.base_digest,
        "version": version("weft"),
        "offload": "by a policy that is found" if settings.finds_policy else "no policy",
        "split": f"{settings.pipeline_parallel} x {settings.tensor_parallel}, {settings.hosts} hosts",
    }


def secured(settings: RunnerSettings, tls: Tls | None, *, server: bool) -> Secure:
    """Both ends are runners that may speak for pools of this namespace. Plain where nothing else is secured either."""
    namespace = settings.pool.partition("/")[0]

    def secure(end: socket.socket) -> socket.socket:
        try:
            return secure_end(end, tls, namespace, "a rank", server=server)
        except PeerError as error:
            raise OSError(str(error)) from error

    return secure


def gather_ranks(
    settings: RunnerSettings, tls: Tls | None, on_stopping: Callable[[], None] = lambda: None
) -> GatherRanks:
    """Start the ranks of rank 0's host, and wait at `ranks_listen` for all others.

    `on_stopping` is called, from any thread, when one of them is asked to stop. Raises AddressInUse.
    """

    def gather(size: int, files: Mapping[str, Path], stopping: Callable[[], bool]) -> GatheredRanks:
        listener = RankListener(
            listen(settings.ranks_listen, "--advertise and --leader"),
            group_of(settings),
            secured(settings, tls, server=True),
        )
        ended: list[str] = []
        with ExitStack() as ending:
            ending.enter_context(local_ranks(settings, files, ended.append))
            workers = listener.gather(size, stopping, ended)
            local_host = workers[-1].channels.loads.local_host  # that the last host reaches
            meeting, port = HostsMeeting.of_rank_0(size, local_host, PATIENCE_S)
            return GatheredRanks(workers, meeting, port, on_stopping, ending.pop_all())

    return gather


Serve = Callable[[RankChannels, Any], int]


def join_runner(
    settings: RunnerSettings, tls: Tls | None, rank: int, serve: Serve, stopping: threading.Event,
    machine: MachineRates | None = None,
) -> int:  # fmt: skip
    """Serve as this rank, and report to rank 0 when `stopping` is set.

    Raises ExecutorLost, ExecutorUnavailable, StoppedAtStart.
    """
    host, port = split_address(settings.leader)
    secure, joined = secured(settings, tls, server=False), threading.Event()
    channels = connect((host, port), rank, group_of(settings), secure, stopping.is_set, machine)
    local_host = channels.loads.local_host
    threading.Thread(target=_end_with, args=(channels.loads,), name="watch", daemon=True).start()
    threading.Thread(target=_report_stop, args=(channels, stopping, joined), name="stop", daemon=True).start()

    def meet(start: RankStart) -> HostsMeeting:
        joined.set()
        return HostsMeeting.of_another(host, start.store_port, start.grid.size, local_host, start.patience_s)

    return serve(channels, meet)


def stop_on_sigterm() -> threading.Event:
    """An event that SIGTERM sets. Called from the main thread, which may be in any call when the signal comes.

    Handlers of Python run between two instructions of the main thread: one that is just about to wait for a message
    would wait first. What is written to the wakeup descriptor is there at once.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    signal.set_wakeup_fd(writer.fileno())
    stopping = threading.Event()

    def wait(_open: socket.socket) -> None:
        while signal.SIGTERM not in reader.recv(64):
            pass
        stopping.set()

    threading.Thread(target=wait, args=(writer,), name="sigterm", daemon=True).start()
    return stopping


def _report_stop(channels: RankChannels, stopping: threading.Event, joined: threading.Event) -> None:
    """Report to rank 0 once this rank belongs to a runner; before that it ends at once."""
    stopping.wait()
    if not joined.is_set():
        _end()
    log.info("asked to stop: rank 0 drains the runner")
    with suppress(ChannelLost):  # `_end_with` ends this process
        channels.events.send(RankStopping())


def _end_with(loads: Channel) -> None:
    loads.wait_for_end()
    _end()


def _end() -> NoReturn:
    logging.shutdown()
    os._exit(0)  # in whatever state everything is

"""The ranks of a runner on several hosts, under mutual TLS: rank 0 gathers them, each of the others serves one."""

import logging
import math
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from typing import Any, NoReturn

from weft.process import listen, split_address
from weft.telemetry.probes import Probes
from weft.wire.errors import PeerError
from weft.wire.tls import Tls
from weft_runner.parallel.commands import RankStopping
from weft_runner.parallel.hosts import HostsMeeting, RankListener, Secure, connect
from weft_runner.parallel.ipc import ChannelLost
from weft_runner.parallel.process_group import RankMeeting
from weft_runner.parallel.tcp_channel import TcpChannel
from weft_runner.parallel.worker_group import PATIENCE_S, GatheredRanks, GatherRanks, RankChannels
from weft_runner.settings import RunnerSettings
from weft_runner.shell.kv_transfer import check_certificate

log = logging.getLogger(__name__)


def group_of(settings: RunnerSettings) -> dict[str, str]:
    """What all ranks of a runner have in common."""
    return {
        "pool": settings.pool,
        "base": settings.base_digest,
        "version": version("weft"),
        "split": f"{settings.pipeline_parallel} x {settings.tensor_parallel}",
    }


def secured(settings: RunnerSettings, tls: Tls | None, *, server: bool) -> Secure:
    """Both ends are runners that may speak for pools of this namespace. Plain where nothing else is secured either."""
    namespace = settings.pool.partition("/")[0]

    def secure(end: socket.socket) -> socket.socket:
        if tls is None:
            return end
        context = tls.server_context() if server else tls.client_context("runner")
        made = context.wrap_socket(end, server_side=server)
        assert isinstance(made, ssl.SSLSocket)
        try:
            check_certificate(made, namespace, "a rank")
        except PeerError as error:
            made.close()
            raise OSError(str(error)) from error
        return made

    return secure


def gather_ranks(
    settings: RunnerSettings, tls: Tls | None, on_stopping: Callable[[], None] = lambda: None
) -> GatherRanks:
    """For rank 0: waits at `--ranks-listen` for the others. Raises AddressInUse.

    `on_stopping` is called, from any thread, when one of them is asked to stop.
    """

    def gather(size: int, stopping: Callable[[], bool]) -> GatheredRanks:
        listener = listen(settings.ranks_listen, "--ranks-listen")
        workers = RankListener(listener, group_of(settings), secured(settings, tls, server=True)).gather(size, stopping)
        (channel,) = {worker.loads for worker in workers if worker.rank == 1}
        assert isinstance(channel, TcpChannel)
        meeting, port = HostsMeeting.of_rank_0(size, channel.local_host, PATIENCE_S)
        return GatheredRanks(workers, meeting, port, on_stopping)

    return gather


def serve_rank(
    settings: RunnerSettings,
    tls: Tls | None,
    prepare: Callable[[Callable[[], bool]], Callable[[RankChannels, Any], int]],
) -> int:
    """Serve as `--rank` until rank 0 closes; then this process ends, and its pod starts it anew. Returns the exit code.

    Asked to stop (SIGTERM) it makes rank 0 drain the runner, and stays meanwhile. `prepare`: fetches what it serves
    with, and asks meanwhile whether to stop. Raises what `prepare` raises, ExecutorLost, ExecutorUnavailable,
    StoppedAtStart.
    """
    host, port = split_address(settings.leader)
    stopping, joined = stop_on_sigterm(), threading.Event()
    probes = Probes(settings.probes, lambda: None, stall_s=math.inf)  # it ends by itself with rank 0
    probes.start()
    try:
        serve = prepare(stopping.is_set)
        secure = secured(settings, tls, server=False)
        channels = connect((host, port), settings.rank, group_of(settings), secure, stopping.is_set)
        loads = channels.loads
        assert isinstance(loads, TcpChannel)
        local_host = loads.local_host
        threading.Thread(target=_end_with, args=(loads,), name="watch", daemon=True).start()
        stop = channels, stopping, joined
        threading.Thread(target=_report_stop, args=stop, name="stop", daemon=True).start()

        def meet(start: Mapping[str, Any]) -> RankMeeting:
            joined.set()
            size = start["grid"].size
            return HostsMeeting.of_another(host, start["store_port"], size, local_host, start["patience_s"])

        return serve(channels, meet)
    finally:
        probes.close()


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
    """To rank 0, once this rank belongs to a runner; before that it ends at once."""
    stopping.wait()
    if not joined.is_set():
        _end()
    log.info("asked to stop: rank 0 drains the runner")
    with suppress(ChannelLost):  # `_end_with` ends this process
        channels.events.send(RankStopping())


def _end_with(loads: TcpChannel) -> None:
    loads.wait_for_end()
    _end()


def _end() -> NoReturn:
    logging.shutdown()
    os._exit(0)  # in whatever state everything is

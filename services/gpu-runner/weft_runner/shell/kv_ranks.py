"""Streams of KV of a runner of several ranks: each rank has a shell of its own (`core.transfer.shards`).

Rank 0's orders come to the others on the channel of the steps, so that pages are sent after the steps that wrote them
and are received before those that read them. What the others report goes to rank 0 on their channel of events.
"""

import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weft.domain.machine import Close, Closed, Peer, Send
from weft.process import AddressInUse
from weft.wire.errors import PeerError
from weft_runner.core.events import KvAction
from weft_runner.core.transfer.shards import KvShard, ShardComplete, ShardedTransfers, ShardLost, ShardOrder
from weft_runner.core.transfer.transfers import KvIdentity
from weft_runner.model.executor import RankProcesses
from weft_runner.model.kv_memory import KvMemory
from weft_runner.model.layer_progress import CalledLayerCounter
from weft_runner.shell.kv_stream import KvEvent, Post
from weft_runner.shell.kv_transfer import KvPlace, KvStreamShell

log = logging.getLogger(__name__)


class ShardedKvStreams:
    """Streams of all ranks' KV (`engine.KvStreams`), on rank 0."""

    def __init__(self, make_own: Callable[[Post], KvStreamShell], workers: RankProcesses, post: Post) -> None:
        self._workers, self._post = workers, post
        self._transfers, self._lock = ShardedTransfers(len(workers.pids)), threading.Lock()
        self._local = make_own(self._own_event)
        workers.listen(self._shard_event)

    # ---- the engine's thread

    def execute(self, action: KvAction, steps_ahead: int = 0) -> None:
        self._forward(action)
        self._local.execute(action, steps_ahead)

    def send(self, peer: Peer, message: object) -> None:
        self._forward(Send(peer, message))
        self._local.send(peer, message)

    def step_failed(self) -> None:
        """Steps of several ranks are not run again."""

    def close(self) -> None:
        self._local.close()

    def _forward(self, order: KvAction | Send) -> None:
        """Send an order to the ranks. Raises ExecutorLost."""
        with self._lock:
            to_others = self._transfers.ordered(order)
        if to_others is not None:
            self._workers.broadcast("kv", to_others)

    # ---- the streams' threads, and those that take events

    def _own_event(self, event: KvEvent) -> None:
        """Take an event of rank 0. Raises PeerError, which ends the event's stream."""
        with self._lock:
            actions = self._transfers.event(event)
        if isinstance(actions, Closed) and actions != event:
            raise PeerError(actions.reason)
        if actions is not None:
            self._post(actions)

    def _shard_event(self, rank: int, event: ShardComplete | ShardLost) -> None:
        with self._lock:
            actions = self._transfers.shard_event(rank, event)
        if isinstance(actions, Closed):
            self._local.execute(Close(actions.peer, actions.reason))
        if actions is not None:
            self._post(actions)


class RankKv:
    """The streams of another rank. `order` is called from the thread of its steps."""

    def __init__(
        self, rank: int, identity: KvIdentity, place: KvPlace, memory: KvMemory, report: Callable[[Any], None]
    ) -> None:
        """`report`: to rank 0. Raises AddressInUse."""
        self._events: queue.SimpleQueue[KvEvent | None] = queue.SimpleQueue()
        self._shell = KvStreamShell(place, memory, CalledLayerCounter(), self._events.put)
        self.port = self._shell.port
        self._shard, self._report, self._lock = KvShard(rank, identity), report, threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kv-shard", daemon=True)
        self._thread.start()

    def order(self, order: ShardOrder) -> None:
        """When this returns, a dropped transfer touches no page any more."""
        with self._lock:
            self._perform(self._shard.order(order))

    def close(self) -> None:
        """No page is read or written any more when this returns."""
        self._shell.close()
        self._events.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                with self._lock:
                    self._perform(self._shard.event(event))
        except BaseException:
            log.exception("a rank's streams of KV have failed")
            os._exit(1)

    def _perform(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self._shell.send(peer, message)
                case ShardComplete() | ShardLost():
                    self._report(effect)
                case action:
                    self._shell.execute(action)


def rank_kv(
    rank: int, identity: KvIdentity, place: KvPlace, memory: KvMemory, report: Callable[[Any], None], *, waits_for: int
) -> RankKv:
    """Listen `waits_for` ports after the port of the host's first rank, or at any free port.

    Raises AddressInUse.
    """
    if not waits_for:
        return RankKv(rank, identity, place, memory, report)
    host, _, port = place.listen.rpartition(":")
    try:
        return RankKv(rank, identity, replace(place, listen=f"{host}:{int(port) + waits_for}"), memory, report)
    except (AddressInUse, OverflowError):
        return RankKv(rank, identity, replace(place, listen=f"{host}:0"), memory, report)

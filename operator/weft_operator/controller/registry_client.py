"""A client that sends desired state to the scheduler and takes its reports over one stream that reconnects.

The client keeps the complete table. A connection starts with a snapshot of the table. Afterwards a change leaves at
once; further changes gather for a while and leave as one message. Each message costs scheduler, gateways and runners
work that grows with the table. Nothing is sent before `start()`: an incomplete snapshot would take adapters out of the
route table.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Literal

from weft.domain.routes import AdapterSpec, AdapterStatus, PoolSpec, PoolStatus, RegistryChange
from weft.wire.codec.registry import REGISTRY_TO_SCHEDULER, SCHEDULER_TO_REGISTRY
from weft.wire.streams import ClientStream, channel
from weft.wire.tls import Tls
from weft.wire.v1 import scheduler_pb2 as pb
from weft.wire.v1.scheduler_pb2_grpc import SchedulerStub
from weft_operator.core.actions import PublishAdapter, PublishPool, UnpublishAdapter, UnpublishPool
from weft_operator.core.resources import Ref

RegistryUpdate = PublishPool | UnpublishPool | PublishAdapter | UnpublishAdapter
GATHER_S, GATHER_ENTRY_S = 0.1, 0.0002  # between two messages: at least, and for each entry of the table


class RegistryClient:
    """The operator's end of `Scheduler.Registry`. Callbacks come on the event loop and must not block."""

    def __init__(
        self,
        address: str,
        *,
        on_pool: Callable[[str, PoolStatus], None],
        on_adapter: Callable[[str, AdapterStatus], None],
        tls: Tls | None = None,
        term: int = 0,
    ) -> None:
        """Connect nothing yet. `term`: the term of this leader, set until `start()`; 0: without an election."""
        self.term = term
        self._channel = channel(address, tls, "scheduler", hurried=False)
        self._on_pool, self._on_adapter = on_pool, on_adapter
        self._table: dict[tuple[str, str], PoolSpec | AdapterSpec] = {}  # ("pool", name) or ("adapter", uid)
        self._uids: dict[Ref, str] = {}
        self._unloading: set[str] = set()  # unpublished, and not yet reported as held by no runner
        self._changed: set[tuple[str, str]] = set()
        self._sent_at = float("-inf")
        # Versions only have to grow, also across restarts of this process; milliseconds do.
        self._versions = itertools.count(time.time_ns() // 1_000_000)
        self._link: ClientStream[pb.RegistryToScheduler, pb.SchedulerToRegistry] = ClientStream(
            "registry", SchedulerStub(self._channel).Registry, hello=self._hello, on_message=self._received
        )
        self._started = asyncio.Event()

    @property
    def up(self) -> bool:
        return self._link.up

    async def run(self) -> None:
        """Keep the stream up until cancelled."""
        await self._started.wait()
        try:
            await self._link.run()
        finally:
            self._link.close()
            await self._channel.close(None)

    def start(self) -> None:
        """Send the table from now on: it is complete."""
        self._started.set()

    def update(self, action: RegistryUpdate) -> None:
        """Change the table; a connected scheduler gets the change at once, or a moment later with further changes."""
        match action:
            case PublishPool(ref=ref, entry=entry):
                self._set(str(ref), entry, "pool")
            case UnpublishPool(ref=ref):
                self._set(str(ref), None, "pool")
            case PublishAdapter(ref=ref, entry=entry):
                previous = self._uids.get(ref)
                if previous is not None and previous != entry.uid:
                    self._set(previous, None, "adapter")
                self._uids[ref] = entry.uid
                self._set(entry.uid, entry, "adapter")
            case UnpublishAdapter(ref=ref, uid=uid, unload=unload):
                if self._uids.get(ref) == uid:
                    del self._uids[ref]
                if unload:
                    self._unloading.add(uid)
                self._set(uid, None, "adapter")

    def _set(self, name: str, entry: PoolSpec | AdapterSpec | None, kind: Literal["pool", "adapter"]) -> None:
        if entry is None:
            self._table.pop((kind, name), None)
        else:
            self._table[(kind, name)] = entry
        if not self._changed:
            loop, gather_s = asyncio.get_running_loop(), max(GATHER_S, len(self._table) * GATHER_ENTRY_S)
            loop.call_at(max(loop.time(), self._sent_at + gather_s), self._flush)
        self._changed.add((kind, name))

    def _flush(self) -> None:
        if self._changed:
            self._sent_at = asyncio.get_running_loop().time()
            self._link.send(self._message(self._changed))
            self._changed = set()

    def _hello(self) -> list[pb.RegistryToScheduler]:
        self._changed = set()  # the snapshot has it
        return [self._message(set(self._table), snapshot=True)]

    def _message(self, keys: set[tuple[str, str]], *, snapshot: bool = False) -> pb.RegistryToScheduler:
        """Make the message of the present state of these keys. Missing keys are sent as removed."""
        pools: list[PoolSpec] = []
        adapters: list[AdapterSpec] = []
        removed: dict[str, list[str]] = {"pool": [], "adapter": sorted(self._unloading) if snapshot else []}
        for kind, name in sorted(keys):
            match self._table.get((kind, name)):
                case PoolSpec() as entry:
                    pools.append(entry)
                case AdapterSpec() as entry:
                    adapters.append(entry)
                case None:
                    removed[kind].append(name)
        change = RegistryChange(
            snapshot=snapshot,
            pools=tuple(pools),
            adapters=tuple(adapters),
            removed_pools=tuple(removed["pool"]),
            removed_adapters=tuple(removed["adapter"]),
            term=self.term,
            version=next(self._versions),
        )
        return REGISTRY_TO_SCHEDULER.encode(change)

    def _received(self, message: pb.SchedulerToRegistry) -> None:
        match SCHEDULER_TO_REGISTRY.decode(message):
            case PoolStatus() as status:
                self._on_pool(status.pool, status)
            case AdapterStatus() as status:
                if status.removed:
                    self._unloading.discard(status.uid)
                self._on_adapter(status.uid, status)

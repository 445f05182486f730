"""The runner's end of the supervisor's stream: the machine's messages go out, what comes in is an event of the engine.

The machine paces reports and heartbeats. While a forward runs longer than that, this link renews the lease, and stops
when the forward neither ends nor completes a layer (a pass of an offloaded model may take minutes): a runner that
computes nothing must lose its lease.
"""

import asyncio
import time
from collections.abc import Callable, Iterable

from weft.domain.machine import Closed, Connected, Kind, Peer, Received
from weft.domain.runner import Heartbeat, Registered, RunnerOrder, RunnerReport, RunnerSpec
from weft.wire.codec.cluster import RUNNER_TO_SUPERVISOR, SUPERVISOR_TO_RUNNER
from weft.wire.streams import ClientStream, Opener
from weft.wire.v1.supervisor_pb2 import RunnerToSupervisor, SupervisorToRunner
from weft_runner.shell.engine import Engine

STALL_S = 60.0
SUPERVISOR = Peer(Kind.SUPERVISOR, "supervisor")


class SupervisorLink:
    """One event loop; `on_order` is called there with each order."""

    def __init__(
        self, engine: Engine, spec: RunnerSpec, open_stream: Opener, on_order: Callable[[RunnerOrder], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._engine, self._spec, self._on_order, self._clock = engine, spec, on_order, clock
        self._link: ClientStream[RunnerToSupervisor, SupervisorToRunner] = ClientStream(
            "supervisor", open_stream, hello=self._hello, on_message=self._on_message, on_down=self._on_down
        )
        self._lease_s, self._sent_at = 2.0, clock()

    async def run(self) -> None:
        """Until `close`. An exception in any part ends it with that exception (in a group)."""
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(self._keep_lease())
            await self._link.run()
            keeping.cancel()

    def close(self) -> None:
        """What is queued is still sent."""
        self._link.close()

    def send(self, message: RunnerReport | Heartbeat) -> None:
        """Dropped where no stream is open: a new one begins with a full report."""
        if self._link.send(RUNNER_TO_SUPERVISOR.encode(message)):
            self._sent_at = self._clock()

    def _hello(self) -> Iterable[RunnerToSupervisor]:
        self._engine.post(Connected(SUPERVISOR))
        yield RUNNER_TO_SUPERVISOR.encode(self._spec)

    def _on_message(self, envelope: SupervisorToRunner) -> None:
        message = SUPERVISOR_TO_RUNNER.decode(envelope)
        if isinstance(message, Registered):
            self._lease_s = max(message.lease_ms, 1) / 1e3
        elif isinstance(message, RunnerOrder):
            self._on_order(message)
        self._engine.post(Received(SUPERVISOR, message))

    def _on_down(self, reason: str) -> None:
        self._engine.post(Closed(SUPERVISOR, reason))

    async def _keep_lease(self) -> None:
        layers, advanced = 0, self._clock()
        while True:
            await asyncio.sleep(self._lease_s / 4)
            since, now = self._engine.busy_since, self._clock()
            if (done := self._engine.layers_done) != layers:
                layers, advanced = done, now
            late = now - self._sent_at >= self._lease_s / 4
            if since is not None and late and now - max(since, advanced) <= STALL_S:
                self.send(Heartbeat())

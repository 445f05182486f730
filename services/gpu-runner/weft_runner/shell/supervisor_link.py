"""The runner's end of the supervisor's stream: the machine's messages go out, what comes in is an event of the engine.

The supervisor answers now and then. Where an answer does not come, the link may lead nowhere, and the runner asks over
another connection. Where that is answered and the first one still is not, the runner goes on over the new one. A
supervisor that stands still, is late, or whose answers are lost, answers neither: the old one is kept, which may still
pass what is sent. So no silence takes a lease from a runner that the supervisor hears, and a runner that sends nothing
awaits no answer.

The machine paces reports and heartbeats. While a forward runs longer than that, this link renews the lease, and stops
when the forward neither ends nor completes a layer (a pass of an offloaded model may take minutes): a runner that
computes nothing must lose its lease.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from weft.domain.machine import Closed, Connected, Kind, Peer, Received
from weft.domain.runner import ANSWER_LEASES, Heartbeat, Registered, RunnerOrder, RunnerReport, RunnerSpec
from weft.wire.codec.cluster import RUNNER_TO_SUPERVISOR, SUPERVISOR_TO_RUNNER
from weft.wire.streams import ClientStream
from weft.wire.v1.supervisor_pb2 import RunnerToSupervisor, SupervisorToRunner
from weft.wire.v1.supervisor_pb2_grpc import SupervisorStub
from weft_runner.shell.engine import Engine

STALL_S = 60.0
LATE_LEASES = 0.25  # leases for which an answer may be late: there is time for another connection before a lease ends
ASK_S = 2.0
RECHECK_S = 0.05  # both answers may be on their way at the same time
SUPERVISOR = Peer(Kind.SUPERVISOR, "supervisor")


class SupervisorLink:
    """One event loop; `on_order` is called there with each order. Each channel that it opens is a connection anew."""

    def __init__(
        self, engine: Engine, spec: RunnerSpec, open_channel: Callable[[], grpc.aio.Channel],
        on_order: Callable[[RunnerOrder], None], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._engine, self._spec, self._on_order, self._clock = engine, spec, on_order, clock
        self._open_channel, self._channel = open_channel, open_channel()
        self._link: ClientStream[RunnerToSupervisor, SupervisorToRunner] = ClientStream(
            "supervisor", self._open, hello=self._hello, on_message=self._on_message, on_up=self._on_up,
            on_down=self._on_down,
        )  # fmt: skip
        self._lease_s, self._sent_at = 2.0, clock()
        self._answered_at, self._answers = clock(), 0  # on the present stream
        self._unanswered = asyncio.Event()  # a message that has to be answered was sent, and nothing was heard since

    async def run(self) -> None:
        """Until `close`. An exception in any part ends it with that exception (in a group)."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._keep_lease()), group.create_task(self._watch_answers())]
                await self._link.run()
                for task in tasks:
                    task.cancel()
        finally:
            await self._channel.close(None)

    def close(self) -> None:
        """Close the link after sending all queued messages."""
        self._link.close()

    def send(self, message: RunnerReport | Heartbeat) -> None:
        """Dropped where no stream is open: a new one begins with a full report."""
        if self._link.send(RUNNER_TO_SUPERVISOR.encode(message)):
            self._sent_at = self._clock()
            if self._sent_at >= self._answered_at + self._lease_s * ANSWER_LEASES:
                self._unanswered.set()

    def _open(self, messages: Any, /, *, metadata: Any = None) -> Any:
        return SupervisorStub(self._channel).Runner(messages, metadata=metadata)

    def _hello(self) -> Iterable[RunnerToSupervisor]:
        self._engine.post(Connected(SUPERVISOR))
        yield RUNNER_TO_SUPERVISOR.encode(self._spec)

    def _on_message(self, envelope: SupervisorToRunner) -> None:
        message = SUPERVISOR_TO_RUNNER.decode(envelope)
        self._note_answer()
        if isinstance(message, Registered):
            self._lease_s = max(message.lease_ms, 1) / 1e3
            self._answers += 1
            if self._answers > 1:
                return  # it says no more than that this runner is heard
        elif isinstance(message, RunnerOrder):
            self._on_order(message)
        self._engine.post(Received(SUPERVISOR, message))

    def _note_answer(self) -> None:
        self._answered_at = self._clock()
        self._unanswered.clear()

    def _on_up(self) -> None:
        self._answers = 0
        self._note_answer()

    def _on_down(self, reason: str) -> None:
        self._engine.post(Closed(SUPERVISOR, reason))

    async def _keep_lease(self) -> None:
        layers, advanced = 0, self._clock()
        while True:
            await asyncio.sleep(self._lease_s / 4)
            busy_since, now = self._engine.busy_since, self._clock()
            if (done := self._engine.layers_done) != layers:
                layers, advanced = done, now
            late = now - self._sent_at >= self._lease_s / 4
            if busy_since is not None and late and now - max(busy_since, advanced) <= STALL_S:
                self.send(Heartbeat())

    async def _watch_answers(self) -> None:
        """Look for another way where an answer does not come.

        Only with a supervisor that answers: one of an older version says nothing after its first word.
        """
        while True:
            await self._unanswered.wait()
            await asyncio.sleep(self._lease_s * LATE_LEASES)
            if self._unanswered.is_set() and self._answers > 1 and self._link.up:
                await self._find_another_way()

    async def _find_another_way(self) -> None:
        """Continue over a new connection, if the supervisor answers only on the new connection."""
        opened = self._open_channel()
        stub: Any = HealthStub(opened)  # (its methods are not in the stubs)
        try:
            with suppress(grpc.aio.AioRpcError):
                await stub.Check(HealthCheckRequest(), timeout=ASK_S, wait_for_ready=True)
                await asyncio.sleep(RECHECK_S)
                if self._unanswered.is_set() and self._link.up:
                    opened, self._channel = self._channel, opened
                    self._link.abandon("the supervisor answers on another connection alone")
        finally:
            await opened.close(None)

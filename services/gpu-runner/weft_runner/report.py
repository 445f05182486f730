"""The runner's side of the supervisor's stream: the whole state, the lease, and orders.

The engine answers `TellState` with its whole state; states are asked for at most every `report_ms` while something
changes, and come by themselves for overruns, ends and finishes. Heartbeats renew the lease while nothing changes, and
stop when a forward does not end: a runner that computes nothing must lose its lease.
"""

import asyncio
import time
from collections.abc import Callable, Iterable

from weft.domain.adapter import DesiredChange
from weft.wire.channels import Link, Opener
from weft.wire.v1 import supervisor_pb2
from weft.wire.v1.supervisor_pb2 import RunnerToSupervisor, SupervisorToRunner
from weft_runner.core.events import PoolState
from weft_runner.engine import Engine, TellState
from weft_runner.wire import desired_of, state_to

STALL_S = 60.0
RETRY_S = 5.0


class Reporter:
    """Keeps the supervisor up to date. One event loop; `deliver` is called there with each new state."""

    def __init__(
        self,
        engine: Engine,
        hello: supervisor_pb2.RunnerHello,
        open_stream: Opener,
        on_drain: Callable[[bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._hello, self._on_drain, self._clock = engine, hello, on_drain, clock
        self._link: Link[RunnerToSupervisor, SupervisorToRunner] = Link(
            "supervisor", open_stream, hello=self._greeting, on_message=self._on_message
        )
        self._lease_s, self._report_s = 2.0, 0.05
        self._changed = asyncio.Event()
        self._state: PoolState | None = None
        self._number = 0
        self._sent_at = self._retried_at = clock()
        self._ordered_drain = False
        self._listed: set[str] = set()  # digests of the last complete list

    async def run(self) -> None:
        """Until `close`. An exception in any part ends it with that exception (in a group)."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._ask()), group.create_task(self._keep_lease())]
            await self._link.run()
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """What is queued is still sent."""
        self._link.close()

    def changed(self) -> None:
        """An iteration ran: the state will be told within `report_ms`."""
        self._changed.set()

    def deliver(self, state: PoolState) -> None:
        """A new whole state: tell it at once."""
        self._state = state
        self._send(RunnerToSupervisor(state=self._report(state)))

    def _greeting(self) -> Iterable[RunnerToSupervisor]:
        yield RunnerToSupervisor(hello=self._hello)
        if self._state is not None:
            report = self._report(self._state)
            report.runner.CopyFrom(self._hello)
            yield RunnerToSupervisor(state=report)
        self._changed.set()

    def _report(self, state: PoolState) -> supervisor_pb2.RunnerState:
        self._number += 1
        return state_to(state, runner=self._hello.runner, sequence=self._number)

    def _send(self, message: RunnerToSupervisor) -> None:
        if self._link.send(message):
            self._sent_at = self._clock()

    def _on_message(self, message: SupervisorToRunner) -> None:
        match message.WhichOneof("message"):
            case "registered":
                self._lease_s = max(message.registered.lease_ms, 1) / 1e3
                self._report_s = max(message.registered.report_ms, 1) / 1e3
            case "order":
                self._follow(message.order)
            case _:
                pass  # a newer supervisor's message

    def _follow(self, order: supervisor_pb2.RunnerOrder) -> None:
        if order.has_desired:
            adapters = desired_of(order)
            listed = {adapter.digest for adapter in adapters}
            removed = tuple(sorted(self._listed - listed))
            self._listed = listed
            self._engine.post(DesiredChange(order.desired_version, full=True, adapters=adapters, removed=removed))
            self._changed.set()
        if order.drain != self._ordered_drain:
            self._ordered_drain = order.drain
            self._on_drain(order.drain)

    async def _ask(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._engine.post(TellState(retry=self._retry_is_due()))
            await asyncio.sleep(self._report_s)

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 4)
            if self._state is not None and self._state.not_ready and self._retry_is_due(peek=True):
                self._changed.set()
            if self._clock() - self._sent_at >= self._lease_s / 4 and not self._stalled():
                self._send(RunnerToSupervisor(heartbeat=supervisor_pb2.Heartbeat()))

    def _retry_is_due(self, *, peek: bool = False) -> bool:
        due = self._clock() - self._retried_at >= RETRY_S
        if due and not peek:
            self._retried_at = self._clock()
        return due

    def _stalled(self) -> bool:
        since = self._engine.busy_since
        return since is not None and self._clock() - since > STALL_S

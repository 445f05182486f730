"""Sessions to runners: one per (uuid, incarnation), opened when first needed, never re-opened by itself.

A break ends every request on it at once; whether that incarnation is tried again is the scheduler's decision. A session
without requests closes after a while.
"""

import asyncio
import logging
from collections.abc import Callable, Set

import grpc
import grpc.aio

from weft.telemetry.logs import kv
from weft.wire.channels import Outbox, channel
from weft.wire.errors import PeerError, refused
from weft.wire.tls import Tls
from weft.wire.v1 import runner_pb2, runner_pb2_grpc
from weft_gateway.core.events import RunnerId

log = logging.getLogger(__name__)
ToRunner = runner_pb2.GatewayToRunner
FromRunner = runner_pb2.RunnerToGateway
OnMessage = Callable[[RunnerId, FromRunner], None]
OnLost = Callable[[RunnerId, str], None]
Call = grpc.aio.StreamStreamCall[ToRunner, FromRunner]


class RunnerSessions:
    """All sessions of a gateway. `on_lost` hears of each session's end once, however it ended.

    A PeerError of `on_message` ends that session.
    """

    def __init__(
        self,
        gateway_id: str,
        *,
        on_message: OnMessage,
        on_lost: OnLost,
        connect_s: float,
        idle_s: float,
        tls: Tls | None = None,
    ) -> None:
        self._gateway_id, self._on_message, self._on_lost = gateway_id, on_message, on_lost
        self._connect_s, self._idle_s, self.tls = connect_s, idle_s, tls
        self._open: dict[RunnerId, _Session] = {}
        self._idle_since: dict[RunnerId, float] = {}

    def __len__(self) -> int:
        return len(self._open)

    def send(self, runner: RunnerId, address: str, message: ToRunner) -> None:
        """Send on the session to that incarnation, opened if need be."""
        (self._open.get(runner) or self._new(runner, address)).send(message)

    def tell(self, runner: RunnerId, message: ToRunner) -> None:
        """Send if a session is open; without one the runner has dropped what the message is about."""
        if session := self._open.get(runner):
            session.send(message)

    def drop(self, runner: RunnerId, detail: str) -> None:
        """End the session to that incarnation, now. A later assignment opens a new one."""
        self._idle_since.pop(runner, None)
        if session := self._open.pop(runner, None):
            session.close()
            log.info("session down", extra=kv(runner=runner.uuid, incarnation=runner.incarnation, reason=detail))
        self._on_lost(runner, detail)

    def close_idle(self, used: Set[RunnerId], now: float) -> None:
        """End sessions that no request has used for `idle_s`. `now`: seconds, of any one clock."""
        for runner in list(self._open):
            since = self._idle_since.setdefault(runner, now)
            if runner in used:
                self._idle_since.pop(runner)
            elif now - since >= self._idle_s:
                self.drop(runner, "idle")

    async def close(self) -> None:
        """End all sessions and wait for their streams to close."""
        sessions = list(self._open.values())
        for runner in list(self._open):
            self.drop(runner, "the gateway stops")
        for session in sessions:
            await session.closed()

    def _new(self, runner: RunnerId, address: str) -> "_Session":
        """A new incarnation ends the sessions to older ones of its device."""
        for other in [known for known in self._open if known.uuid == runner.uuid]:
            self.drop(other, "a new incarnation took its place")
        session = _Session(runner, address, self)
        self._open[runner] = session
        return session

    def hello(self, runner: RunnerId) -> ToRunner:
        """For sessions: what is told first."""
        return ToRunner(hello=runner_pb2.SessionHello(gateway_id=self._gateway_id, incarnation=runner.incarnation))

    @property
    def connect_s(self) -> float:
        return self._connect_s

    def take(self, runner: RunnerId, message: FromRunner) -> None:
        """For sessions: a message has come. Raises PeerError."""
        self._on_message(runner, message)

    def ended(self, session: "_Session", detail: str) -> None:
        """For sessions: ended by itself. One that was dropped before is no news."""
        if self._open.get(session.runner) is session:
            self.drop(session.runner, detail)


class _Session:
    """One stream to one incarnation. It ends once."""

    def __init__(self, runner: RunnerId, address: str, owner: RunnerSessions) -> None:
        self.runner, self._address, self._owner = runner, address, owner
        self._outbox: Outbox[ToRunner] = Outbox()
        self._outbox.put(owner.hello(runner))
        self._ready = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"session {runner.uuid}")

    def send(self, message: ToRunner) -> None:
        """Queue a message, in order. An overflow ends the session: the runner does not read."""
        if not self._outbox.put(message) and self._outbox.overflowed:
            self._task.cancel("the runner does not read fast enough")

    def close(self) -> None:
        """End the stream: the runner cancels what it held. Harmless when it has ended."""
        self._outbox.close()
        self._task.cancel("closed")

    async def closed(self) -> None:
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        detail = "closed by the runner"
        try:
            async with channel(self._address, self._owner.tls, "runner") as connection:
                await self._pump(runner_pb2_grpc.RunnerStub(connection).Session(aiter(self._outbox)))
        except grpc.aio.AioRpcError as error:
            detail = f"{error.code().name}: {error.details()}"
        except PeerError as error:
            refused("runner", error, runner=self.runner.uuid)
            detail = f"it broke the contract: {error}"
        except asyncio.CancelledError as error:
            detail = str(error)
        except Exception as error:
            log.exception("session failed", extra=kv(runner=self.runner.uuid))
            detail = repr(error)
        finally:
            self._outbox.close()
            self._owner.ended(self, detail if self._ready.is_set() else f"no session: {detail}")

    async def _pump(self, call: Call) -> None:
        patience = asyncio.create_task(self._patience())
        try:
            async for message in call:
                self._take(message)
        finally:
            patience.cancel()
            call.cancel()

    async def _patience(self) -> None:
        """A runner that does not answer the hello in time is not there."""
        try:
            await asyncio.wait_for(self._ready.wait(), self._owner.connect_s)
        except TimeoutError:
            self._task.cancel(f"no answer from {self._address} within {self._owner.connect_s:g} s")

    def _take(self, message: FromRunner) -> None:
        match message.WhichOneof("message"):
            case "ready":
                self._check(RunnerId(message.ready.runner.uuid, message.ready.runner.incarnation))
            case _ if not self._ready.is_set():
                raise PeerError("a runner says who it is first")
            case "draining":
                log.info("runner drains", extra=kv(runner=self.runner.uuid))
            case _:
                self._owner.take(self.runner, message)

    def _check(self, told: RunnerId) -> None:
        if told != self.runner:
            self._task.cancel(f"another runner answered: {told.uuid} {told.incarnation}")
            return
        self._ready.set()
        log.info("session up", extra=kv(runner=self.runner.uuid, address=self._address))
